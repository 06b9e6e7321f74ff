"""What a block should have predicted, how much each slot counts, and the cross-entropy in chunks.

Guarantees:
- Logits of all positions never exist at once, in forward or backward: each chunk's gradient is made with its logits,
  in forward (the head is frozen, so the hidden states' gradient is all there is), and backward only scales it. Weights
  that depend on the logits (D-PACE) are made there too, so a chunk then holds whole blocks.
- Nothing reads the device from the host; a batch without a valid anchor has loss zero and gradients zero.

Sources: arXiv 2602.06036, section 4.2 (labels at the same position, weights that decay along the block);
arXiv 2605.18810 (D-PACE: weights from the drafter's own chances).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import graphsafe

SMALLEST_WEIGHT = 1e-9  # a sum of weights is 0 or far above it


@dataclass
class SlotCounts:
    """What the metrics are made of, on the device; slot k drafts the k-th token after the anchor.

    Attributes:
        correct: [B-1] float32: labels that the slot's first choice hits.
        total: [B-1] float32: labels.
        accepted: [B-1] float32: labels hit with all earlier slots of the block right as well.
        blocks: [] float32: blocks with a label. Expected acceptance length is 1 + sum(accepted) / blocks.
    """

    correct: Tensor
    total: Tensor
    accepted: Tensor
    blocks: Tensor


class Loss(NamedTuple):
    """A replica's part of a step: the sum of weighted cross-entropies, the sum of weights, the counts."""

    weighted_sum: Tensor
    weight: Tensor
    counts: SlotCounts


def labels_and_weights(
    tokens: Tensor,
    document_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    anchor_valid: Tensor,
    *,
    block_size: int,
    decay: float | None,
    target_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels and weights of slots 1 to B-1 of every block.

    Args:
        tokens, document_ids, loss_mask: [T], of the packed row.
        anchors, anchor_valid: [A].
        block_size: B.
        decay: gamma; slot k weighs exp(-(k - 1) / gamma) where its label is supervised, in the anchor's document and
            in the row, and nothing elsewhere. None: 1 instead, as D-PACE needs it.
        target_tokens: [T], at p the token that the target holds most likely to follow the one at p. The label of slot
            k is then the one at anchor + k - 1, which follows what the target has read up to there; where it counts is
            decided by the text all the same. None: the label is the text's own token, at anchor + k.
    Returns:
        labels [A, B-1] int64, weights [A, B-1] float32.
    """
    offsets = torch.arange(1, block_size, device=tokens.device)
    places = anchors[:, None] + offsets
    inside = places < len(tokens)
    places = places.clamp(max=len(tokens) - 1)
    same_document = document_ids[places] == document_ids[anchors][:, None]
    counts = anchor_valid[:, None] & inside & same_document & loss_mask[places] & (document_ids[places] >= 0)
    labels = tokens[places] if target_tokens is None else target_tokens[places - 1]
    return labels, counts.float() if decay is None else torch.exp((1 - offsets) / decay) * counts


def dpace_weights(chances: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """How much each slot's log-chance adds to the expected number of accepted tokens (D-PACE), as weights.

    With q~ = (1 - a) q + a, slot j weighs the sum over m >= j of q~_1 ... q~_m: it counts for all slots that are
    reached through it, each as far as it is reached. A slot that does not count, such as those past the document's end,
    has no weight, adds nothing to the sums, and stands in no other's way (as if it were right).

    Args:
        chances: [n, B-1], q: the drafter's probability of each label; constants here.
        counted: [n, B-1], 1 or 0.
        smoothing: a.
    Returns:
        [n, B-1] float32.
    """
    smooth = torch.where(counted > 0, (1 - smoothing) * chances + smoothing, 1.0)
    reached = smooth.cumprod(1) * counted
    return reached.flip(1).cumsum(1).flip(1) * counted


def chunk_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, smoothing: float | None = None, num_slots: int = 1
) -> tuple[Tensor, ...]:
    """One chunk: the weighted sum, its gradient for ``hidden``, and where the first choice is the label.

    Args:
        hidden: [n, H]; head: [V, H], both of the compute dtype; labels: [n] int64; weights: [n] float32.
        smoothing: of D-PACE, whose weights take the place of those that are not 0; None: the weights as they are.
        num_slots: B - 1, of which n is then a multiple.
    Returns:
        [] float32, [n, H] of the compute dtype, [n] bool; with ``smoothing`` the sum of weights, [] float32, as well.
    """
    logits = (hidden @ head.t()).float()
    labels = labels[:, None]
    highest, choice = logits.max(-1, keepdim=True)
    at_label = logits.gather(1, labels)
    exps = logits.sub_(highest).exp_()
    total = exps.sum(-1, keepdim=True)
    losses = (total.log() + highest - at_label).squeeze(1)
    if smoothing is not None:
        chances, counted = (-losses).exp().view(-1, num_slots), weights.view(-1, num_slots)
        weights = dpace_weights(chances, counted, smoothing).flatten()
    gradient = exps.mul_(weights[:, None] / total)  # (softmax - one-hot label) * weight
    if torch.compiler.is_dynamo_compiling():  # fuses with its neighbours; the scatter does not, but is quicker alone
        is_label = labels == torch.arange(len(head), device=head.device)
        gradient = torch.where(is_label, gradient - weights[:, None], gradient)
    else:
        gradient.scatter_add_(1, labels, -weights[:, None])
    found = (losses * weights).sum(), gradient.to(head.dtype) @ head, (choice == labels).squeeze(1)
    return found if smoothing is None else (*found, weights.sum())


@cache
def _compiled_chunk() -> Callable[..., Any]:
    return graphsafe.compile(chunk_cross_entropy, dynamic=False, fullgraph=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunk: int,
        compiled: bool,
        smoothing: float | None,
        num_slots: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        function = _compiled_chunk() if compiled else chunk_cross_entropy
        unit, extra = (1, ()) if smoothing is None else (num_slots, (smoothing, num_slots))  # whole blocks for D-PACE
        num_positions, most = len(hidden), max(1, chunk // unit) * unit
        num_chunks = -(-num_positions // most)
        size = -(-num_positions // (num_chunks * unit)) * unit  # of one size, so that one compiled form serves all
        padding = num_chunks * size - num_positions
        total_weight = weights.sum() if smoothing is None else torch.zeros((), device=hidden.device)
        hidden, labels, weights = (
            F.pad(hidden, (0, 0, 0, padding)),
            F.pad(labels, (0, padding)),
            F.pad(weights, (0, padding)),
        )
        loss = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        correct = torch.empty_like(labels, dtype=torch.bool)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            found = function(hidden[part], head, labels[part], weights[part], *extra)
            part_loss, gradient[part], correct[part] = found[:3]
            loss = loss + part_loss
            if smoothing is not None:
                total_weight = total_weight + found[3]
        ctx.save_for_backward(gradient[:num_positions])
        correct = correct[:num_positions]
        ctx.mark_non_differentiable(correct, total_weight)
        ctx.set_materialize_grads(False)  # no zeros for those two
        return loss, correct, total_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(gradient.dtype), *(None,) * 7


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    chunk: int,
    compiled: bool = False,
    smoothing: float | None = None,
) -> Loss:
    """The loss of a row's blocks, not yet divided by the sum of weights (which is of all replicas).

    Args:
        hidden: [A, B, H], the drafter's output; slot 0, the anchor's own, is not trained.
        head: [V, H], the target's head, frozen.
        labels: [A, B-1]; weights: [A, B-1], from ``labels_and_weights``.
        chunk: positions whose logits exist at once; with ``smoothing`` rounded down to whole blocks, but one at least.
        compiled: run the chunks through Inductor.
        smoothing: D-PACE's a; where ``weights`` are 1, its weights take their place. None: the weights as they are.
    """
    slots = hidden[:, 1:].flatten(0, 1)
    weighted_sum, correct, total_weight = _ChunkedCrossEntropy.apply(
        slots, head, labels.flatten(), weights.flatten(), chunk, compiled, smoothing, labels.shape[1]
    )
    with torch.no_grad():
        counted = weights > 0
        hits = correct.view_as(labels) & counted
        counts = SlotCounts(
            correct=hits.float().sum(0),
            total=counted.float().sum(0),
            accepted=hits.float().cumprod(1).sum(0),
            blocks=counted.any(1).float().sum(),
        )
    return Loss(weighted_sum, total_weight, counts)


def mean_loss(weighted_sum: Tensor, total_weight: Tensor) -> Tensor:
    """The weighted sum over the sum of weights of all replicas; 0 where nothing is weighted.

    D-PACE too is a mean in this way, in nats a token as the other losses. (Its authors divide by the number of
    sequences, so that steps count more as the drafter gets better. AdamW is blind to such a scale.)
    """
    return weighted_sum / total_weight.clamp(min=SMALLEST_WEIGHT)
