"""A20: what torch notes during a ``fullgraph=True`` call, it notes once for the process.

What users see: functions whose parts after a graph break silently run eagerly, in every thread, while one thread is in
such a call, or for good where two overlapped. (Torch counts compiled frames, or has Dynamo look at no further ones.)

The repair has torch note nothing where the process has other threads. Then frames inside a fullgraph call are looked at
as in older torch, and a fullgraph call that finds nothing to compile does not say so.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, Final

from ._patches import Evidence, Patches, in_another_thread

FAULT: Final = "A20"
MODULES: Final = ("torch._dynamo.eval_frame",)
EVIDENCE: Final = Evidence(
    fault="parts after a graph break that silently run eagerly: another thread is in a fullgraph=True call",
    reports=(),
    versions="2.11, 2.13 and 2.14.1, measured; not 2.9.1 and 2.15.0",
)
_COUNT: Final = "set_fullgraph_compiled_frame_count"
_OVERRIDE: Final = "set_eval_frame_override"
_PROBING: Final = 1 << 20  # a count that makes no call raise

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether another thread sees what this one notes."""
    if hasattr(module, _OVERRIDE):  # to look is to set it, for all
        return True
    if not hasattr(module, _COUNT):
        return False
    note: Callable[[int], int] = getattr(module, _COUNT)
    former = note(_PROBING)
    try:
        return in_another_thread(lambda: note(_PROBING)) == _PROBING
    finally:
        note(former)


def repair(module: types.ModuleType) -> None:
    """Have torch note nothing that another thread would see."""
    if hasattr(module, _COUNT):
        _patches.attribute(module, _COUNT, _count_alone(getattr(module, _COUNT)))
    if hasattr(module, _OVERRIDE):
        _patches.attribute(module, _OVERRIDE, _skip_alone(getattr(module, _OVERRIDE)))


def _count_alone(original: Callable[[int], int]) -> Callable[[int], int]:
    counting: list[int] = []  # the thread that counts compiled frames, alone in the process as its call began

    def set_fullgraph_compiled_frame_count(value: int) -> int:
        """Below 0 is returned to a call that shall count; such a value ends its count."""
        if value < 0:
            if counting != [threading.get_ident()]:
                return value
            counting.clear()
            return original(value)
        if counting or threading.active_count() > 1:
            return 0
        counting.append(threading.get_ident())
        return original(value)

    return set_fullgraph_compiled_frame_count


def _skip_alone(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def set_eval_frame_override(override: Any) -> Any:
        if override.name == "SKIP" and threading.active_count() > 1:
            return type(override).NONE
        return original(override)

    return set_eval_frame_override
