"""Threads and the rings between them: reader -> packed batches -> targets -> features -> drafters.

    reader            batch i goes to target i mod N
    target t          its features go to drafter i mod R, through the ring of the pair
    drafter d         takes batches d, d + R, d + 2R, ... in this order

Guarantees:
- Who gets which batch is decided by its number alone, not by which thread is quicker.
- Every hand-off is a ring; nothing else is shared but frozen weights.
- The pipeline ends when the reader does, and what is under way is trained. The reader stops at a round's end only (a
  round is one batch a drafter), so every drafter takes the same number of batches.
- An error in one thread closes all rings and ends collectives, and so ends the other threads; it is the one that is
  raised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import ceil, lcm

import torch
from torch import Tensor

import graphsafe
from graphsafe import BufferRing, RingClosed, Spec

MAX_AHEAD = 1  # batches that a thread may be ahead of its device


class PipelineEnded(RuntimeError):
    """Another thread ended the pipeline."""


@dataclass(frozen=True)
class Topology:
    """Which devices the targets and the drafters are on, in the order of their numbers."""

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Each (target, drafter) that hands batches over."""
        num_targets, num_drafters = len(self.targets), len(self.drafters)
        return sorted({(i % num_targets, i % num_drafters) for i in range(lcm(num_targets, num_drafters))})

    def depth(self, drafter: int, ring_depth: int) -> int:
        """Slots of each of a drafter's rings, so that together they have at least ``ring_depth``."""
        num_rings = sum(1 for _, d in self.pairs() if d == drafter)
        return ceil(ring_depth / num_rings)


class Rings:
    """All rings of a pipeline.

    Args:
        topology: of the pipeline.
        batch_specs: of a batch's tensors.
        target_specs: of what a target adds to a batch: its features, and what else its ``source`` returns.
        depth: slots that a target has for batches, and at least that a drafter has for features.
    """

    def __init__(
        self, topology: Topology, batch_specs: Mapping[str, Spec], target_specs: Mapping[str, Spec], depth: int
    ) -> None:
        self.topology = topology
        self.batches = [BufferRing(batch_specs, depth, "cpu") for _ in topology.targets]
        specs = {**batch_specs, **target_specs}
        self.features = {
            (t, d): BufferRing(specs, topology.depth(d, depth), topology.drafters[d]) for t, d in topology.pairs()
        }

    def of_drafter(self, drafter: int) -> Iterator[BufferRing]:
        """The rings of a drafter's batches, in order, without end."""
        index = drafter
        while True:
            yield self.features[index % len(self.topology.targets), drafter]
            index += len(self.topology.drafters)

    def wait_s(self, drafter: int) -> float:
        """Seconds that a drafter has waited for features so far."""
        return sum(ring.stats().consume_wait_s for (_, d), ring in self.features.items() if d == drafter)

    def target_wait_s(self) -> float:
        """Seconds that all targets have waited so far, for batches and for room for their features."""
        waits = [ring.stats().consume_wait_s for ring in self.batches]
        return sum(waits) + sum(ring.stats().produce_wait_s for ring in self.features.values())

    def close(self) -> None:
        """End the pipeline at once. Any thread."""
        for ring in (*self.batches, *self.features.values()):
            ring.close()


class Pipeline:
    """The threads' loops, and how they end together.

    Args:
        rings: between the threads.
        stop: set by anyone to end it after the round that is being read.

    Attributes:
        compiling: one drafter compiles at a time, forward and backward: the next one's device then runs the same code.
    """

    def __init__(self, rings: Rings, stop: threading.Event) -> None:
        self.topology, self.rings, self.stop = rings.topology, rings, stop
        self.failed = threading.Event()
        self._aborts: list[Callable[[], None]] = []
        num_drafters = len(self.topology.drafters)
        self.compiling = threading.Lock()  # held while a thread compiles all it needs; taken with no seat held
        self._ready = threading.Barrier(len(self.topology.targets) + num_drafters)
        self._round = threading.Barrier(num_drafters)
        self._done = threading.Barrier(num_drafters)
        self._lock = threading.Lock()  # guards the list above; taken alone

    def on_abort(self, function: Callable[[], None]) -> None:
        """Have ``function`` called, from any thread, when the pipeline is aborted; at once if it is."""
        with self._lock:
            failed = self.failed.is_set()
            if not failed:
                self._aborts.append(function)
        if failed:
            function()

    def abort(self) -> bool:
        """End everything at once: rings closed, collectives ended. Any thread; idempotent.

        Returns:
            Whether this call was the first.
        """
        with self._lock:
            first = not self.failed.is_set()
            self.failed.set()
        for barrier in (self._ready, self._round, self._done):
            barrier.abort()
        self.rings.close()
        with self._lock:
            aborts, self._aborts = self._aborts, []
        for function in aborts:
            function()
        return first

    def meet(self) -> None:
        """Wait until every target and drafter thread has come here: all has been compiled, and collectives may begin.

        Raises:
            PipelineEnded: another thread has failed.
        """
        self._wait(self._ready)

    def part(self) -> None:
        """Wait until every drafter thread has come here: no collective is under way, and groups may be left.

        Raises:
            PipelineEnded: another thread has failed.
        """
        self._wait(self._done)

    def _wait(self, barrier: threading.Barrier) -> None:
        with graphsafe.current_context().released():
            try:
                barrier.wait()
            except threading.BrokenBarrierError:
                raise PipelineEnded("The pipeline ended before all of its threads had come to one point.") from None

    def guard(self, body: Callable[[], None], *quiet: type[Exception]) -> None:
        """Run a thread's body. Its error aborts the pipeline and is raised.

        Args:
            quiet: errors that only mean that another thread failed first; they end the body without a word then.
        """
        try:
            body()
        except quiet:
            if self.abort():
                raise
        except BaseException:
            self.abort()
            raise

    def read(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        empty: Mapping[str, Tensor],
        stops: Callable[[], bool] | None = None,
    ) -> None:
        """The reader's loop: hand out ``batches`` until they end or a stop is asked for, in whole rounds.

        Args:
            empty: a batch of padding, which fills up the last round.
            stops: asked before each round whether to read no more; None: whether ``stop`` is set.
        """
        stops = self.stop.is_set if stops is None else stops
        num_targets, num_drafters = len(self.topology.targets), len(self.topology.drafters)
        source = iter(batches)
        index = 0
        with suppress(RingClosed):
            while True:
                at_round_end = index % num_drafters == 0
                batch = None if at_round_end and stops() else next(source, None)
                if batch is None:
                    if at_round_end:
                        break
                    batch = empty
                with self.rings.batches[index % num_targets].produce() as slot:
                    slot.load(batch)
                index += 1
        for ring in self.rings.batches:
            ring.close()

    def run_target(self, number: int, source: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """A target thread's loop: features for each of its batches, until there are no more.

        Args:
            number: the target's.
            source: what the target adds to a batch of CPU tensors, by name, on the target's device.
        """
        num_targets, num_drafters = len(self.topology.targets), len(self.topology.drafters)
        device = self.topology.targets[number]
        pace = _Pace(device)
        index = number
        with suppress(RingClosed), _contexts_beside(device, self.topology.drafters), torch.no_grad():
            context = graphsafe.current_context(device)
            while True:
                with self.rings.batches[number].consume() as batch:
                    with context.eager(rng=False):
                        added = source(batch)
                    with self.rings.features[number, index % num_drafters].produce() as slot:
                        slot.load({**batch, **added})
                pace.step()
                index += num_targets
        for (target, _), ring in self.rings.features.items():
            if target == number:
                ring.close()

    def run_drafter(self, number: int, train: Callable[[Mapping[str, Tensor]], None]) -> None:
        """A drafter thread's loop: ``train`` on each of its batches, in order, until there are no more.

        Drafters begin a round together, once each has its batch. A collective then waits for drafter threads alone: if
        it waited for a target's, whose copies to this device the driver may hold up meanwhile, none would go on.
        """
        pace = _Pace(self.topology.drafters[number])
        for ring in self.rings.of_drafter(number):
            if self.failed.is_set():
                return
            try:
                with ring.consume() as slot:
                    self._wait(self._round)
                    train(slot)
            except (RingClosed, PipelineEnded):
                return
            pace.step()


class _Pace:
    """Keeps a thread from enqueueing without end: a full queue would block it in a launch, wherever that is.

    Args:
        device: that the thread works on; nothing is done for the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """After each batch: wait until the one ``MAX_AHEAD`` before it is done."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        if len(self._events) > MAX_AHEAD:
            self._events.popleft().synchronize()


def _contexts_beside(device: torch.device, others: Iterable[torch.device]) -> ExitStack:
    """Contexts of the CUDA devices that this thread copies to, with ``device`` still the current one.

    Copies to a device then run on this thread's own stream there, where the rings' hand-over waits for them.
    """
    with ExitStack() as stack:
        for other in sorted({other for other in others if other.type == "cuda" and other != device}, key=str):
            stack.enter_context(graphsafe.thread_context(other))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        return stack.pop_all()
