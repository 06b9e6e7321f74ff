"""What makes two calls the same to a graph, and the static inputs that a graph reads.

Guarantees:
- Tensors are inputs; everything else, and the state of grad mode, autocast and train/eval, is part of the signature.
- The caller's tensors are never the static inputs, but for those of StaticBuffers and BufferRing, read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from .errors import GraphsafeError, ShapeMismatchError
from .repairs import private
from .structure import Structure

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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
    return read_leaves(leaves, spec, device, modules)


def read_leaves(
    leaves: Sequence[Any], spec: private.TreeSpec, device: torch.device, modules: Sequence[torch.nn.Module]
) -> Call:
    """``read_call`` of arguments that are flattened already."""
    described: list[tuple[object, ...]] = []
    tensors: list[torch.Tensor] = []
    slots: list[int] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in _PLAIN_TENSORS or leaf.is_nested:
                kind = "nested tensor" if leaf.is_nested else type(leaf).__name__
                raise GraphsafeError(
                    f"Input {index} is a {kind}; a graph reads plain dense tensors. Take that out of it first."
                )
            if leaf.layout is not torch.strided:
                raise GraphsafeError(
                    f"Input {index} is a tensor of layout {leaf.layout}; a graph reads dense tensors of fixed size. "
                    "Pad it (graphsafe.padding)."
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
        described.append((type(leaf), repr(leaf) if isinstance(leaf, Number) else leaf))  # -0.0 == 0.0 and nan != nan
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), private.autocast_state(device.type))
    training = tuple(module.training for module in modules)
    key = (spec, tuple(described), state, training)
    return Call(key, tuple(tensors), tuple(slots), spec, tuple(leaves))


def differs(call: Call, key: Any) -> str:
    """What tells ``call`` from another signature, in words."""
    own: Any = call.key
    (spec, described, state, _), (own_spec, own_described, own_state, _) = key, own
    if spec != own_spec or len(described) != len(own_described):
        return "its arguments are nested otherwise than those of the first"
    odd = [str(i) for i, (one, other) in enumerate(zip(described, own_described, strict=True)) if one != other]
    if odd:
        return f"argument {', '.join(odd)} is unlike that of the first (counted from 0, containers taken apart)"
    return "grad mode, inference mode or autocast differ" if state != own_state else "train/eval of a module differs"


def likeness(call: Call, arguments: Any, device: torch.device) -> Callable[[Any], list[torch.Tensor] | None]:
    """A function that tells at little cost whether a further call is like ``call``, train/eval flags excepted.

    It takes arguments in the form of ``arguments``, which are those of ``call``, and returns the tensors to copy into
    the static inputs, or None where the call is not like the known one.
    """
    device_index, device_type = -1 if device.index is None else device.index, device.type
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device_type))
    grad_mode, inference_mode, autocast = modes
    autocast_state = private.autocast_state(device_type)
    structure, num = Structure(arguments), len(call.leaves)
    flat = type(arguments) is tuple and list(map(id, arguments)) == list(map(id, call.leaves))
    read = [(i, x) for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor) and not is_static(x)]
    tensors = [(i, x.shape, x.dtype, x.stride(), x.requires_grad) for i, x in read]
    indices = {i for i, _ in read}
    others = [(i, x) for i, x in enumerate(call.leaves) if i not in indices]
    tensor_type, strided = torch.Tensor, torch.strided
    is_grad, is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
    is_autocast = torch.is_autocast_enabled

    def alike(arguments: Any) -> list[torch.Tensor] | None:
        if flat and type(arguments) is tuple:
            leaves: Any = arguments  # a container among them is no tensor, and none of the other values
            if len(leaves) != num:
                return None
        else:
            leaves = structure.leaves(arguments)
            if leaves is None:
                return None
        found = []
        for index, shape, dtype, strides, requires_grad in tensors:
            leaf = leaves[index]
            if not (
                isinstance(leaf, tensor_type)
                and leaf.shape == shape
                and leaf.dtype is dtype
                and leaf.layout is strided
                and leaf.stride() == strides
                and leaf.requires_grad is requires_grad
                and leaf.get_device() == device_index
            ):
                return None
            found.append(leaf)
        for index, value in others:
            if leaves[index] is not value:
                return None
        if (
            is_grad() is not grad_mode
            or is_inference() is not inference_mode
            or is_autocast(device_type) is not autocast
            or (autocast and private.autocast_state(device_type) != autocast_state)
        ):
            return None
        return found

    return alike


def copied(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with copies of the tensors among them: three or more with one fused launch."""
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    copies = list(leaves)
    if len(indices) < 3:
        for index in indices:
            copies[index] = leaves[index].clone()
        return copies
    for index in indices:
        copies[index] = torch.empty_like(leaves[index])
    torch._foreach_copy_([copies[index] for index in indices], [leaves[index] for index in indices])
    return copies


def _like(tensor: torch.Tensor) -> torch.Tensor:
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if overlaps:  # an expanded tensor cannot be written to
        return torch.empty_like(tensor, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class StaticInputs:
    """A graph's own copies of the tensors of a call.

    Attributes:
        tensors: one an input; those of StaticBuffers are the caller's.
        indices, copied: which of them are copies, and these.
    """

    def __init__(self, call: Call) -> None:
        self.tensors = tuple(tensor if is_static(tensor) else _like(tensor) for tensor in call.tensors)
        self.indices = [index for index, tensor in enumerate(call.tensors) if not is_static(tensor)]
        self.copied = [self.tensors[index] for index in self.indices]

    def load(self, call: Call) -> None:
        """Copy a call's tensors in, with one fused launch. Enqueues on the current stream."""
        self.load_tensors([call.tensors[index] for index in self.indices], torch.is_grad_enabled())

    def load_tensors(self, tensors: list[torch.Tensor], grad_mode: bool) -> None:
        """The same, of those that are copied."""
        if not self.copied:
            return
        if grad_mode:
            with torch.no_grad():
                torch._foreach_copy_(self.copied, tensors)
        else:
            torch._foreach_copy_(self.copied, tensors)
