"""What the tests share: threads that start together, end by a deadline, and hand their exceptions to the parent."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 30.0


class Hang(AssertionError):
    """Threads outlasted their deadline; the message has the stack of each."""


def stacks(threads: list[threading.Thread]) -> str:
    """Return the current Python stack of each thread, as text."""
    frames = sys._current_frames()
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or -1)
        lines = "".join(traceback.format_stack(frame)) if frame is not None else "  (not running)\n"
        parts.append(f"--- {thread.name}\n{lines}")
    return "\n".join(parts)


def run_threads(n: int, fn: Callable[[int], Any], timeout: float = DEADLINE_S) -> list[Any]:
    """Run ``fn(i)`` for i in range(n) in n threads that start at a barrier.

    Args:
        n: number of threads.
        fn: called with the thread's index, after all threads have started.
        timeout: seconds for all threads together.
    Returns:
        what each call returned, by index.
    Raises:
        Hang: a thread is still running at the deadline; the message has the stacks. Its thread is a daemon.
        Exception: what a thread raised; several come as one ExceptionGroup.
    """
    barrier = threading.Barrier(n)
    results: list[Any] = [None] * n
    errors: list[Exception] = []

    def body(index: int) -> None:
        try:
            barrier.wait(timeout)
            results[index] = fn(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), name=f"test-{i}", daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    join_threads(threads, timeout)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {n} threads failed", errors)
    return results


def join_threads(threads: list[threading.Thread], timeout: float = DEADLINE_S) -> None:
    """Join ``threads`` by one deadline.

    Raises:
        Hang: with the stacks of those that still run.
    """
    end_s = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    hanging = [thread for thread in threads if thread.is_alive()]
    if hanging:
        raise Hang(f"{len(hanging)} of {len(threads)} threads still run after {timeout} s\n{stacks(hanging)}")
