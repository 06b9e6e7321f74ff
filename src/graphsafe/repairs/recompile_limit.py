"""A13: a function that has reached the recompile limit runs uncompiled from then on.

What users see: flex_attention runs unfused, which takes memory for all scores at once, and then out of memory. The
limit is one a code object, so many threads and shapes reach it sooner; torch says so once, in a log.

Threads share artefacts (A15), so they no longer use the limit up. Where it is reached all the same, the repair warns
with the function's name, once each, and ``graphsafe.stats()`` tells how often each function was compiled.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..errors import GraphsafeWarning
from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A13"
MODULES: Final = ("torch._dynamo.convert_frame",)
EVIDENCE: Final = Evidence(
    fault="flex_attention runs unfused after the recompile limit, and then runs out of memory",
    reports=("vllm-project/vllm#27178",),
    versions="all read, 2.9 to 2.15",
)

_patches = Patches()
_warned: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # under the compile lock


class _PerThread(threading.local):
    """The function that this thread compiles."""

    code: types.CodeType | None = None


_per_thread = _PerThread()


def undo() -> None:
    _patches.undo()
    _warned.clear()


def probe(module: types.ModuleType) -> bool:
    """Whether Dynamo has a limit at which it compiles no more."""
    return hasattr(module, "exceeds_recompile_limit")


def repair(module: types.ModuleType) -> None:
    """Warn with the function's name where the limit is reached."""
    entry = getattr(module, "ConvertFrameAssert", None)
    if entry is None:
        raise RepairError("torch._dynamo.convert_frame has no ConvertFrameAssert")
    original: Callable[..., Any] = entry.__call__
    exceeds: Callable[..., Any] = module.exceeds_recompile_limit

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        before, _per_thread.code = _per_thread.code, frame.f_code
        try:
            return original(self, frame, *args, **kwargs)
        finally:
            _per_thread.code = before

    @functools.wraps(exceeds)
    def exceeds_recompile_limit(*args: Any, **kwargs: Any) -> Any:
        exceeded = exceeds(*args, **kwargs)
        if exceeded[0] and _per_thread.code is not None:
            _warn(_per_thread.code)
        return exceeded

    _patches.attribute(module, "exceeds_recompile_limit", exceeds_recompile_limit)
    _patches.attribute(entry, "__call__", call)


def _warn(code: types.CodeType) -> None:
    if code in _warned:
        return
    _warned.add(code)
    warnings.warn(
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) has reached torch's recompile limit. Calls "
        "that fit none of its artefacts run uncompiled from now on: flex_attention unfused, with memory for all its "
        "scores. See why it is compiled again with TORCH_LOGS=recompiles; pad inputs to a few shapes "
        "(graphsafe.padding), or raise torch._dynamo.config.recompile_limit.",
        GraphsafeWarning,
        stacklevel=2,
    )
