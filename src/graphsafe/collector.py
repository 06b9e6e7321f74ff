"""Keeps the garbage collector off while anything captures: it could free a graph or device memory in the middle.

Guarantees:
- ``off()`` and ``on()`` count nothing: each may be called again for the same user, as after an interrupt.
"""

from __future__ import annotations

import gc
import os
import threading

from . import gate


class CollectorGuard:
    """Keeps the garbage collector from running while anyone wants it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; taken alone
        self._users: set[int] = set()  # ids of objects that live until they are done
        self._was_enabled = False

    def off(self, user: object) -> None:
        """Keep it off until ``on(user)``."""
        with self._lock:
            if not self._users:
                self._was_enabled = gc.isenabled()
            self._users.add(id(user))
            gc.disable()

    def on(self, user: object) -> None:
        """Have it as it was before the first user, once this was the last one. Does nothing for others."""
        with self._lock:
            last = id(user) in self._users and len(self._users) == 1
            if last and self._was_enabled:
                gc.enable()
            self._users.discard(id(user))

    def forget_other_threads(self) -> None:
        """In a forked child, where no other thread captures."""
        self._lock = threading.Lock()
        if self._users and gate.capturing() is None:
            self._users.clear()
            if self._was_enabled:
                gc.enable()


collector_guard = CollectorGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_guard.forget_other_threads)
