"""What the step benchmarks train: an MLP, a small transformer and the drafter's shapes, each from the same weights.

Two batches are trained in turn, so that a graph that did not take its inputs over would show in the losses. Each core
is a module from a batch's tensors to a scalar loss. Shape suffixes: B batch, S positions, H hidden.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .drafter_shapes import SHAPES, make_batch, make_mask, make_model

Batch = tuple[Tensor, ...]
LR = 2.0**-13  # a number of float32 too, so that a learning rate on the device is the same one


@dataclass(frozen=True)
class Sizes:
    """Of the MLP (``num_positions`` 0) or of the transformer; ``batch`` is rows, or sequences."""

    width: int
    num_layers: int
    batch: int
    num_positions: int = 0
    num_heads: int = 1
    vocab: int = 0


SIZES = {
    "mlp": Sizes(1024, 8, 256),
    "transformer": Sizes(512, 4, 8, num_positions=256, num_heads=8, vocab=4096),
    "mlp-mini": Sizes(16, 2, 4),
    "transformer-mini": Sizes(16, 2, 2, num_positions=8, num_heads=2, vocab=32),
}
DRAFTERS = {f"drafter-{name}": shape for name, shape in SHAPES.items()}
MINI = ("mlp-mini", "transformer-mini", "drafter-mini")  # for the CPU
FULL = ("mlp", "transformer", "drafter-tiny", "drafter-small", "drafter-q4b-like")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layers = [layer for _ in range(sizes.num_layers) for layer in (nn.Linear(sizes.width, sizes.width), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x_BH: Tensor, targets_BH: Tensor) -> Tensor:
        return (self.layers(x_BH) - targets_BH).float().square().mean()


class Transformer(nn.Module):
    """An encoder over given embeddings and a head: an embedding's backward adds in no fixed order on a GPU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.num_heads, 4 * sizes.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, sizes.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, x_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        logits = self.head(self.encoder(x_BSH)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())


@dataclass
class Training:
    """A core with its batches.

    Attributes:
        core: from ``arrange(batch)`` to the loss.
        arrange: a batch's tensors as the core's arguments, those that are no tensors among them.
        batches: two, to be trained in turn.
        description: shapes and dtypes, for the record.
    """

    core: nn.Module
    arrange: Callable[[Batch], tuple[Any, ...]]
    batches: tuple[Batch, Batch]
    description: dict[str, Any]

    def optimizer(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.core.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=LR, fused=True, capturable=trained[0].is_cuda)

    def loss_fn(self, core: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
        """``loss_fn(*batch)`` over the core, or over what stands for it, such as its compiled form."""
        call, arrange = self.core if core is None else core, self.arrange  # a compiled module may have no truth value
        return lambda *batch: call(*arrange(batch))


def _described(core: nn.Module, batch: Batch) -> dict[str, Any]:
    return {
        "shapes": [list(tensor.shape) for tensor in batch],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in batch],
        "num_trained": sum(p.numel() for p in core.parameters() if p.requires_grad),
    }


def make_training(
    case: str, device: torch.device, *, dtype: str, batch: int | None = None, compiled_whole: bool = False
) -> Training:
    """Weights, batches and core of a case, always the same.

    Args:
        case: a key of ``SIZES`` or of ``DRAFTERS``.
        dtype: a key of ``DTYPES``; drafters have their own.
        batch: rows or sequences; None: the case's. Drafters have their own.
        compiled_whole: whether the core will be compiled as a whole.
    """
    if case in DRAFTERS:
        shape = DRAFTERS[case]
        model, mask = make_model(shape, device, compiled_whole=compiled_whole), make_mask(shape, device)
        first = make_batch(shape, device)
        second = tuple(tensor.flip(1) for tensor in first)
        arrange = lambda batch: (batch[0], batch[1], mask, batch[2], batch[3])  # noqa: E731
        return Training(model, arrange, (first, second), _described(model, first))
    sizes = SIZES[case]
    num_rows = batch or sizes.batch
    torch.manual_seed(0)
    core = (Transformer(sizes) if sizes.num_positions else Mlp(sizes)).to(device, DTYPES[dtype])
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(2):
        if sizes.num_positions:
            x = torch.randn(num_rows, sizes.num_positions, sizes.width, generator=generator)
            targets = torch.randint(sizes.vocab, (num_rows, sizes.num_positions), generator=generator)
            batches.append((x.to(device, DTYPES[dtype]), targets.to(device)))
        else:
            x, y = torch.randn(2, num_rows, sizes.width, generator=generator)
            batches.append((x.to(device, DTYPES[dtype]), y.to(device, DTYPES[dtype])))
    return Training(core, tuple, (batches[0], batches[1]), _described(core, batches[0]))


def plain_step(loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """Forward, backward, optimizer and zeroing; returns the loss, detached."""

    def step(batch: Batch) -> Tensor:
        loss = loss_fn(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def digest(core: nn.Module) -> str:
    """Of the bits of all trained weights."""
    sums = []
    for parameter in core.parameters():
        if parameter.requires_grad:
            bits = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32).flatten()
            # Weighted by place, so that exchanged rows show.
            place = torch.arange(len(bits), device=bits.device) % 8191 + 1
            sums.append((bits.long() * place).sum())
    return hashlib.sha256(repr(torch.stack(sums).tolist()).encode()).hexdigest()[:16]


def configuration(common: dict[str, Any], **counts: Any) -> dict[str, Any]:
    """What a record must say of the machine, and the counts of the run; ``common`` has "device"."""
    device = torch.device(common["device"])
    return {
        **common,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **counts,
    }
