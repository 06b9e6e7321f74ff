"""One drafter's training step: masks, forward, loss, backward, clipping and optimizer as one ``graphsafe.TrainStep``.

Guarantees:
- Every shape is fixed by the configuration, and nothing in the step reads the device from the host.
- What a step measured comes back as one tensor on the device (``metrics.Layout``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphsafe

from .attention import AttentionMask, flex_mask, sdpa_mask
from .config import Config, InputError
from .drafter import Drafter, DrafterConfig
from .loss import block_loss, labels_and_weights, mean_loss
from .metrics import measure
from .replicas import Replica

INPUTS = ("features", "tokens", "document_ids", "positions", "loss_mask", "anchors", "anchor_valid")
NUM_WARMUP_STEPS = 3  # eager ones, before the step is captured
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def is_compiled(config: Config, device: torch.device) -> bool:
    """Whether the step's code runs through Inductor. ``graph`` on the CPU does not: there is no launch to save."""
    return config.step == "compile" or (config.step == "graph" and device.type == "cuda")


def target_specs(config: Config, drafter: DrafterConfig) -> dict[str, graphsafe.Spec]:
    """The tensors that a target adds to a batch: features, and with --labels target the tokens that it says."""
    width = len(drafter.target_layer_ids) * drafter.hidden_size
    specs = {"features": graphsafe.Spec((config.token_budget, width), COMPUTE_DTYPES[config.dtype])}
    if config.labels == "target":
        specs["target_tokens"] = graphsafe.Spec((config.token_budget,), torch.int64)
    return specs


def mask_maker(
    config: Config, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, int, int | None], AttentionMask]:
    """The mask of the attention that the configuration chooses: called with anchors, anchor_valid, document_ids, block
    size and window.

    Raises:
        InputError: flex_attention where torch cannot train it.
    """
    if config.attention == "flex" and device.type != "cuda":
        raise InputError("--attention flex trains on CUDA alone; on the CPU use sdpa, or leave it at auto.")
    if config.attention == "sdpa" or device.type != "cuda":
        return sdpa_mask
    return flex_mask


def embed_blocks(embedding: Tensor, tokens: Tensor, anchors: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """The blocks' inputs [A, B, H]: the anchor's token, then mask tokens.

    Args:
        embedding: [V, H], the target's; tokens: [T]; anchors: [A].
    """
    first = F.embedding(tokens[anchors], embedding)[:, None]
    rest = embedding[mask_token_id].expand(len(anchors), block_size - 1, -1)
    return torch.cat([first, rest], dim=1)


class DrafterStep:
    """A drafter, its optimizer and schedule: ``measurements = step(slot)`` trains on one batch.

    Args:
        drafter: on its device; trained in place.
        embedding, head: [V, H], the target's, on the drafter's device in the compute dtype.
        config: the run's.
        num_steps: over which the learning rate goes down.
        replica: this rank; its ``sum_gradients`` is called here.

    Thread safety: one thread, inside a context of the device.
    """

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, config: Config, num_steps: int, replica: Replica
    ) -> None:
        device = head.device
        self.drafter, self.device = drafter, device
        compiled = is_compiled(config, device)
        forward = graphsafe.compile(drafter, dynamic=False, fullgraph=True) if compiled else drafter
        make_mask = mask_maker(config, device)
        block_size, mask_token_id = drafter.config.block_size, drafter.config.mask_token_id
        windows = drafter.config.windows
        decay, smoothing = (config.gamma, None) if config.loss == "decay" else (None, config.dpace_smoothing)

        def loss_fn(
            features: Tensor,
            tokens: Tensor,
            document_ids: Tensor,
            positions: Tensor,
            loss_mask: Tensor,
            anchors: Tensor,
            anchor_valid: Tensor,
            target_tokens: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            labels, weights = labels_and_weights(
                tokens,
                document_ids,
                loss_mask,
                anchors,
                anchor_valid,
                block_size=block_size,
                decay=decay,
                target_tokens=target_tokens,
            )
            blocks = embed_blocks(embedding, tokens, anchors, mask_token_id, block_size)
            block_positions = positions[anchors][:, None] + torch.arange(block_size, device=device)
            masks = {
                kind: make_mask(anchors, anchor_valid, document_ids, block_size, window)
                for kind, window in windows.items()
            }
            hidden = forward(features, blocks, positions, block_positions, masks)
            loss = block_loss(
                hidden, head, labels, weights, chunk=config.loss_chunk, compiled=compiled, smoothing=smoothing
            )
            total = replica.sum(loss.weight)
            return mean_loss(loss.weighted_sum, total), measure(loss, (document_ids >= 0).sum())

        self.optimizer = make_optimizer(drafter, config)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: lr_share(step, num_steps, config.warmup_ratio, config.schedule, config.cooldown_ratio),
        )
        replica.sum_gradients(drafter.parameters())
        self._inputs = INPUTS if config.labels == "data" else (*INPUTS, "target_tokens")
        self._loss_fn, self._replica, self._config = loss_fn, replica, config
        self._step = graphsafe.TrainStep(
            loss_fn,
            self.optimizer,
            model=drafter,
            mode="graph" if config.step == "graph" else "eager",
            max_grad_norm=config.max_grad_norm,
            num_warmup_iters=NUM_WARMUP_STEPS,
        )
        self._num_calls = 0
        self._captures = config.step == "graph" and device.type == "cuda"

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Train on one batch. Returns what was measured.

        Args:
            batch: the tensors named ``INPUTS``, and with --labels target ``target_tokens``, on the device; a ring's
                slot is read in place.
        """
        if self._captures and self._num_calls == NUM_WARMUP_STEPS:
            torch.cuda.empty_cache()  # what the eager steps leave cached goes back, for the graphs' pool
        self._num_calls += 1
        _, measurements = self._step(*(batch[name] for name in self._inputs))
        self.scheduler.step()
        return measurements

    def measure(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What a step would have measured on a batch, this replica's part alone. Trains nothing."""
        with graphsafe.current_context(self.device).eager(rng=False), self._replica.alone(), torch.no_grad():
            measurements: Tensor = self._loss_fn(*(batch[name] for name in self._inputs))[1]
        return measurements

    def warm_up(self, batch: Mapping[str, Tensor], *, measures: bool) -> None:
        """Everything once, so that all is compiled and loaded. Trains nothing, and waits for no other replica.

        Args:
            batch: as for a step.
            measures: ``measure`` too.

        A compile waits for the device, to time kernels, and so may CUDA when it loads a kernel on its first launch. If
        the device waited for another replica meanwhile, and that one's thread for the process's one compile or load at
        a time, neither would go on: so all of it is done before the first collective.
        """
        with graphsafe.current_context(self.device).eager(), self._replica.alone():
            loss, _ = self._loss_fn(*(batch[name] for name in self._inputs))
            loss.backward()
        if measures:
            self.measure(batch)
        self.optimizer.zero_grad(set_to_none=True)
        stand_in = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(self.device)  # clipping and the optimizer
        step = graphsafe.TrainStep(
            lambda: sum(parameter.square().sum() for parameter in stand_in.parameters()),
            make_optimizer(stand_in, self._config),
            mode="eager",
            max_grad_norm=self._config.max_grad_norm,
        )
        step()

    def close(self) -> None:
        """Drop the graphs. To be done before the replica leaves its group, whose communicator they use."""
        self._step.reset()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's gradient norm before clipping, on the device."""
        return self._step.grad_norm


def make_optimizer(drafter: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices only."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    others = [p for p in drafter.parameters() if p.dim() <= 1]
    groups: Sequence[dict[str, object]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def lr_share(
    step: int, num_steps: int, warmup_ratio: float, schedule: str = "cosine", cooldown_ratio: float = 0.2
) -> float:
    """The share of the peak learning rate at ``step`` (from 0): a linear rise, then the schedule, which ends at 0.

    Args:
        schedule: ``cosine``; or ``wsd``: the peak, until over the last ``cooldown_ratio`` of the steps it falls as
            1 - sqrt(share of them that is done). That shape ends lower than a line does (arXiv 2405.18392, section 3).
    """
    num_warmup = math.ceil(warmup_ratio * num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    start = num_warmup if schedule == "cosine" else max(num_warmup, num_steps - math.ceil(cooldown_ratio * num_steps))
    done = min(1.0, max(0, step - start) / max(1, num_steps - start))
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - math.sqrt(done)
