"""A22: guards are freed while another thread evaluates them.

What users see: a segmentation fault on entry to a compiled function, now and then, while a model or an optimizer that
another thread compiled goes away. Cause: a thread gives up the interpreter's lock before it evaluates the guards of a
cache entry, and holds nothing that keeps them; the end of an object that they name frees them.

The repair keeps such guards until every thread that was inside a compiled call as they went out of use has been seen
outside of one. Threads are looked at whenever guards go out of use, so the last few stay until others follow.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from . import private
from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A22"
MODULES: Final = ("torch._dynamo.guards",)
EVIDENCE: Final = Evidence(
    fault="a crash on entry to a compiled function, while what another thread compiled goes away",
    reports=("pytorch/pytorch#193697", "pytorch/pytorch#195355"),
    versions="2.13.0, measured; 2.9 to 2.14 read",
)
_SUSPENDS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_patches = Patches()


@dataclass(eq=False)
class _Kept:
    """Guards out of use with the code that they guard, and the threads that may still read them."""

    guards: Any
    code: Any
    threads: set[int]


# no lock guards it: an object may end, and its guards come here, at any allocation
_kept: list[_Kept] = []


def undo() -> None:
    _patches.undo()
    _let_go()


def probe(module: types.ModuleType) -> bool:
    """Whether the end of an object takes guards out of the cache. (To see them freed is to crash.)"""
    return hasattr(getattr(module, "CheckFunctionManager", None), "invalidate")


def repair(module: types.ModuleType) -> None:
    """Keep guards that go out of use until no thread can be evaluating them."""
    keep_until_unread(_patches, module)


def keep_until_unread(patches: Patches, module: types.ModuleType) -> None:
    """``repair``, undone with ``patches``."""
    invalidate = module.CheckFunctionManager.invalidate
    if not hasattr(module, "DeletedGuardManagerWrapper"):  # what its attribute guard_manager becomes
        raise RepairError("Dynamo keeps the guards of an artefact in an unknown place")

    def make(original: types.FunctionType) -> Callable[..., None]:
        def keep(self: Any, *args: Any, **kwargs: Any) -> None:
            guards = getattr(self, "guard_manager", None)
            code = getattr(getattr(guards, "cache_entry", None), "code", None)
            original(self, *args, **kwargs)
            if guards is not None and self.guard_manager is not guards:
                _kept.append(_Kept(guards, code, _let_go()))

        private.have_dynamo_skip(keep)
        return keep

    # the body: what was compiled before holds the function itself
    patches.body(invalidate, make)


def _let_go() -> set[int]:
    """Free the guards that no thread can be evaluating any more; returns the threads inside a compiled call."""
    earlier = tuple(_kept)  # read first: of guards that come while we look, what we see says nothing
    inside = {thread for thread, frame in sys._current_frames().items() if _is_inside(frame)}
    for kept in earlier:
        kept.threads.intersection_update(inside)
        if not kept.threads:
            with contextlib.suppress(ValueError):  # another thread has let go of it
                _kept.remove(kept)
    return inside


def _is_inside(top: types.FrameType) -> bool:
    """Whether the thread whose innermost frame ``top`` was is inside a compiled call, as far as can be told."""
    frame: types.FrameType | None = top
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if private.enters_compiled_code(code):
            return True
    return bool(code.co_flags & _SUSPENDS)  # no thread begins with one: it went to sleep since, and forgot its caller
