"""What a capture sees of the operators: the checks that a GPU's capture would fail, and a recorder for the CPU.

Guarantees:
- Host reads, shapes that depend on data, and random numbers from an unknown generator are refused with the operator
  and the user's line, before they return a value.
- Dispatch modes are used on the CPU alone: under one, compiled functions run eagerly.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from .errors import CaptureError
from .repairs import private
from .repairs.private import DispatchMode, tree_flatten, tree_unflatten

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NOT_THE_USERS = (_OURS, _TORCH, "<frozen ", "<eval_with_key")  # the last: code that torch.fx makes

HOST_READ = (
    "The host reads a value that the device computes (.item(), bool(), int(), a branch on a tensor): a replay would go "
    "on with the old value. Keep the value on the device (torch.where, masks), or read it after the step."
)
DATA_SHAPE = (
    "The shape of the result depends on data: a replay would keep the old shape. Use a fixed size: "
    "graphsafe.padding.fixed_nonzero or random_topk, torch.nonzero_static, a mask in place of boolean indexing."
)
UNKNOWN_RNG = (
    "Random numbers come from a generator that the capture does not know: every replay would repeat them. "
    "Draw from the default generator, which is the context's meanwhile."
)
_CURES: tuple[tuple[str, str], ...] = (
    ("offset increment outside graph capture", UNKNOWN_RNG),
    ("generator", UNKNOWN_RNG),
    ("not permitted when stream is capturing", HOST_READ),
    ("previous error during capture", "Another operation broke the capture before this line, or another thread "
     "synchronised the device: graphsafe.install() makes torch.cuda.synchronize() wait for captures."),
    ("dependency created on uncaptured work", "The block waits for a stream or an event that is not part of the "
     "capture. Do hand-overs between streams before or after it."),
)  # fmt: skip


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_USERS) and f"{os.sep}contextlib.py" not in filename


def users_line() -> tuple[str | None, str | None]:
    """``file:line`` and source of the innermost frame that is neither torch's nor ours, of the running code."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_users(filename):
            return f"{filename}:{frame.f_lineno}", linecache.getline(filename, frame.f_lineno).strip() or None
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def code_line(exc: BaseException) -> tuple[str, str | None] | None:
    """``file:line`` and source of the innermost frame of a traceback that is neither torch's nor ours."""
    found = None
    for frame, line in traceback.walk_tb(exc.__traceback__):
        filename = frame.f_code.co_filename
        if _is_users(filename):
            found = (f"{filename}:{line}", linecache.getline(filename, line).strip() or None)
    return found


def explain(exc: BaseException, where: tuple[str, str | None] | None) -> CaptureError:
    """The CaptureError for an error that torch raised because of a capture."""
    text = str(exc)
    first = text.strip().split("\n")[0]
    cure = next((cure for sign, cure in _CURES if sign in text.lower()), None)
    if where is None:
        where_text, operation = None, None
        cure = cure or (
            "The line is not known: an error was swallowed inside the block, or another thread synchronised the "
            "device. Run the block on a CPU context to have the operation named."
        )
    else:
        where_text, operation = where
    error = CaptureError(f"The CUDA graph capture failed: {first}.", operation, where_text, cure)
    error.foreign = "previous error during capture" in text
    return error


_READS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__repr__", "__format__")}


class HostReadChecks(TorchFunctionMode):
    """Refuses the reads by the host that no operator shows on the CPU."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            refuse(f"Tensor.{func.__name__}", "The host read a tensor's value inside a capture.", HOST_READ)
        return func(*args, **(kwargs or {}))


def refuse(operation: str, what: str, cure: str) -> NoReturn:
    """Raise the CaptureError, with the user's line."""
    location, line = users_line()
    raise CaptureError(what, operation if line is None else f"{operation} in `{line}`", location, cure)


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
