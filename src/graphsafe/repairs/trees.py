"""Each thread's CUDA graph trees (``mode="reduce-overhead"``): what it has recorded, and how that ends.

Guarantees:
- A thread's graphs end in that thread, on a seat of their device, so that no capture of another thread meets it: when a
  context ends, when the thread ends, or at its next call where a compiled function was dropped.
- Memory that a living output lies in stays until the output is gone: torch's outputs do not hold it themselves.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from .hooks import hooks

_lock = (
    threading.RLock()
)  # guards the two below; made anew in a forked child; taken alone, also by a finaliser that interrupts it
_living: weakref.WeakSet[ThreadTrees] = weakref.WeakSet()
_kept: list[Any] = []  # managers of ended trees whose outputs live


class ThreadTrees:
    """One thread's trees. Used by that thread; others may only tell it that a function was dropped.

    Attributes:
        containers, locks: what torch keeps for each device: the container of its tree manager, and a lock.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self.locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._functions: dict[int, tuple[int, Callable[..., Any]]] = {}  # key -> device index and what it recorded
        self.dropped: list[int] = []
        with _lock:
            _living.add(self)

    def get(self, key: int) -> Callable[..., Any] | None:
        """What this thread has recorded of the function with that key."""
        if self.dropped and not hooks.capturing():
            self._forget_dropped()
        entry = self._functions.get(key)
        return None if entry is None else entry[1]

    def put(self, key: int, device_index: int, recorded: Callable[..., Any]) -> None:
        self._functions[key] = (device_index, recorded)

    def close(self, device_index: int | None = None) -> None:
        """End the trees on one device, or all. What is called again records anew."""
        indices = set(self.containers) | {index for index, _ in self._functions.values()}
        for index in sorted(indices if device_index is None else indices & {device_index}):
            with hooks.seat_scope(index):
                manager = getattr(self.containers.pop(index, None), "tree_manager", None)
                if manager is not None:
                    torch.cuda.current_stream(index).synchronize()  # memory is free only once no graph runs on it
                for key in [key for key, (owner, _) in self._functions.items() if owner == index]:
                    del self._functions[key]
                _end([manager] if manager is not None else [])

    def _forget_dropped(self) -> None:
        while self.dropped:
            key = self.dropped.pop()
            if key in self._functions:
                with hooks.seat_scope(self._functions[key][0]):
                    del self._functions[key]

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # at the process's end modules' names are gone
            return
        if self.containers or self._functions:
            # In a thread that Python did not start, torch's own Ensure and Release would delete the dying thread a
            # second time (Python before 3.12.5): this one keeps their count above 0.
            ctypes.pythonapi.PyGILState_Ensure()
            self.close()  # at the end of the thread, in it: see _PerThread


class _PerThread(threading.local):
    """This thread's trees; they end when Python clears the thread's values, in the thread."""

    def __init__(self) -> None:
        self.trees = ThreadTrees()


_per_thread = _PerThread()


def mine() -> ThreadTrees:
    """The calling thread's trees."""
    return _per_thread.trees


def drop(key: int) -> None:
    """Have every thread forget the function with that key. Any thread, at any time, in a finaliser too."""
    with _lock:
        living = list(_living)
    for trees in living:
        trees.dropped.append(key)


def _end(managers: list[Any]) -> None:
    """Shut tree managers down, and those of earlier whose outputs are gone by now; on a seat of their device."""
    with _lock:
        waiting = [*_kept, *managers]
        _kept.clear()
    for manager in waiting:
        if manager.graph is None:
            continue
        if manager.live_cudagraph_pool_storages_in_curr_execution():
            with _lock:
                _kept.append(manager)
        else:
            manager.shutdown()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may have been held by a thread that the child has not


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
