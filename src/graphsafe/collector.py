"""Keeps the garbage collector off while anything captures: it could free a graph or device memory in the middle."""

from __future__ import annotations

import gc
import os
import threading

from . import gate


class CollectorGuard:
    """Keeps the garbage collector from running while anything captures; counts its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; taken alone
        self._users = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def forget_other_threads(self) -> None:
        """In a forked child, where no other thread captures."""
        self._lock = threading.Lock()
        if self._users and self._was_enabled and gate.capturing() is None:
            self._users = 0
            gc.enable()

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._was_enabled:
                gc.enable()


collector_guard = CollectorGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_guard.forget_other_threads)
