"""Waits on another thread, which hold no place at any gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .deadlines import timeout_s
from .gate import logger, report


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout: float | None, what: str) -> bool:
    """Wait on ``condition``, which the caller holds, until ``predicate()`` or until ``timeout`` seconds have passed.

    Without a timeout it waits for ever, and logs who holds and waits for what every ``GRAPHSAFE_TIMEOUT_S`` seconds.

    Returns:
        ``predicate()`` at the end.
    """
    start = time.monotonic()
    deadline = None if timeout is None else start + timeout
    interval = timeout_s()
    next_report = start + interval
    while not predicate():
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        condition.wait((next_report if deadline is None else min(deadline, next_report)) - now)
        if time.monotonic() >= next_report:
            next_report += interval
            waited, who = time.monotonic() - start, threading.current_thread().name
            condition.release()  # a log handler may use the very object that is waited for
            try:
                logger.warning("Thread %r has waited %.0f s for %s.\n%s", who, waited, what, report())
            finally:
                condition.acquire()
    return True
