"""One compile at a time, outside every capture, with no seat held.

Guarantees:
- A compile never starts inside a CUDA graph capture: it raises there, and whoever captures compiles first.
- No gate seat is held while a thread compiles or waits for another's compile.
- A wait for a compile is logged with the stacks of all concerned, and ends in a GateTimeout.

Importing it plugs the gate into the repairs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from . import gate
from .deadlines import timeout_s
from .errors import CaptureError, GateTimeout
from .repairs.hooks import hooks

COMPILE_PATIENCE = 10.0  # a wait for a compile may last this many times GRAPHSAFE_TIMEOUT_S: the holder does compile

_lock = threading.RLock()  # first in the order of locks; held for the length of a compile


class _Depth(threading.local):
    """How deep this thread is in compiles."""

    def __init__(self) -> None:
        self.compiles = 0


_depth = _Depth()
compiles: Counter[str] = Counter()  # what was compiled, and how often; written under the compile lock


class CompileInCapture(CaptureError):
    """A compile started inside a capture; the capture is given up and the compile has to happen before it."""


@contextmanager
def _compile_scope(what: str) -> Iterator[None]:
    captured = gate.capturing()
    if captured is not None and captured.device.type != "cpu":
        raise CompileInCapture(
            "torch.compile started to compile inside a CUDA graph capture.",
            operation=what,
            cure="Run the function once with the same shapes, dtypes and modes before the capture; what recompiles at "
            "every call cannot be captured (TORCH_LOGS=recompiles shows why it does).",
        )
    if _depth.compiles or captured is not None:
        yield
        return
    with gate.released():
        _acquire(what)
        ident, process = threading.get_ident(), os.getpid()
        _depth.compiles += 1
        gate.compiling[ident] = time.monotonic()
        try:
            yield
        finally:
            if os.getpid() == process:  # a forked child, which closes what its parent's threads had open, holds none
                del gate.compiling[ident]
                _depth.compiles -= 1
                _lock.release()


def _acquire(what: str) -> None:
    interval, start = timeout_s(), time.monotonic()
    while not _lock.acquire(timeout=interval):
        waited, who = time.monotonic() - start, threading.current_thread().name
        if waited >= COMPILE_PATIENCE * interval:
            raise GateTimeout(
                f"Thread {who!r} waited for another thread's compile to compile {what}", waited, gate.report()
            )
        gate.logger.warning("Thread %r has waited %.0f s to compile %s.\n%s", who, waited, what, gate.report())


@contextmanager
def _seat_scope(device_index: int | None) -> Iterator[None]:
    with ExitStack() as stack:
        # A seat that the thread holds already, or its own capture, is not waited for.
        for one in sorted(gate.all_gates(), key=lambda one: one.order):
            if device_index is None or one.device == torch.device("cuda", device_index):
                stack.enter_context(one.seat(exclusive=False))
        yield


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    gate.compiling.clear()
    for one in gate.all_gates():
        one.forget_other_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _compiled(what: str) -> None:
    compiles[what] += 1


hooks.compile_scope = _compile_scope
hooks.compiled = _compiled
hooks.seat_scope = _seat_scope
