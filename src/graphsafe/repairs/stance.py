"""The stance of torch.compile, which is one for the process (faults A9 and A10): no repair, a look at it."""

from __future__ import annotations

import sys
from typing import Any


def current() -> str | None:
    """What stance is set right now, in words; None for the default one, or where Dynamo is not imported yet.

    Reads alone: nothing is set, and nothing is imported.
    """
    stance: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    parts = []
    if getattr(stance, "stance", "default") != "default":
        parts.append(repr(stance.stance))
    if getattr(stance, "skip_guard_eval_unsafe", False):
        parts.append("skip_guard_eval_unsafe")
    if getattr(stance, "backend", None) is not None:
        parts.append(f"force_backend={stance.backend!r}")
    return ", ".join(parts) or None
