"""What makes two calls the same to a graph, and the static inputs that a graph reads.

Guarantees:
- Tensors are inputs; everything else, and the state of grad mode, autocast and train/eval, is part of the signature.
- The caller's tensors are never the static inputs, but for those of StaticBuffers and BufferRing, read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import GraphsafeError, ShapeMismatchError
from .repairs import private


def is_static(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to StaticBuffers or a BufferRing, so that its address never changes."""
    return getattr(tensor, "_graphsafe_static", False) is True


def describe(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, dtype, device, strides and requires_grad."""
    return (tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.stride(), tensor.requires_grad)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened.

    Attributes:
        key: hashable; equal for calls that one graph may serve.
        slots: addresses of the inputs that are read in place: a graph for each of them.
    """

    key: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...]
    slots: tuple[int, ...]
    spec: private.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def training(self) -> tuple[bool, ...]:
        """The modules' train/eval flags."""
        return self.key[-1]  # type: ignore[return-value]

    @property
    def mode(self) -> tuple[object, ...]:
        """All of the key but what the tensors are like."""
        spec, described, *state = self.key
        return (spec, tuple(part for part in described if len(part) == 2), *state)  # type: ignore[attr-defined]

    def summary(self) -> str:
        """The signature in words, for messages."""
        parts = [
            f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in self.leaves
        ]
        modes = {True: "train", False: "eval"}
        mode = " and ".join(modes[flag] for flag in sorted(set(self.training), reverse=True))
        return f"({', '.join(parts)})" + (f" in {mode} mode" if mode else "")

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The arguments, with other tensors in the place of its own."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return private.tree_unflatten(leaves, self.spec)


def read_call(arguments: Any, device: torch.device, modules: Sequence[torch.nn.Module]) -> Call:
    """Flatten the arguments of a call on ``device``.

    Raises:
        ShapeMismatchError: a tensor lies on another device.
        GraphsafeError: an argument that is no tensor cannot be hashed.
    """
    leaves, spec = private.tree_flatten(arguments)
    described: list[tuple[object, ...]] = []
    tensors: list[torch.Tensor] = []
    slots: list[int] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise GraphsafeError(
                    f"Input {index} is a tensor of layout {leaf.layout}; a graph reads dense tensors of fixed size. "
                    "Pad it (graphsafe.padding), or use mode='eager'."
                )
            if leaf.device != device:
                raise ShapeMismatchError(
                    f"input {index}", f"a tensor on {device}", f"one on {leaf.device}", "Move it there before the call."
                )
            tensors.append(leaf)
            if is_static(leaf):
                slots.append(leaf.data_ptr())
            described.append((*describe(leaf), is_static(leaf)))
            continue
        try:
            hash(leaf)
        except TypeError:
            raise GraphsafeError(
                f"Argument {index}, of type {type(leaf).__name__}, is no tensor and cannot be hashed. What is no "
                "tensor is part of a graph's signature: pass numbers, strings, tuples or frozen objects."
            ) from None
        described.append((type(leaf), leaf))
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), private.autocast_state(device.type))
    training = tuple(module.training for module in modules)
    key = (spec, tuple(described), state, training)
    return Call(key, tuple(tensors), tuple(slots), spec, tuple(leaves))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if overlaps:  # an expanded tensor cannot be written to
        return torch.empty_like(tensor, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class StaticInputs:
    """A graph's own copies of the tensors of a call."""

    def __init__(self, call: Call) -> None:
        self.tensors = tuple(tensor if is_static(tensor) else _like(tensor) for tensor in call.tensors)
        self._copied = [index for index, tensor in enumerate(call.tensors) if not is_static(tensor)]
        self._targets = [self.tensors[index] for index in self._copied]

    def load(self, call: Call) -> None:
        """Copy a call's tensors in, with one fused launch. Enqueues on the current stream."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, [call.tensors[index] for index in self._copied])
