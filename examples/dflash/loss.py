"""What a block should have predicted, how much each slot counts, and the cross-entropy in chunks.

Guarantees:
- Logits of all positions never exist at once, in forward or backward: each chunk's gradient is made with its logits,
  in forward (the head is frozen, so the hidden states' gradient is all there is), and backward only scales it.
- Nothing reads the device from the host; a batch without a valid anchor has loss zero and gradients zero.

Source: arXiv 2602.06036, section 4.2 (labels at the same position, weights that decay along the block).
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
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Labels and weights of slots 1 to B-1 of every block.

    Args:
        tokens, document_ids, loss_mask: [T], of the packed row.
        anchors, anchor_valid: [A].
        block_size: B.
        decay: gamma; slot k weighs exp(-(k - 1) / gamma) where its label is supervised, in the anchor's document and
            in the row, and nothing elsewhere.
    Returns:
        labels [A, B-1] int64, weights [A, B-1] float32.
    """
    offsets = torch.arange(1, block_size, device=tokens.device)
    places = anchors[:, None] + offsets
    inside = places < len(tokens)
    places = places.clamp(max=len(tokens) - 1)
    same_document = document_ids[places] == document_ids[anchors][:, None]
    counts = anchor_valid[:, None] & inside & same_document & loss_mask[places] & (document_ids[places] >= 0)
    return tokens[places], torch.exp((1 - offsets) / decay) * counts


def chunk_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: the weighted sum, its gradient for ``hidden``, and where the first choice is the label.

    Args:
        hidden: [n, H]; head: [V, H], both of the compute dtype; labels: [n] int64; weights: [n] float32.
    Returns:
        [] float32, [n, H] of the compute dtype, [n] bool.
    """
    logits = (hidden @ head.t()).float()
    labels = labels[:, None]
    highest, choice = logits.max(-1, keepdim=True)
    at_label = logits.gather(1, labels)
    exps = logits.sub_(highest).exp_()
    total = exps.sum(-1, keepdim=True)
    losses = (total.log() + highest - at_label).squeeze(1) * weights
    gradient = exps.mul_(weights[:, None] / total)  # (softmax - one-hot label) * weight
    if torch.compiler.is_dynamo_compiling():  # fuses with its neighbours; the scatter does not, but is quicker alone
        is_label = labels == torch.arange(len(head), device=head.device)
        gradient = torch.where(is_label, gradient - weights[:, None], gradient)
    else:
        gradient.scatter_add_(1, labels, -weights[:, None])
    return losses.sum(), gradient.to(head.dtype) @ head, (choice == labels).squeeze(1)


@cache
def _compiled_chunk() -> Callable[..., Any]:
    return graphsafe.compile(chunk_cross_entropy, dynamic=False, fullgraph=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        function = _compiled_chunk() if compiled else chunk_cross_entropy
        num_positions, num_chunks = len(hidden), -(-len(hidden) // chunk)
        size = -(-num_positions // num_chunks)  # chunks of one size, so that one compiled form serves all
        padding = num_chunks * size - num_positions
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
            part_loss, gradient[part], correct[part] = function(hidden[part], head, labels[part], weights[part])
            loss = loss + part_loss
        ctx.save_for_backward(gradient[:num_positions])
        correct = correct[:num_positions]
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(gradient.dtype), None, None, None, None, None


def block_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, *, chunk: int, compiled: bool = False
) -> Loss:
    """The loss of a row's blocks, not yet divided by the sum of weights (which is of all replicas).

    Args:
        hidden: [A, B, H], the drafter's output; slot 0, the anchor's own, is not trained.
        head: [V, H], the target's head, frozen.
        labels: [A, B-1]; weights: [A, B-1], from ``labels_and_weights``.
        chunk: positions whose logits exist at once.
        compiled: run the chunks through Inductor.
    """
    slots = hidden[:, 1:].flatten(0, 1)
    weighted_sum, correct = _ChunkedCrossEntropy.apply(
        slots, head, labels.flatten(), weights.flatten(), chunk, compiled
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
    return Loss(weighted_sum, weights.sum(), counts)


def mean_loss(weighted_sum: Tensor, total_weight: Tensor) -> Tensor:
    """The weighted sum over the sum of weights of all replicas; 0 where nothing is weighted."""
    return weighted_sum / total_weight.clamp(min=SMALLEST_WEIGHT)
