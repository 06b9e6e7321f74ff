"""Lets code be captured that saves CUDA's random state and sets it again, as a gradient checkpoint with dropout does.

torch refuses to read or set a generator inside a capture: where a graph's numbers begin is known only when it is
replayed. But how far from there each saved state lies is the same in every call. So a real call before the capture is
traced, and in the capture each stretch between two such calls draws from a generator state of its own, which begins
that far from the call's beginning at every replay.

Guarantees:
- Works without ``install()``: the stand-ins are put in for good, and elsewhere only look whether this thread is traced
  or captures.
- A call that saves or sets states otherwise than the traced one did raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import private
from ._patches import Patches


class Position(NamedTuple):
    """An offset of the generator, from where the call began, or from where the forward that it belongs to began."""

    of_forward: bool
    offset: int


class Event(NamedTuple):
    """A state was read (``target`` is None) or set to ``target``, at ``now``."""

    now: Position
    target: Position | None


START = Position(False, 0)


class StateMismatch(RuntimeError):
    """Random states are saved or set otherwise than in the traced call."""


@dataclass
class Trace:
    """What one call did with the random state.

    Attributes:
        end: where the generator was at the end.
        fits: whether it was all offsets of one seed.
    """

    events: list[Event] = field(default_factory=list)
    end: Position = START
    fits: bool = True

    def stretches(self) -> list[tuple[Position, Position]]:
        """(begin, end) of what lies between the events."""
        begins = [START, *(event.now if event.target is None else event.target for event in self.events)]
        return list(zip(begins, [*(event.now for event in self.events), self.end], strict=True))


class Layout:
    """Which generator state serves which stretch: as few as may be, since each costs two launches a replay.

    Attributes:
        begins: where each state begins.
        draws: how far each is moved on by one call.
        of_stretch: the index of the state of each stretch.
    """

    def __init__(self, trace: Trace) -> None:
        self.begins: list[Position] = []
        self.draws: list[int] = []
        self.of_stretch: list[int] = []
        unused: dict[Position, int] = {}  # states that nothing was drawn from so far
        for begin, end in trace.stretches():
            index = unused.get(begin)
            if index is None:
                index = unused[begin] = len(self.begins)
                self.begins.append(begin)
                self.draws.append(0)
            self.of_stretch.append(index)
            if end != begin:
                self.draws[index] = end.offset - begin.offset
                del unused[begin]


class _PerThread(threading.local):
    """What watches this thread's reads and settings of the random state."""

    def __init__(self) -> None:
        self.watch: Any = None


_per_thread = _PerThread()
_patches = Patches()
_lock = threading.Lock()  # guards the replacement; taken alone
_placed: list[bool] = []


class _Tracing:
    def __init__(self, trace: Trace, index: int, forward_offset: int) -> None:
        self._trace, self._index = trace, index
        self._generator = private.default_generator(torch.device("cuda", index))
        self._seed = self._generator.initial_seed()
        self._bases = {False: self._generator.get_offset(), True: forward_offset}
        self._of_forward = False

    def now(self) -> Position:
        self._trace.fits = self._trace.fits and self._generator.initial_seed() == self._seed
        return Position(self._of_forward, self._generator.get_offset() - self._bases[self._of_forward])

    def get(self, index: int, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        if index != self._index:
            return original()
        now = self.now()
        self._trace.events.append(Event(now, None))
        return _mark(original(), self, now)

    def set(self, index: int, state: torch.Tensor, original: Callable[[], None]) -> None:
        if index != self._index:
            return original()
        now, target = self.now(), _position(state, self)
        if target is None or not target.of_forward:
            original()
            self._of_forward = False
            target = self.now()
        else:  # saved in a capture, so without a value of its own
            self._of_forward = True
            self._generator.set_offset(self._bases[True] + target.offset)
        self._trace.events.append(Event(now, target))
        return None


class _Capturing:
    def __init__(self, trace: Trace, states: Sequence[torch.Generator], index: int) -> None:
        self._trace, self._layout, self._states, self._index = trace, Layout(trace), states, index
        self._generator = private.default_generator(torch.device("cuda", index))
        self._count = 0

    def _next(self, target: Position | None, index: int) -> Event:
        number, self._count = self._count, self._count + 1
        events = self._trace.events
        if index != self._index or number >= len(events) or events[number].target != target:
            raise StateMismatch(
                "Random states are saved and set inside a capture otherwise than in the eager calls before it. A "
                "gradient checkpoint with use_reentrant=False does it alike in every call, with equal shapes."
            )
        self._generator.graphsafe_set_state(self._states[self._layout.of_stretch[number + 1]])
        return events[number]

    def get(self, index: int, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        event = self._next(None, index)
        return _mark(torch.empty(0, dtype=torch.uint8), self, event.now)

    def set(self, index: int, state: torch.Tensor, original: Callable[[], None]) -> None:
        self._next(_position(state, self), index)


def _mark(state: torch.Tensor, watch: object, position: Position) -> torch.Tensor:
    state._graphsafe_position = (watch, position)  # type: ignore[attr-defined]
    return state


def _position(state: torch.Tensor, watch: object) -> Position | None:
    """Where ``watch``, or the capture of the forward before it, saved a state; None: it is a state as any."""
    of, position = getattr(state, "_graphsafe_position", (None, None))
    if of is watch:
        return position
    return Position(True, position.offset) if isinstance(of, _Capturing) and position is not None else None


@contextmanager
def tracing(device_index: int, forward_offset: int = 0) -> Iterator[Trace]:
    """Trace the block, a real call. States that were saved in a capture may be set in it.

    Args:
        forward_offset: of the default generator when the forward began that a backward belongs to.
    """
    place()
    trace = Trace()
    watch = _Tracing(trace, device_index, forward_offset)
    outer, _per_thread.watch = _per_thread.watch, watch
    try:
        yield trace
    finally:
        _per_thread.watch = outer
    trace.end = watch.now()


def tracing_on(device: torch.device) -> AbstractContextManager[Trace | None]:
    """``tracing`` on a CUDA device; on the CPU a block without a trace."""
    return nullcontext() if device.index is None else tracing(device.index)


def begin_capture(trace: Trace, states: Sequence[torch.Generator], device_index: int) -> None:
    """From now on this thread captures what ``trace`` traced, with one generator for each of ``Layout.begins``."""
    place()
    _per_thread.watch = _Capturing(trace, states, device_index)


def end_capture() -> None:
    _per_thread.watch = None


def place() -> None:
    """Put the stand-ins in. Does nothing from the second call on."""
    with _lock:
        if not _placed:
            _patches.body(torch.cuda.get_rng_state, _make_get)
            _patches.body(torch.cuda.set_rng_state, _make_set)
            _placed.append(True)


def _make_get(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        watch = _per_thread.watch
        if watch is None:
            return original(device)
        found: torch.Tensor = watch.get(_index(device), lambda: original(device))
        return found

    return get_rng_state


def _make_set(original: Callable[..., None]) -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        watch = _per_thread.watch
        if watch is None:
            original(new_state, device)
        else:
            watch.set(_index(device), new_state, lambda: original(new_state, device))

    return set_rng_state


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else int(index)
