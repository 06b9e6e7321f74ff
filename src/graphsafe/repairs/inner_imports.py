"""A25: a hang between an import inside partly compiled code and a compile that imports.

What users see: two threads that hang at their first steps. Cause: Dynamo looks at the frames of an import too, if they
are Python's own and not known to it (a finder that setuptools or an editable install has put in ``sys.meta_path``).
Looking takes the compile lock, with the module's import lock held; a thread that compiles imports with the compile lock
held.

The repair has Dynamo let pass, uncompiled, what an import runs that began inside a compiled call. What a module's own
compiled functions do while it is imported is compiled as ever.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from . import private
from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A25"
MODULES: Final = ("torch._dynamo.convert_frame",)
EVIDENCE: Final = Evidence(
    fault="two threads that hang: one imports inside partly compiled code, the other compiles",
    reports=(),
    versions="2.13.0, measured; 2.9 to 2.14 read",
)
_IMPORTS: Final = "<frozen importlib"

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether one lock for the process guards compiles. (To see more is to hang.)"""
    return hasattr(module, "compile_lock")


def repair(module: types.ModuleType) -> None:
    """Answer Dynamo before it takes the lock where an import asks."""
    from torch._dynamo import types as dynamo_types

    entry, answer = getattr(module, "CatchErrorsWrapper", None), getattr(dynamo_types, "ConvertFrameReturn", None)
    if entry is None or answer is None or not hasattr(answer, "apply_to_code"):
        raise RepairError("Dynamo answers a frame in a way that is not known")
    original: Callable[..., Any] = entry.__call__

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_importing(sys._getframe(1)):
            return answer(apply_to_code=False)  # this frame, this time
        return original(self, frame, *args, **kwargs)

    _patches.attribute(entry, "__call__", call)


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether an import has begun since the innermost compiled call."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            return True
        if private.enters_compiled_code(frame.f_code):
            return False
        frame = frame.f_back
    return False
