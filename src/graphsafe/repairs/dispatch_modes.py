"""A18: a dispatch mode that one thread is in keeps all threads' functions from being compiled.

What users see: a compiled function that silently runs eagerly, in any thread, now and then or from some time on.
Cause: torch asks one flag of the process whether a dispatch mode is active. While one thread is in a mode, other
threads' first calls are skipped; and where two threads' modes overlap, the flag is put back wrongly and stays set.

The repair answers from the modes that the asking thread itself has entered.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A18"
MODULES: Final = ("torch._dynamo.convert_frame",)
EVIDENCE: Final = Evidence(
    fault="a compiled function that silently runs eagerly: another thread is, or was, in a dispatch mode",
    reports=(),
    versions="2.9.1, measured; 2.11 and newer ask the thread's own modes",
)
_QUESTION: Final = "is_in_any_mode_without_ignore_compile_internals"

_patches = Patches()
undo = _patches.undo


class _PerThread(threading.local):
    """The modes that this thread has entered since the repair, outermost first."""

    def __init__(self) -> None:
        self.modes: list[Any] = []


_per_thread = _PerThread()


def probe(module: types.ModuleType) -> bool:
    """Whether Dynamo asks the process's flag alone, and not the thread's own stack of modes."""
    return hasattr(module, _QUESTION) and not hasattr(module, "any_torch_dispatch_mode_on_stack")


def repair(module: types.ModuleType) -> None:
    """Have Dynamo ask for this thread's modes."""
    modes: Any = sys.modules["torch.utils._python_dispatch"]
    mode = getattr(modes, "TorchDispatchMode", None)
    if mode is None or not hasattr(mode, "ignore_compile_internals"):
        raise RepairError("a dispatch mode does not say whether it ignores compiles")
    enter, leave = mode.__enter__, mode.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        result = enter(self)
        _per_thread.modes.append(self)
        return result

    @functools.wraps(leave)
    def left(self: Any, *exc_info: Any) -> Any:
        mine = _per_thread.modes
        for index in reversed(range(len(mine))):  # one that was entered before the repair is not there
            if mine[index] is self:
                del mine[index]
                break
        return leave(self, *exc_info)

    def make(_: types.FunctionType) -> Callable[[], bool]:
        def is_in_any_mode() -> bool:
            return any(not mode.ignore_compile_internals() for mode in _per_thread.modes)

        return is_in_any_mode

    _patches.attribute(mode, "__enter__", entered)
    _patches.attribute(mode, "__exit__", left)
    _patches.body(getattr(module, _QUESTION), make)
