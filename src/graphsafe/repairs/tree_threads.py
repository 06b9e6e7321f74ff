"""A4: graph trees exist in the thread that imported them, and in no other.

What users see: an AssertionError in ``cudagraph_trees.get_obj`` from a worker.

The repair keeps trees for every thread, and ends them with the thread (``trees``). Newer torch makes them for each
thread by itself, but keeps a dead thread's graphs until Python happens to free them, in any thread, so it is repaired
as well. ``torch.compiler.reset`` ends the trees of the thread that calls it.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, Final

from . import trees
from ._patches import Evidence, Patches, RepairError, in_another_thread

FAULT: Final = "A4"
MODULES: Final = ("torch._inductor.cudagraph_trees",)
EVIDENCE: Final = Evidence(
    fault="an AssertionError in cudagraph_trees.get_obj from a worker, and memory of a thread that has ended",
    reports=("pytorch/pytorch#123177",),
    versions="the error: <= 2.12; the memory: all read",
)

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Every torch keeps a dead thread's trees; see ``raises_in_a_worker`` for the error."""
    return hasattr(module, "CUDAGraphTreeManager")


def raises_in_a_worker(module: types.ModuleType) -> bool:
    """Whether a thread other than the one that imported ``module`` gets no trees from torch itself."""

    def raises() -> bool:
        try:
            module.get_obj(threading.local(), "tree_manager_containers")
        except AssertionError:
            return True
        return False

    return in_another_thread(raises)


def repair(module: types.ModuleType) -> None:
    """Have each thread use, and reset, its own trees."""
    trees_local = getattr(module, "local", None)
    if not isinstance(trees_local, threading.local):
        raise RepairError("torch._inductor.cudagraph_trees keeps its trees in no thread-local")

    def make_get(original: types.FunctionType) -> Callable[..., Any]:
        def get_obj(local: Any, name: str) -> Any:
            if local is not trees_local:
                return original(local, name)
            if name == "tree_manager_containers":
                return trees.mine().containers
            return trees.mine().locks if name == "tree_manager_locks" else original(local, name)

        return get_obj

    def make_reset(original: types.FunctionType) -> Callable[..., Any]:
        def reset_cudagraph_trees() -> None:
            trees.mine().close()
            module.MarkStepBox.mark_step_counter = 0

        return reset_cudagraph_trees

    _patches.body(module.get_obj, make_get)
    _patches.body(module.reset_cudagraph_trees, make_reset)
