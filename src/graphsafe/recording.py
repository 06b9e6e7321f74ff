"""What a capture sees of the operators: the checks that a GPU's capture would fail, and a recorder for the CPU.

Guarantees:
- Host reads, shapes that depend on data, and random numbers from an unknown generator are refused with the operator
  and the user's line, before they return a value.
- Dispatch modes are used on the CPU alone: under one, compiled functions run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .failures import DATA_SHAPE, HOST_READ, UNKNOWN_RNG, refuse
from .repairs import private
from .repairs.private import DispatchMode, tree_flatten, tree_unflatten

_READS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__repr__", "__format__")}


class HostReadChecks(TorchFunctionMode):
    """Refuses the reads by the host that no operator shows on the CPU."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            refuse(f"Tensor.{func.__name__}", "The host read a tensor's value inside a capture.", HOST_READ)
        return func(*args, **(kwargs or {}))


class CaptureChecks(DispatchMode):
    """Refuses what a GPU's capture would refuse, or would get wrong at a replay."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        return func(*args, **kwargs)

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tags = getattr(func, "tags", ())
        generator = kwargs.get("generator")
        if generator is not None and not private.same_generator(generator, self._generator):
            refuse(str(func), "Random numbers from an unknown generator were asked for inside a capture.", UNKNOWN_RNG)
        if torch.Tag.data_dependent_output in tags:
            refuse(str(func), "The host read a tensor's value inside a capture.", HOST_READ)
        by_tag = torch.Tag.dynamic_output_shape in tags and not _fixed_after_all(func, args, kwargs)
        if by_tag or _scatters(func, args):
            refuse(str(func), "An operator inside a capture has a shape that depends on data.", DATA_SHAPE)


def _name(func: Any) -> str:
    return func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)


def _has_mask(indices: Any) -> bool:
    found = [index for index in tree_flatten(indices)[0] if isinstance(index, torch.Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in found)


def _scatters(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values are put where a mask is true, which counts the true ones; one value for all does not."""
    return _name(func).startswith(("index_put", "_index_put")) and _has_mask(args[1]) and args[2].numel() != 1


def _fixed_after_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = _name(func)
    if name in ("index", "_unsafe_index"):
        return not _has_mask(args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is not None
    return False


class OperatorRecorder(CaptureChecks):
    """Records the operators of a block below autograd, so that ``replay()`` runs them again on the same tensors."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.draws = True
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = tuple(tensor.detach() for tensor in _fresh(func, result))
        self._calls.append((func, _frozen(args), _frozen(kwargs), outputs))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                if torch.Tag.inplace_view in getattr(func, "tags", ()):
                    continue  # only how a tensor is read has changed, and that for good
                again = _fresh(func, func(*args, **kwargs))
                for output, value in zip(outputs, again, strict=True):
                    output.copy_(value)


def _frozen(arguments: Any) -> Any:
    """The arguments with aliases of their tensors, which keep the shape and strides that these have now."""
    leaves, spec = tree_flatten(arguments)
    return tree_unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _fresh(func: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a result that are neither an argument nor a view of one."""
    returns = func._schema.returns
    if len(returns) == 1:
        result = (result,)
    found: list[torch.Tensor] = []
    for part, declared in zip(result or (), returns, strict=False):
        if declared.alias_info is None:
            found.extend(leaf for leaf in tree_flatten(part)[0] if isinstance(leaf, torch.Tensor))
    return tuple(found)
