"""What the tests share: threads that start together, end by a deadline, and hand their exceptions to the parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import graphsafe

DEADLINE_S = 30.0
PROGRAM_LIMIT_S = 100
ROOT = Path(__file__).parents[1]
# The torch on which the plain half of a test must show its fault; elsewhere a probe decides.
SHOWS_FAULTS = torch.__version__.split("+")[0] == "2.13.0"


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


@contextmanager
def plain_torch() -> Iterator[None]:
    """Plain torch that has compiled nothing, in the block; afterwards it is repaired again where it was before."""
    was_installed = bool(graphsafe.installed())
    graphsafe.uninstall()
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        graphsafe.uninstall()
        if was_installed:
            graphsafe.install()


def run_program(program: str) -> Any:
    """Run ``program`` in a fresh process with a time limit; returns the JSON of its last line."""
    header = "import faulthandler, json, sys, threading\n"
    header += f"faulthandler.dump_traceback_later({PROGRAM_LIMIT_S - 10}, exit=True)\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", header + program],
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def threads_in_dynamo() -> int:
    """How many threads are inside Dynamo's entry to a compile, be it that they wait for its lock."""
    found = 0
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None and not inner.f_code.co_filename.endswith("_dynamo/convert_frame.py"):
            inner = inner.f_back
        found += inner is not None
    return found
