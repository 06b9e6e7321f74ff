"""Which asyncio task runs in this thread, if any."""

from __future__ import annotations

import sys


def current_task() -> object:
    """The running task, or None. Imports nothing: without asyncio imported there is no task."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return None
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def task_name(task: object) -> str:
    """A task's name, for messages."""
    get_name = getattr(task, "get_name", None)
    return "no task" if get_name is None else str(get_name())
