"""Remembers which calls draw random numbers, so that those that do not run side by side.

Guarantees:
- What is remembered of a signature holds while what the code reads stays what it was.
"""

from __future__ import annotations

from typing import Any

from .memory import MAX_STALE, Memory
from .signature import Call

MAX_NOTED = 4096  # signatures


class Draws:
    """Whether calls of a signature draw random numbers, as far as known.

    Args:
        roots: what the code reaches.
    Thread safety: one thread.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots, self._found = roots, dict[int, bool]()
        self._memory: Memory | None = None
        self._changes = 0  # in a row, each at the next call

    def of(self, call: Call) -> bool | None:
        """None where it is not known: the call may draw."""
        if self._memory is not None:
            if self._memory.holds():
                self._changes = 0
            else:
                self._changes += 1
                self._clear()
        return self._found.get(hash(call.key))

    def note(self, call: Call, drew: bool) -> bool | None:
        """What is known from now on. Where the code reads another thing at every call that is nothing."""
        if self._changes >= MAX_STALE:
            return None
        if len(self._found) > MAX_NOTED:
            self._found.clear()
        if self._memory is None:
            self._memory = Memory(*self._roots)
        self._found[hash(call.key)] = drew
        return drew

    def forget(self) -> None:
        """As if nothing had been called."""
        self._clear()
        self._changes = 0

    def _clear(self) -> None:
        self._found.clear()
        self._memory = None
