"""One gate a device: who may run eager steps there, and who captures.

Guarantees:
- While a thread captures on a device, no other thread holds a seat there; an exclusive seat excludes all others.
- Captures come before new seats; among the rest it is first come, first served.
- A thread that asks for a capture, or that waits for another thread, holds no seat meanwhile, so two threads that
  upgrade, or a holder and the thread it waits for, never wait for each other.
- Seats on several devices are taken in the order of the devices, so two threads never hold one each and want the other.
- Every wait for a gate has a deadline and ends in a GateTimeout that shows the holders' stacks.
- An interrupt loses no place: what it kept from being given back is given back before this thread takes another one
  there, or by ``abandon()``, which the end of a context calls.

A seat is a scope of RNG and sync safety, not a transaction: it may be given back and taken again inside the scope.
The order of locks is compile, gate, buffers.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from . import cuda_errors
from .deadlines import timeout_s
from .errors import CaptureError, GateTimeout, WrongThreadError
from .failures import thread_name
from .holds import Counters as Counters
from .holds import Kind as Kind
from .holds import nothing, stack_lines
from .repairs import private
from .tasks import current_task, task_name

logger = logging.getLogger("graphsafe")

POLL_S = 0.5  # how often a waiter looks whether the holder compiles


@dataclass(eq=False)
class Hold:
    """One thread's place at one gate. ``on_take`` and ``on_give`` run whenever it is really taken or given back.

    ``on_give`` may run twice, after an interrupt. ``on_abandon`` runs before ``abandon()`` gives the place back.
    """

    gate: DeviceGate
    kind: Kind
    on_take: Callable[[], None] = nothing
    on_give: Callable[[], None] = nothing
    on_abandon: Callable[[], None] = nothing
    counters: Counters = field(default_factory=Counters)
    ident: int = field(default_factory=threading.get_ident)
    thread_name: str = ""
    task: object = field(default_factory=current_task)
    stack: list[Hold] = field(default_factory=list)  # of the thread that holds it
    since: float = 0.0
    taken: bool = False


class _PerThread(threading.local):
    """What this thread holds, outermost first, what it is about to hold, and its name when it first came here."""

    def __init__(self) -> None:
        self.held: list[Hold] = []
        self.coming: list[Hold] = []  # taken, maybe, and not yet among those held
        self.name = thread_name()


_per_thread = _PerThread()
compiling: dict[int, float] = {}  # thread ident -> since when; written by that thread, read by waiters and reports


def held() -> list[Hold]:
    """What this thread holds, outermost first."""
    return _per_thread.held


class DeviceGate:
    """Seats and captures of one device; see the module's guarantees."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.order = (device.type, -1 if device.index is None else device.index)
        # Guards the two lists below; second in the order of locks. Taken as itself, not through the condition: that is
        # Python code, which an interrupt could leave between taking the lock and knowing of it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._holders: list[Hold] = []
        self._waiters: list[Hold] = []

    def seat(
        self,
        *,
        exclusive: bool,
        counters: Counters | None = None,
        on_take: Callable[[], None] = nothing,
        on_give: Callable[[], None] = nothing,
    ) -> Scope:
        """A scope that holds a seat. Inside the thread's own capture, or a seat as strong, it does nothing."""
        kind = Kind.EXCLUSIVE if exclusive else Kind.SHARED
        return Scope(Hold(self, kind, on_take, on_give, counters=counters or Counters()))

    def capture(
        self,
        *,
        counters: Counters | None = None,
        on_take: Callable[[], None] = nothing,
        on_give: Callable[[], None] = nothing,
        on_abandon: Callable[[], None] = nothing,
    ) -> Scope:
        """A scope that is alone on the device; all the thread's seats are given back for its length."""
        return Scope(Hold(self, Kind.CAPTURE, on_take, on_give, on_abandon, counters or Counters()))

    def take(self, hold: Hold) -> None:
        abandon(self, but=_per_thread.held)  # what an interrupt has left here
        try:
            with self._lock:
                # A capture goes ahead of all that are not captures; everything else queues at the end.
                captures = sum(waiter.kind is Kind.CAPTURE for waiter in self._waiters)
                try:
                    self._waiters.insert(captures if hold.kind is Kind.CAPTURE else len(self._waiters), hold)
                    self._wait(lambda: self._may_go(hold), f"waited for {hold.kind.value}", hold.counters)
                finally:
                    if hold in self._waiters:
                        self._waiters.remove(hold)
                    self._changed.notify_all()
                hold.since = time.monotonic()
                hold.taken = True
                self._holders.append(hold)
            hold.on_take()
        except BaseException:
            self.give(hold)
            raise

    def give(self, hold: Hold) -> None:
        try:
            if hold.taken:
                try:
                    hold.on_give()
                except BaseException:  # an interrupt: it goes on from there
                    hold.on_give()
                    raise
        finally:
            self.leave(hold)

    def leave(self, hold: Hold) -> None:
        """Give a place back as it is. Does nothing where it is not held."""
        with self._lock:
            if hold in self._holders:
                self._holders.remove(hold)
            hold.taken = False
            self._changed.notify_all()

    def forget_other_threads(self) -> None:
        """In a forked child, which has this thread alone: no other one holds or waits."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._holders = [hold for hold in self._holders if hold.ident == threading.get_ident()]
        self._waiters = []

    def _may_go(self, hold: Hold) -> bool:
        shared = hold.kind is Kind.SHARED
        for waiter in self._waiters:
            if waiter is hold:
                break
            if not (shared and waiter.kind is Kind.SHARED):
                return False
        return all(shared and holder.kind is Kind.SHARED for holder in self._holders)

    def _wait(self, predicate: Callable[[], bool], what: str, counters: Counters) -> None:
        if predicate():
            return
        budget, start = timeout_s(), time.monotonic()
        last, counted = start, 0.0
        try:
            while not predicate():
                self._changed.wait(min(POLL_S, max(budget - counted, 0.01)))
                now = time.monotonic()
                if not any(hold.ident in compiling for hold in self._holders):
                    counted += now - last
                last = now
                if counted >= budget and not predicate():
                    who = threading.current_thread().name
                    raise GateTimeout(f"Thread {who!r} {what} on {self.device}", now - start, report())
        finally:
            counters.wait_s += time.monotonic() - start


class Scope:
    """Holds a seat or a capture for the length of a block, in one thread and one asyncio task."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._outer: Hold | None = None
        self._set_aside: list[Hold] = []
        self._inline = False

    def __enter__(self) -> None:
        hold = self._hold
        hold.ident, hold.thread_name = threading.get_ident(), _per_thread.name
        hold.task, hold.stack = current_task(), held()
        stack = hold.stack
        taken = (*stack, *(held for held in _per_thread.coming if held.taken))
        here = next((held for held in taken if held.gate is hold.gate), None)
        if here is not None and here.task is not hold.task:
            raise WrongThreadError(f"The seat on {hold.gate.device}", _owner(here), _owner(hold))
        if any(held.kind is Kind.CAPTURE for held in stack):  # inside one's own capture nothing waits
            if hold.kind is Kind.CAPTURE:
                raise CaptureError(
                    "A capture was begun inside a capture of the same thread.", cure="End the first one."
                )
            self._inline = True
            return
        if (
            here is not None
            and hold.kind is not Kind.CAPTURE
            and (here.kind is Kind.EXCLUSIVE or hold.kind is here.kind)
        ):
            self._inline = True
            return
        self._outer = here
        captures = hold.kind is Kind.CAPTURE
        try:
            aside = [held for held in stack if captures or held.gate.order >= hold.gate.order]
            self._set_aside = _give_all(aside, stack)
            _take_all([hold], stack)
            if not captures:  # seats on other devices are taken again at once, in order; here's waits
                again = [held for held in self._set_aside if held is not self._outer]
                self._set_aside = [] if self._outer is None else [self._outer]
                _take_all(again, stack)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *exc_info: object) -> None:
        """Give the place back. A second call does nothing."""
        try:
            if exc_info:
                cuda_errors.note(exc_info[1])
        finally:
            self._leave()

    def _leave(self) -> None:
        hold, inline, self._inline = self._hold, self._inline, False
        if inline:
            return
        try:
            _drop(hold, hold.stack)
        finally:
            aside, self._set_aside = self._set_aside, []
            _take_all(aside, hold.stack)
        task, ident = current_task(), threading.get_ident()
        if ident != hold.ident or task is not hold.task:
            caller = threading.current_thread().name if ident != hold.ident else task_name(task)
            raise WrongThreadError(f"The seat on {hold.gate.device}", _owner(hold), caller)


def _owner(hold: Hold) -> str:
    return hold.thread_name if hold.task is None else task_name(hold.task)


def _drop(hold: Hold, stack: list[Hold]) -> None:
    """Give a place back, if it is held, and forget it."""
    try:
        if hold.taken:
            hold.gate.give(hold)
    except BaseException:  # an interrupt, maybe before it was given
        if hold.taken:
            hold.gate.give(hold)
        raise
    finally:
        if hold in stack:
            stack.remove(hold)


def _lost(gate: DeviceGate) -> list[Hold]:
    """What this thread holds at a gate although it has forgotten it, by an interrupt."""
    me, held = threading.get_ident(), (*_per_thread.held, *_per_thread.coming)
    return [hold for hold in tuple(gate._holders) if hold.ident == me and hold not in held]


def abandon(gate: DeviceGate, but: Sequence[Hold] = ()) -> None:
    """Give back what this thread still holds at a gate, ``but`` excepted, and forget it."""
    held = _per_thread.held
    while left := [hold for hold in held if hold.gate is gate and hold not in but] or _lost(gate):
        try:
            left[0].on_abandon()
        finally:
            _drop(left[0], held)


def _give_all(holds: list[Hold], stack: list[Hold] | None = None) -> list[Hold]:
    """Give seats back, innermost first; returns them in the order in which to take them again."""
    given = [hold for hold in holds if hold.taken]
    stack = holds if stack is None else stack
    for hold in reversed(given):
        _drop(hold, stack)
    return sorted(given, key=lambda hold: hold.gate.order)


def _take_all(holds: list[Hold], stack: list[Hold]) -> None:
    coming = _per_thread.coming
    for hold in holds:
        coming.append(hold)
        try:
            hold.gate.take(hold)
            stack.append(hold)
        finally:
            coming.remove(hold)


def capturing() -> DeviceGate | None:
    """The gate that this thread captures on, if it does."""
    for hold in _per_thread.held:
        if hold.kind is Kind.CAPTURE:
            return hold.gate
    return None


@contextmanager
def released() -> Iterator[None]:
    """Give all this thread's seats back for the length of a wait on another thread, then take them again.

    Inside the thread's own capture on a GPU it does nothing: a capture is not given up. (On the CPU a capture is one
    checked call, and what it excludes others from, the default generator, is given back like a seat.)
    """
    stack = _per_thread.held
    captured = capturing()
    if not stack or (captured is not None and captured.device.type != "cpu"):
        yield
        return
    given = _give_all(list(stack), stack)
    try:
        yield
    finally:
        _take_all(given, stack)


_gates: dict[torch.device, DeviceGate] = {}
_gates_lock = threading.Lock()  # guards the dict above; taken alone


def gate_for(device: torch.device) -> DeviceGate:
    """The one gate of a device. ``device`` has its index, unless it is the CPU."""
    gate = _gates.get(device)
    if gate is None:
        with _gates_lock:
            gate = _gates.setdefault(device, DeviceGate(device))
    return gate


def all_gates() -> list[DeviceGate]:
    """The gates of all devices used so far."""
    return list(_gates.values())


def report() -> str:
    """Who holds and who waits for what, with stacks. Takes no lock, so it may be a moment out of date."""
    frames = sys._current_frames()
    lines: list[str] = []
    now = time.monotonic()
    for gate in all_gates():
        for hold in list(gate._holders):
            lines.append(
                f"{gate.device}: thread {hold.thread_name!r} holds {hold.kind.value} for {now - hold.since:.1f} s:"
            )
            lines += stack_lines(frames.get(hold.ident))
        for hold in list(gate._waiters):
            lines.append(f"{gate.device}: thread {hold.thread_name!r} waits for {hold.kind.value}.")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, since in list(compiling.items()):
        lines.append(f"thread {names.get(ident, ident)!r} compiles since {now - since:.1f} s:")
        lines += stack_lines(frames.get(ident))
    return "\n".join(lines) or "Nobody holds a seat, captures or compiles."


# Dynamo would compile what they run inside compiled code, and wait for the compile lock with a gate's own lock held.
private.have_dynamo_skip(Scope.__enter__, Scope.__exit__, DeviceGate.take, DeviceGate.give, DeviceGate.leave)
