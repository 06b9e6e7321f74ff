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
from contextlib import ExitStack

import torch

from . import gate
from .deadlines import timeout_s
from .errors import CaptureError, GateTimeout
from .failures import thread_name
from .repairs._recompiles import recompile_reason
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


class _CompileScope:
    """The scope of a compile. What its end puts back is known before anything has changed, and any number of ends do no
    harm, so that an interrupt leaves nothing behind. (No generator: a forked child would run its end.)"""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stack: list[gate.Hold] = []  # this thread's seats
        self._given: list[gate.Hold] = []
        self._process: int | None = None  # while it is the thread's outermost one

    def __enter__(self) -> None:
        captured = _refuse_in_capture(self._what)
        if _depth.compiles or captured is not None:
            return
        try:
            self._stack = stack = gate.held()
            self._given = sorted((hold for hold in stack if hold.taken), key=lambda hold: hold.gate.order)
            self._process = os.getpid()
            gate._give_all(list(stack), stack)
            _acquire(self._what)
            _depth.compiles = 1
            gate.compiling[threading.get_ident()] = time.monotonic()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        if self._process == os.getpid():  # a forked child holds nothing of its parent's
            _depth.compiles = 0
            gate.compiling.pop(threading.get_ident(), None)
            while _is_owned(_lock):
                _lock.release()
            for left in [hold for hold in self._stack if hold not in self._given]:  # inside, by an interrupt
                gate.abandon(left.gate)
            for hold in self._given:
                if not hold.taken:
                    hold.gate.take(hold)
                if hold not in self._stack:
                    self._stack.append(hold)
        self._process = None


def _refuse_in_capture(what: str) -> gate.DeviceGate | None:
    """Raise inside a capture on a GPU; else the gate that the thread captures on, if it does."""
    captured = gate.capturing()
    if captured is not None and captured.device.type != "cpu":
        reason = recompile_reason()
        because = "" if reason is None else f" It recompiles because {reason}."
        rule = " (TORCH_LOGS=recompiles shows why it does)" if reason is None else ": keep what is named from changing"
        raise CompileInCapture(
            f"torch.compile started to compile inside a CUDA graph capture.{because}",
            operation=what,
            cure="Run the function once with the same shapes, dtypes and modes before the capture; what recompiles at "
            f"every call cannot be captured{rule}.",
            thread=thread_name(),
        )
    return captured


def _is_owned(lock: threading.RLock) -> bool:
    """Whether this thread holds it."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


def _acquire(what: str) -> None:
    interval, start = timeout_s(), time.monotonic()
    while not _lock.acquire(timeout=interval):
        waited, who = time.monotonic() - start, threading.current_thread().name
        if waited >= COMPILE_PATIENCE * interval:
            raise GateTimeout(
                f"Thread {who!r} waited for another thread's compile to compile {what}", waited, gate.report()
            )
        gate.logger.warning("Thread %r has waited %.0f s to compile %s.\n%s", who, waited, what, gate.report())


class _SeatScope:
    """Shared seats on a device, or on all; one that the thread holds, or its own capture, is not waited for."""

    def __init__(self, device_index: int | None) -> None:
        self._device_index = device_index
        self._seats = ExitStack()

    def __enter__(self) -> None:
        try:
            for one in sorted(gate.all_gates(), key=lambda one: one.order):
                if self._device_index is None or one.device == torch.device("cuda", self._device_index):
                    seat = one.seat(exclusive=False)
                    self._seats.push(seat)  # whose end does no harm before its begin
                    seat.__enter__()
        except BaseException:
            self._seats.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._seats.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _depth.compiles = 0
    gate.compiling.clear()
    for one in gate.all_gates():
        one.forget_other_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _compiled(what: str) -> None:
    compiles[what] += 1


hooks.compile_scope = _CompileScope
hooks.compiled = _compiled
hooks.seat_scope = _SeatScope
