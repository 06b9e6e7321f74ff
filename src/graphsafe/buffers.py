"""Tensors at stable addresses, and rings that hand them between threads and devices.

Guarantees:
- A static tensor never moves, so a graph captured on it reads whatever was loaded last.
- ``load`` writes everything or nothing.
- Items leave a ring in the order in which producers left ``produce``; none is lost, none comes twice. An error in a
  produce block gives the slot back; one in a consume block puts the item back, first in line.
- Values handed over are right without a synchronisation of the device: CUDA streams run side by side, so each hand-over
  carries events of the giver's streams, for which the taker's streams wait. Where the slot is CPU memory, which code on
  the host touches at once, the host waits.
- No seat at a gate is held over a wait for another thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import gate
from .context import active_contexts, resolve_device
from .deadlines import timeout_s
from .errors import GraphsafeError, RingClosed, ShapeMismatchError

logger = logging.getLogger("graphsafe")


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one static tensor.

    Attributes:
        shape: the sizes; a list or ``torch.Size`` becomes a tuple.
        dtype: ``torch.float32`` by default.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape) or not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"Spec({self.shape}, {self.dtype}): sizes are 0 or more, and dtype is a torch.dtype.")
        object.__setattr__(self, "shape", shape)

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


class StaticBuffers(Mapping[str, Tensor]):
    """Named tensors that are allocated once, zero-filled, and never move. A mapping from name to tensor.

    Graphs read them in place: a tensor of these given to a TrainStep or a graphed function is not copied.

    Args:
        specs: one a tensor.
        device: where they live; None is the current CUDA device, or the CPU where there is none. On the CPU they are
            pinned if CUDA is available, so that copies to a device run beside other work.
    Thread safety: one thread at a time, the slot's owner.
    """

    def __init__(self, specs: Mapping[str, Spec], device: torch.device | str | int | None = None) -> None:
        if not specs:
            raise ValueError("StaticBuffers: there are no specs. Give one a tensor, such as {'x': Spec((8, 16))}.")
        for name, spec in specs.items():
            if not isinstance(spec, Spec):
                raise ValueError(f"StaticBuffers: the spec of {name!r} is {spec!r}; it is a Spec(shape, dtype).")
        self.specs: dict[str, Spec] = dict(specs)
        self.device = resolve_device(device)
        on_cuda = self.device.type == "cuda"
        pin = not on_cuda and torch.cuda.is_available()
        self._tensors: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device, pin_memory=pin)
            tensor._graphsafe_static = True  # type: ignore[attr-defined]
            self._tensors[name] = tensor
        if on_cuda:  # the fill is done before another stream may write
            torch.cuda.current_stream(self.device).synchronize()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"StaticBuffers({', '.join(f'{n}: {s}' for n, s in self.specs.items())}, device={str(self.device)!r})"

    __hash__ = object.__hash__  # by identity, as tensors are

    def __eq__(self, other: object) -> bool:
        return self is other

    def load(self, batch: Mapping[str, Tensor], *, non_blocking: bool = True) -> None:
        """Copy ``batch`` into the static tensors with one fused launch.

        Args:
            batch: one tensor a name, neither more nor fewer; shape and dtype as in the spec, on any device.
            non_blocking: into CUDA memory, do not wait for the copy; a pinned source must then stay unchanged until it
                is done. Into CPU memory the copy is always done on return.
        Raises:
            ShapeMismatchError: with the tensor's name, before anything is written.
        Thread safety: the owner of the slot only.
        Sync: none into CUDA memory; enqueues on the current stream.
        """
        sources = [self._checked(name, spec, batch) for name, spec in self.specs.items()]
        if len(batch) > len(self.specs):
            extra = next(name for name in batch if name not in self.specs)
            raise ShapeMismatchError(extra, "no tensor of that name", "one", f"The names are {', '.join(self.specs)}.")
        with torch.no_grad():
            torch._foreach_copy_(
                list(self._tensors.values()), sources, non_blocking=non_blocking and self.device.type == "cuda"
            )

    def _checked(self, name: str, spec: Spec, batch: Mapping[str, Tensor]) -> Tensor:
        if name not in batch:
            given = ", ".join(map(str, batch)) or "none"
            raise ShapeMismatchError(name, str(spec), "no such tensor", f"The names given are: {given}.")
        source = batch[name]
        if not isinstance(source, Tensor):
            raise ShapeMismatchError(name, str(spec), f"a {type(source).__name__}", "Make a tensor of it.")
        if source.shape != spec.shape or source.dtype != spec.dtype:
            raise ShapeMismatchError(name, str(spec), f"{tuple(source.shape)} of {source.dtype}")
        return source


@dataclass(frozen=True)
class RingStats:
    """What a ring holds now and did so far.

    Attributes:
        depth: number of slots; those neither ready nor free are in a producer's or a consumer's hands.
        num_ready, num_free: items to consume, slots to produce into.
        num_produced, num_consumed: items handed over, and consumed to the end.
        num_returned: blocks left by an error: slots given back and items put back.
        produce_wait_s, consume_wait_s: seconds that producers waited for a slot and consumers for an item, and with CPU
            memory for the device to be done with it.
        closed: whether close() was called.
    """

    depth: int
    num_ready: int
    num_free: int
    num_produced: int
    num_consumed: int
    num_returned: int
    produce_wait_s: float
    consume_wait_s: float
    closed: bool


class _Slot:
    """One set of buffers, and the events of those who used it last."""

    def __init__(self, buffers: StaticBuffers) -> None:
        self.buffers = buffers
        self.events: list[torch.cuda.Event] = []
        self.number = 0  # of the item it holds, in the order of hand-over
        self.known_streams: set[torch.cuda.Stream] = set()

    def record(self) -> None:
        """Note what this thread's streams have enqueued so far."""
        for stream in _streams(self.buffers.device):
            event = torch.cuda.Event()
            event.record(stream)
            self.events.append(event)

    def wait(self) -> float:
        """Have this thread's streams, and for CPU memory the host, wait for the events. Returns the host's seconds."""
        waited_s = 0.0
        if self.buffers.device.type == "cuda":
            streams = _streams(self.buffers.device)
            for stream in streams - self.known_streams:
                for tensor in self.buffers.values():
                    tensor.record_stream(stream)  # memory of a dropped ring is not reused under a running kernel
            self.known_streams |= streams
            for event in self.events:
                for stream in streams:
                    stream.wait_event(event)
        elif not all(event.query() for event in self.events):
            start = time.monotonic()
            with gate.released():
                for event in self.events:
                    event.synchronize()
            waited_s = time.monotonic() - start
        self.events = []
        return waited_s


def _streams(device: torch.device) -> set[torch.cuda.Stream]:
    """The current streams of this thread, on ``device``, its contexts' devices and its current device."""
    if not torch.cuda.is_initialized():
        return set()
    indices = {torch.cuda.current_device()}
    indices.update(d.index for d in (device, *(c.device for c in active_contexts())) if d.type == "cuda")
    return {torch.cuda.current_stream(index) for index in indices}


class BufferRing:
    """A bounded queue of static buffers: producers fill slots, consumers read them, in order, without a copy.

    Several producers and consumers, in any threads, on any devices.

    Args:
        specs: of each slot.
        depth: number of slots; 2 lets a producer fill one while a consumer reads the other.
        device: where the slots live, as for StaticBuffers.
    """

    def __init__(
        self, specs: Mapping[str, Spec], depth: int = 2, device: torch.device | str | int | None = None
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"BufferRing: depth is the number of slots, an int of 1 or more; got {depth!r}.")
        slots = [_Slot(StaticBuffers(specs, device)) for _ in range(depth)]
        self.depth = depth
        self.device = slots[0].buffers.device
        self.specs = slots[0].buffers.specs
        self._changed = threading.Condition(threading.Lock())  # guards all below; third in the order of locks
        self._free: deque[_Slot] = deque(slots)
        self._ready: deque[_Slot] = deque()
        self._closed = False
        self._counts = {"produced": 0, "consumed": 0, "returned": 0}
        self._wait_s = {"produce": 0.0, "consume": 0.0}
        self._last: dict[str, threading.Thread] = {}  # who entered each role last, for reports

    def produce(self, timeout: float | None = None) -> AbstractContextManager[StaticBuffers]:
        """A block that fills a free slot. Leaving it hands the slot over; an error gives it back unused.

        Args:
            timeout: seconds to wait for a slot; None: for ever, with a report in the log now and then.
        Raises:
            TimeoutError: no slot became free in time.
            RingClosed: on entry, or on leaving where the ring was closed meanwhile: the item is not handed over.
        Thread safety: any number of threads. The block holds no lock.
        Sync: none with CUDA slots; for CPU slots the host waits for the copies out of the slot's former content.
        """
        return self._block("produce", timeout)

    def consume(self, timeout: float | None = None) -> AbstractContextManager[StaticBuffers]:
        """A block that reads the oldest item. Leaving it frees the slot; an error puts the item back, first in line.

        Args:
            timeout: seconds to wait for an item; None: for ever, with a report in the log now and then.
        Raises:
            TimeoutError: no item came in time.
            RingClosed: the ring is closed and no item is left in it.
        Thread safety: any number of threads. The block holds no lock.
        Sync: none with CUDA slots; for CPU slots the host waits until the producer's copies have landed.
        """
        return self._block("consume", timeout)

    def close(self) -> None:
        """Hand nothing over any more: producers get RingClosed at once, consumers when no item is left. Idempotent.

        Thread safety: any thread.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stats(self) -> RingStats:
        """What the ring holds and did. Thread safety: any thread."""
        with self._changed:
            return RingStats(
                depth=self.depth,
                num_ready=len(self._ready),
                num_free=len(self._free),
                num_produced=self._counts["produced"],
                num_consumed=self._counts["consumed"],
                num_returned=self._counts["returned"],
                produce_wait_s=self._wait_s["produce"],
                consume_wait_s=self._wait_s["consume"],
                closed=self._closed,
            )

    @contextmanager
    def _block(self, role: str, timeout: float | None) -> Iterator[StaticBuffers]:
        slot = self._take(role, timeout)
        done = False
        try:
            waited_s = slot.wait()
            if waited_s:
                with self._changed:
                    self._wait_s[role] += waited_s
            try:
                yield slot.buffers
            finally:
                slot.record()  # after an error as well: what was enqueued still runs
            done = True
        finally:
            moved_on = self._leave(role, slot, done)
        if not moved_on:
            raise RingClosed(role)

    def _leave(self, role: str, slot: _Slot, done: bool) -> bool:
        """Put the slot where it belongs after a block. Returns whether it was handed over or freed as it should."""
        with self._changed:
            if role == "produce":
                done = done and not self._closed
                slot.number = self._counts["produced"]
                (self._ready if done else self._free).append(slot)
            elif done:
                self._free.append(slot)
            else:
                self._ready.insert(sum(other.number < slot.number for other in self._ready), slot)
            self._counts[f"{role}d" if done else "returned"] += 1
            self._changed.notify_all()
        return done

    def _take(self, role: str, timeout: float | None) -> _Slot:
        """Take the next slot of a role out of the ring, at once or after a wait without any seat."""
        if gate.capturing() is not None:
            raise GraphsafeError(
                f"{role}() was called inside a capture. A hand-over happens once, a graph is replayed many times: "
                "enter the ring's block outside, around the capture or the step."
            )
        slot = self._try_take(role)
        if slot is not None:
            return slot
        try:
            with gate.released():
                slot = self._wait_and_take(role, timeout)
        except BaseException:
            if slot is not None:  # taking the seats again failed
                self._put_back(role, slot)
            raise
        return slot

    def _try_take(self, role: str) -> _Slot | None:
        with self._changed:
            self._last[role] = threading.current_thread()
            return self._pop(role)

    def _pop(self, role: str) -> _Slot | None:
        if role == "produce":
            if self._closed:
                raise RingClosed(role)
            return self._free.popleft() if self._free else None
        if self._ready:
            return self._ready.popleft()
        if self._closed:
            raise RingClosed(role)
        return None

    def _put_back(self, role: str, slot: _Slot) -> None:
        with self._changed:
            (self._free if role == "produce" else self._ready).appendleft(slot)
            self._changed.notify_all()

    def _wait_and_take(self, role: str, timeout: float | None) -> _Slot:
        queue = self._free if role == "produce" else self._ready
        what = "a free slot of a BufferRing" if role == "produce" else "an item of a BufferRing"

        def ready() -> bool:
            return bool(queue) or self._closed

        start = time.monotonic()
        report_s = timeout_s()
        try:
            while True:
                left_s = report_s if timeout is None else max(0.0, timeout - (time.monotonic() - start))
                with self._changed:
                    if self._changed.wait_for(ready, min(report_s, left_s)):
                        slot = self._pop(role)
                        assert slot is not None
                        return slot
                    state = self._describe()
                if timeout is not None and left_s <= report_s:
                    raise TimeoutError(f"{role}() waited {timeout} s for {what}. {state}")
                who, waited_s = threading.current_thread().name, time.monotonic() - start
                logger.warning("Thread %r has waited %.0f s for %s. %s\n%s", who, waited_s, what, state, gate.report())
        finally:
            waited_s = time.monotonic() - start
            with self._changed:
                self._wait_s[role] += waited_s

    def _describe(self) -> str:
        """What the ring holds and who used it last, for reports; under the lock."""
        held = self.depth - len(self._ready) - len(self._free)
        text = f"Of its {self.depth} slots {len(self._ready)} are ready, {len(self._free)} free, {held} in use."
        for role, thread in self._last.items():
            if thread is not threading.current_thread():
                state = "runs" if thread.is_alive() else "has ended"
                text += f" The last thread to call {role}() is {thread.name!r}, which {state}."
        return text
