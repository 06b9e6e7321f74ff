"""Why Dynamo compiles a frame anew: which guards of the artefacts that it has do not hold.

Guarantees:
- Nothing of Dynamo's is logged or changed. Where this torch cannot tell, there is no reason.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_REASONS = 3  # that are told, the newest artefact's first


class _PerThread(threading.local):
    """What Dynamo looks at in this thread: a frame, and its own object that was called with it."""

    def __init__(self) -> None:
        self.looked_at: tuple[Any, Any] | None = None


_per_thread = _PerThread()


@contextmanager
def looking_at(frame: Any, wrapper: Any) -> Iterator[None]:
    """Dynamo looks at ``frame`` in the block."""
    before, _per_thread.looked_at = _per_thread.looked_at, (frame, wrapper)
    try:
        yield
    finally:
        _per_thread.looked_at = before


def recompile_reason() -> str | None:
    """Why the frame that Dynamo looks at fits no artefact; None where there is none, or Dynamo cannot tell."""
    if _per_thread.looked_at is None:
        return None
    frame, wrapper = _per_thread.looked_at
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo import guards

        entries = list(_debug_get_cache_entry_list(frame.f_code))
        reasons = [reason for entry in entries if (reason := _reason(guards, entry, frame, wrapper))]
    except Exception:  # as another torch may do
        return None
    return "; ".join(dict.fromkeys(reasons[:MAX_REASONS])) or None


def _reason(guards: Any, entry: Any, frame: Any, wrapper: Any) -> str | None:
    explain = guards.get_guard_fail_reason
    known = {
        "guard_manager": entry.guard_manager,
        "code": entry.code,
        "f_locals": frame.f_locals,
        "compile_id": entry.compile_id,
        "backend": _innermost(wrapper),
        "skip_logging": True,
    }
    takes = inspect.signature(explain).parameters
    try:
        if entry.guard_manager.check(frame.f_locals):
            return None  # it fits: what is compiled is something else
        text = str(explain(**{name: value for name, value in known.items() if name in takes}))
    except Exception:  # an artefact whose guards refer to what is gone
        return None
    return text.strip().split("\n")[0].partition(": ")[2] or None  # without the artefact's number


def _innermost(wrapper: Any) -> Any:
    while hasattr(wrapper, "_torchdynamo_orig_backend"):
        wrapper = wrapper._torchdynamo_orig_backend
    return wrapper
