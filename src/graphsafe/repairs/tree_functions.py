"""A5: what one thread has recorded of a ``reduce-overhead`` function is replayed by all.

What users see: silently wrong results, aborts, "already recording to mempool_id".
Cause: the recorded function, its manager and its static memory belong to whichever thread recorded first; in a backward
on autograd's device thread they do so in newer torch too (A3 keeps backwards from there).

The repair gives each thread that calls a compiled function a recording of its own (``trees``). All share what Inductor
compiled. Inside the thread's own capture such a function runs as plain Inductor code, and becomes part of it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..errors import GraphsafeWarning
from . import trees
from ._patches import Evidence, Patches, RepairError
from .hooks import hooks

FAULT: Final = "A5"
MODULES: Final = ("torch._inductor.compile_fx",)
EVIDENCE: Final = Evidence(
    fault="silently wrong results, or aborts, when threads share a reduce-overhead function",
    reports=(),
    versions="<= 2.12 in forward; in a backward on the shared device thread all read",
)
_keys = itertools.count()

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether recordings belong to whoever runs first on an OS thread, instead of to a thread's trees."""
    return hasattr(module, "cudagraphify")


def repair(module: types.ModuleType) -> None:
    """Have every function that Inductor hands to the trees record once a thread."""

    def make(original: types.FunctionType) -> Callable[..., Any]:
        def cudagraphify(*args: Any, **kwargs: Any) -> Any:
            return _PerThread(args[0] if args else kwargs["model"], original(*args, **kwargs), kwargs["device_index"])

        return cudagraphify

    if _recorded_before():
        warnings.warn(
            "reduce-overhead functions were recorded before graphsafe.install(). Those keep one recording for all "
            "threads, and must not be called from several: call torch.compiler.reset() now, so that they are compiled "
            "anew, or install() before the first call. Everything else is repaired.",
            GraphsafeWarning,
            stacklevel=2,
        )
    if "device_index" not in module.cudagraphify.__code__.co_varnames:
        raise RepairError("torch._inductor.compile_fx.cudagraphify knows no device_index")
    _patches.body(module.cudagraphify, make)


def _recorded_before() -> bool:
    """Whether graph trees of this thread hold recordings that torch made unrepaired."""
    recorded: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    containers = getattr(getattr(recorded, "local", None), "tree_manager_containers", {})
    return any(container.live_cudagraphify_fns > 0 for container in containers.values())


class _PerThread:
    """A compiled function that each thread records for itself.

    Args:
        model: what Inductor compiled.
        run: what torch made of it, to record on its first call.
        device_index: of the CUDA device that it records on.
    """

    def __init__(self, model: Callable[..., Any], run: types.FunctionType, device_index: int) -> None:
        self._model, self._run, self._device_index, self._key = model, run, device_index, next(_keys)
        fresh(run)  # raises now, not at the first call, where torch's function is another one
        weakref.finalize(self, trees.drop, self._key)

    def __call__(self, inputs: Any) -> Any:
        if hooks.capturing():
            return self._model(inputs)
        mine = trees.mine()
        run = mine.get(self._key)
        if run is None:
            run = fresh(self._run)
            mine.put(self._key, self._device_index, run)
        return run(inputs)


_MAKERS: Final[dict[str, Callable[[], object]]] = {"compiled_fn": lambda: None, "thread_local": threading.local}


def fresh(run: types.FunctionType) -> types.FunctionType:
    """A copy of torch's function that has recorded nothing: with a cell of its own for what it records.

    Raises:
        RepairError: torch keeps it elsewhere.
    """
    names, cells = run.__code__.co_freevars, run.__closure__ or ()
    made = {name: types.CellType(_MAKERS[name]()) for name in names if name in _MAKERS}
    if not made:
        raise RepairError("torch keeps what a reduce-overhead function records in an unknown place")
    closure = tuple(made.get(name, cell) for name, cell in zip(names, cells, strict=True))
    return types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, closure)
