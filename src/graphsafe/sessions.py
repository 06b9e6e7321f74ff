"""A capture in progress: what is set up around the captured block, and put back whatever happens.

Guarantees:
- Never through ``torch.cuda.graph``, which synchronises the device, empties caches and shares one stream among all
  threads: ``capture_begin`` in ``thread_local`` mode, under the device's gate.
- A capture that fails leaves stream, pool, allocator, RNG, garbage collector and gate as they were; every earlier graph
  replays on, and the next capture works. (A failed ``capture_end`` of torch <= 2.13 leaves the generator state in
  capture and the allocator's filter in place: each graph has a generator state of its own, and the filter is removed.)
- What puts something back is known before that something is changed, and may run again: an interrupt that comes
  anywhere, in the putting back too, leaves nothing behind once ``put_back()`` has been called once more.
- cuBLAS workspaces that a graph uses lie in its own pool: torch keys them by stream, so they are dropped around each
  capture.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from . import cuda_errors, failures, gate, leaf_owners
from .collector import collector_guard
from .context import ThreadContext
from .errors import CaptureError
from .graph import Graph
from .recording import CaptureChecks, HostReadChecks, OperatorRecorder
from .repairs import nested_backward, private, rng_positions
from .repairs.rng_positions import START, Layout, Position, Trace

LATE_S = 0.05  # how long a capture that foreign work broke waits for the error of whoever broke it
MARGIN_S = 0.05  # errors noted this long before a capture began are told with it
_TRIES = 3  # of a step of putting back that is interrupted


class Session:
    """``begin()``, then the block, then ``end()``; or ``failed()`` with the block's error.

    Attributes:
        is_open: whether something is still to be put back.
    """

    def __init__(self, graph: Graph | None, context: ThreadContext) -> None:
        self._graph, self._context = graph, context
        self._steps: list[Callable[[], object]] = []  # that put back, newest last; each may run again
        self._alone = self._done = self._broken = self._running = False
        self._begun_s = time.monotonic()
        self._outer = sys.exception()  # what the captured code is not to blame for

    @property
    def is_open(self) -> bool:
        return bool(self._steps)

    def begin(self) -> None:
        """Set everything up. Raises with everything put back."""
        if self._graph is not None:
            self._graph._session = self
        try:
            watch_backwards()
            self._enter_gate()
            self._set_up()
            self._running = True
        except BaseException as exc:
            self._raise(exc)

    def end(self) -> None:
        """The block has run: keep what was captured. Raises with everything put back."""
        try:
            self._finish()
            self._done = True
            self._put_back_or_raise()
            self._publish()
        except BaseException as exc:
            self._raise(exc)
        if self._graph is not None:
            self._graph._session = None
        self._outer = None
        self._context.counters.captures += 1

    def failed(self, exc: BaseException) -> CaptureError | None:
        """The block raised ``exc``: put everything back.

        Returns:
            the CaptureError to raise from it; None where the capture has nothing to do with it.
        """
        if self._alone:
            self._context.counters.failed_captures += 1
        try:
            self.put_back()
            self.take_back()
        except BaseException:  # an interrupt
            self.put_back()
            self.take_back()
            raise
        finally:
            if self._graph is not None:
                self._graph.close()
        error, self._outer = self._explained(exc), None
        return error

    def put_back(self) -> Exception | None:
        """Put back what is not put back yet. Any number of calls, in the session's thread.

        Returns:
            the first error of a step, where CUDA is beyond help; the other steps have run.
        """
        first: Exception | None = None
        interrupt: BaseException | None = None
        tries = 0
        while self._steps:
            step = self._steps[-1]
            try:
                step()
            except Exception as exc:
                first = first or exc
            except BaseException as exc:
                interrupt, tries = exc, tries + 1
                if tries < _TRIES:
                    continue
            if self._steps and self._steps[-1] is step:
                self._steps.pop()
        if interrupt is not None:
            raise interrupt
        return first

    def take_back(self) -> None:
        """Have the context's generator as it was before the block. Any number of calls."""

    # for the two kinds

    def _set_up(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """End the capture, inside everything that was set up."""

    def _publish(self) -> None:
        """Give the graph what was captured, with everything put back."""

    def _explained(self, exc: BaseException) -> CaptureError | None:
        return None

    def _later(self, step: Callable[[], object]) -> None:
        """Have ``put_back()`` call this, before what was there."""
        self._steps.append(step)

    def _enter_gate(self) -> None:
        scope = self._gate_scope()
        self._later(scope.__exit__)
        scope.__enter__()
        self._alone = True
        self._begun_s = time.monotonic()
        self._later(lambda: collector_guard.on(self))
        collector_guard.off(self)

    def _gate_scope(self) -> gate.Scope:
        return self._context.gate.capture(counters=self._context.counters, on_abandon=self._abandon)

    def _abandon(self) -> None:
        self.put_back()

    def _put_back_or_raise(self) -> None:
        error = self.put_back()
        if error is not None:
            raise error

    def _raise(self, exc: BaseException) -> None:
        error = self.failed(exc)
        if error is None:
            raise exc
        raise error from exc


class CudaSession(Session):
    """A capture of CUDA work, on the context's stream, with an RNG state of its own."""

    def __init__(self, graph: Graph, context: ThreadContext, trace: Trace | None = None) -> None:
        super().__init__(graph, context)
        assert graph.pool is not None and context.device.index is not None and context.stream is not None
        self._target, self._pool, self._index, self._stream = graph, graph.pool, context.device.index, context.stream
        self._raw: torch.cuda.CUDAGraph | None = None
        self._trace = trace if trace is not None and trace.events else None
        self._states: list[tuple[torch.Generator, Position, int | None]] = []
        self._stage: Literal["before", "inside", "refused", "after"] = "before"
        self._bytes_before = 0

    def _set_up(self) -> None:
        context = self._context
        context.drain()
        here, there = torch.cuda.current_stream(), torch.cuda.current_stream(context.device)
        self._later(lambda: (torch.cuda.set_stream(there), torch.cuda.set_stream(here)))  # and the current device
        torch.cuda.set_stream(self._stream)
        self._later(_drop_caches)
        torch.cuda.current_blas_handle()  # cuBLAS cannot make this thread's handle inside a capture
        _drop_caches()  # casts of weights belong into the graph
        default = private.default_generator(context.device)
        saved = default.graphsafe_get_state()
        self._later(lambda: default.graphsafe_set_state(saved))
        if self._trace is not None and not self._trace.fits:
            raise CaptureError(
                "The eager call before the capture set the device's generator to another seed.",
                cure="Seed outside of the function; inside, only the context's states may be saved and set.",
            )
        if self._trace is None:
            self._states = [(self._state(), START, None)]
        else:
            layout = Layout(self._trace)
            self._states = [(self._state(), at, n) for at, n in zip(layout.begins, layout.draws, strict=True)]
        generators = [generator for generator, _, _ in self._states]
        self._raw = raw = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):  # else the state's tensors could not be written outside of it
            for generator in generators:  # its tensors are this stream's: no other may still use their memory
                raw.register_generator_state(generator)
            default.graphsafe_set_state(generators[0])
            self._later(self._end_what_runs)
            self._stage = "inside"
            self._bytes_before = private.reserved_bytes(self._index)
            try:
                private.begin_capture(raw, self._pool)
            except RuntimeError:
                self._stage = "refused"
                raise
            if self._trace is not None:
                self._later(rng_positions.end_capture)
                rng_positions.begin_capture(self._trace, generators, self._index)

    def _state(self) -> torch.Generator:
        """A generator like the context's."""
        generator = torch.Generator(self._context.device)
        generator.manual_seed(self._context.generator.initial_seed())
        generator.set_offset(self._context.generator.get_offset())
        return generator

    def _finish(self) -> None:
        raw = self._raw
        assert raw is not None
        torch.cuda.set_stream(self._stream)  # also where the block left another stream behind
        try:
            raw.capture_end()
        except RuntimeError:
            self._stage, self._broken = "refused", True
            raise
        self._stage = "after"
        self._target.num_bytes = max(0, private.reserved_bytes(self._index) - self._bytes_before)
        self._note_bytes()

    def _note_bytes(self) -> None:
        context, pool = self._context, self._pool
        used = {getattr(resource, "pool", None) for resource in context.resources()}
        sizes = {other: size for other, size in context.pool_bytes.items() if other in used}
        context.pool_bytes = {**sizes, pool: sizes.get(pool, 0) + self._target.num_bytes}

    def _publish(self) -> None:
        graph = self._target
        graph._states, graph._seed = self._states, self._states[0][0].initial_seed()
        graph._end = None if self._trace is None else self._trace.end
        graph._raw = self._raw

    def _end_what_runs(self) -> None:
        """End a capture that failed, however far it came."""
        raw = self._raw
        if raw is None or self._stage in ("before", "after"):
            return
        torch.cuda.set_stream(self._stream)
        if torch.cuda.is_current_stream_capturing():
            try:
                raw.capture_end()
            except RuntimeError:
                self._broken, self._stage = True, "refused"
        if self._stage == "refused":
            private.close_failed_capture(raw, self._index, self._pool)
            if self._context.pool == self._pool:
                self._context.pool = None  # earlier graphs keep it, later ones get another
        else:
            raw.reset()
        self._stage = "before"

    def _explained(self, exc: BaseException) -> CaptureError | None:
        refused = self._broken or not self._running
        behind = failures.culprit(exc, refused, cuda_errors.from_cuda, self._outer)
        if behind is None:
            error = exc if isinstance(exc, CaptureError) else None
        else:
            error = failures.explain(behind, failures.code_line(behind), begun=self._running)
        if error is None or error.others:
            return None
        late = LATE_S if failures.may_be_foreign(error) else 0.0
        seen = cuda_errors.seen_since(self._begun_s - MARGIN_S, wait_s=late)
        error.attach(tuple(map(str, seen)))
        error.foreign = error.foreign or (bool(seen) and failures.may_be_foreign(error))
        return None if error is exc else error


def _drop_caches() -> None:
    torch.clear_autocast_cache()
    private.clear_cublas_workspaces()


class CpuSession(Session):
    """A call on the CPU under the checks of a capture, with the context's generator, which a failure puts back.

    Args:
        graph: given a record of the block's operators, to run them again; None: checks alone.
    """

    def __init__(self, graph: Graph | None, context: ThreadContext) -> None:
        super().__init__(graph, context)
        self._recorder: OperatorRecorder | None = None
        self._rng: torch.Tensor | None = None
        self._drawn: object = None

    def take_back(self) -> None:
        if self._rng is not None:
            self._context.set_rng_state(self._rng)

    def _gate_scope(self) -> gate.Scope:
        context = self._context
        return context.gate.capture(
            counters=context.counters, on_take=context.swap_in, on_give=context.swap_out, on_abandon=self._abandon
        )

    def _set_up(self) -> None:
        context, generator = self._context, private.default_generator(self._context.device)
        self._rng = context.rng_state()
        self._later(lambda: None if self._done else self.take_back())
        self._drawn = context.drawn()
        modes = private.open_modes()
        self._later(lambda: private.leave_modes(modes, with_flags=not self._running))
        checks: list[Any] = [HostReadChecks()]
        if self._graph is None:
            checks.append(CaptureChecks(generator))
        else:
            self._recorder = OperatorRecorder(generator)
            checks.append(self._recorder)
        for mode in checks:
            mode.__enter__()

    def _finish(self) -> None:
        if self._recorder is not None:
            self._recorder.draws = self._context.drawn() != self._drawn

    def _publish(self) -> None:
        if self._graph is not None:
            self._graph._recorder = self._recorder


def watch_backwards() -> None:
    """Have backwards be counted, hold their seats, and be refused inside a capture that they would harm."""
    nested_backward.watch(_refuse_deep_backward)
    leaf_owners.watch()


def _refuse_deep_backward() -> None:
    """Called before a backward that torch would move to another thread."""
    if gate.capturing() is not None:
        failures.refuse(
            "torch.autograd.backward", "A backward is nested too deep inside a capture.", failures.DEEP_BACKWARD
        )
