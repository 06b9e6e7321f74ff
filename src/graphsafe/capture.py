"""One capture: on the context's own stream, with an RNG state of its own, alone on its device.

Guarantees:
- Never through ``torch.cuda.graph``, which synchronises the device, empties caches and shares one stream among all
  threads: ``capture_begin`` in ``thread_local`` mode, under the device's gate.
- A capture that fails leaves stream, pool, allocator, RNG, garbage collector and gate as they were; every earlier graph
  replays on, and the next capture works. (A failed ``capture_end`` of torch <= 2.13 leaves the generator state in
  capture and the allocator's filter in place: each graph has a generator state of its own, and the filter is removed.)
- No graph is destroyed while its context captures, neither by the garbage collector nor by a dropped reference.
- A graph keeps alive every tensor that its code could reach when it was captured.
- cuBLAS workspaces that a graph uses lie in its own pool: torch keys them by stream, so they are dropped around each
  capture.

On the CPU a capture records the operators below autograd and a replay runs them again on the same tensors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch

from . import gate, walk
from .collector import collector_guard
from .context import ThreadContext, active_contexts, current_context
from .errors import CaptureError, GraphsafeError, NoContextError
from .failures import code_line, explain
from .recording import CaptureChecks, HostReadChecks, OperatorRecorder
from .repairs import private

NUM_RETRIES = 3
FIRST_PAUSE_S = 0.05  # between a capture that foreign work broke and the next; four times longer each time


_NOT_THE_USERS = frozenset({__file__, contextlib.__file__})


class Graph:
    """What ``capture()`` recorded. It belongs to the thread that captured it and dies with that thread's context."""

    def __init__(self, context: ThreadContext, pool: tuple[int, int] | None = None) -> None:
        self.pool = pool
        self._context = context
        self._ident = threading.get_ident()
        self._raw: torch.cuda.CUDAGraph | None = None
        self._recorder: OperatorRecorder | None = None
        self._generator: torch.Generator | None = None
        self._seed: int | None = None
        self._draws: bool | None = None  # None: not known before the first replay
        self._kept: list[Any] = []
        context.register(self)

    def replay(self) -> None:
        """Run the captured work again, on the current stream.

        Raises:
            WrongThreadError: called from another thread than the one that captured.
            GraphsafeError: the graph was reset, its context has ended, or nothing was captured.
        Thread safety: the capturing thread only; replays of other threads run beside it. No lock on CUDA.
        Sync: none.
        """
        if threading.get_ident() != self._ident:
            self._context.check_thread("A graph of the context")
        raw = self._raw
        if raw is None:
            self._replay_on_cpu()
            return
        if gate.capturing() is not None:
            raise GraphsafeError(
                "A graph was replayed inside a capture. Replay it outside, or call its function inside."
            )
        if self._draws is False:
            raw.replay()
        else:
            self._replay_drawing(raw)
        self._context.counters.replays += 1

    def _replay_drawing(self, raw: torch.cuda.CUDAGraph) -> None:
        # The graph draws from a state of its own, which takes the context's place in its sequence before every replay
        # and moves the context on by as much as it drew.
        mine, ours = self._generator, self._context.generator
        assert mine is not None
        seed, offset = ours.initial_seed(), ours.get_offset()
        if seed != self._seed:
            mine.manual_seed(seed)
            self._seed = seed
        mine.set_offset(offset)
        raw.replay()
        after = mine.get_offset()
        if self._draws is None:
            self._draws = after != offset
        ours.set_offset(after)

    def _replay_on_cpu(self) -> None:
        recorder = self._recorder
        if recorder is None:
            raise GraphsafeError(
                "This graph holds nothing to replay: it was reset, its capture failed, or its context has ended. "
                "Capture it again inside a thread context."
            )
        with self._context.seat(exclusive=recorder.draws):
            recorder.replay()
        self._context.counters.replays += 1

    def reset(self) -> None:
        """Drop what was captured and free its memory; the tensors it kept alive are let go."""
        if threading.get_ident() != self._ident and not self._context.closed:
            self._context.check_thread("A graph of the context")
        self.close()

    def close(self) -> None:
        raw, self._raw, self._recorder = self._raw, None, None
        kept, self._kept = self._kept, []
        self._context.unregister(self)
        if raw is None:
            return
        self._context.graveyard.append((raw, kept))
        if threading.get_ident() == self._ident and gate.capturing() is None:
            self._context.drain()  # else the context's own thread does it, outside captures

    def __del__(self) -> None:
        if self._raw is not None:
            self.close()

    def keep(self, *roots: Any) -> None:
        """Keep alive every tensor that ``roots`` reach now."""
        self._kept.extend(walk.tensors(*roots))


class _Session:
    """A capture in progress on one context: begins, ends, and cleans up after a failure."""

    def __init__(self, graph: Graph, context: ThreadContext) -> None:
        self._graph, self._context = graph, context

    @contextmanager
    def run(self) -> Iterator[None]:
        """The block is captured. Raises what the block raised, or CaptureError where the capture itself broke."""
        context = self._context
        with context.gate.capture(counters=context.counters), collector_guard, torch.cuda.stream(context.stream):
            try:
                with self._begun():
                    yield
            except BaseException:
                context.counters.failed_captures += 1
                raise
            context.counters.captures += 1

    @contextmanager
    def _begun(self) -> Iterator[None]:
        context, graph = self._context, self._graph
        assert graph.pool is not None and context.device.index is not None
        context.drain()
        generator = torch.Generator(context.device)
        generator.manual_seed(context.generator.initial_seed())
        generator.set_offset(context.generator.get_offset())
        default = private.default_generator(context.device)
        saved = default.graphsafe_get_state()
        torch.cuda.current_blas_handle()  # cuBLAS cannot make this thread's handle inside a capture
        private.clear_cublas_workspaces()
        torch.clear_autocast_cache()  # casts of weights belong into the graph
        raw = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.default_stream(context.device)):  # its tensors pin no segment of this stream
            raw.register_generator_state(generator)
        default.graphsafe_set_state(generator)
        try:
            try:
                private.begin_capture(raw, graph.pool)
            except RuntimeError as exc:
                self._heal(raw)
                raise explain(exc, None) from exc
            try:
                yield
            except BaseException as exc:
                raise_as_capture_error(exc, self._abandon(raw))
            try:
                self._end(raw)
            except RuntimeError as exc:
                self._heal(raw)
                raise explain(exc, None) from exc
        finally:
            default.graphsafe_set_state(saved)
            torch.clear_autocast_cache()
            private.clear_cublas_workspaces()
        graph._raw, graph._generator, graph._seed = raw, generator, generator.initial_seed()

    def _end(self, raw: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self._context.stream):  # also where the block left another stream behind
            raw.capture_end()

    def _abandon(self, raw: torch.cuda.CUDAGraph) -> bool:
        """End a capture whose block failed. Returns whether CUDA had invalidated it."""
        try:
            self._end(raw)
        except RuntimeError:
            self._heal(raw)
            return True
        raw.reset()
        return False

    def _heal(self, raw: torch.cuda.CUDAGraph) -> None:
        context, pool = self._context, self._graph.pool
        assert pool is not None and context.device.index is not None
        private.close_failed_capture(raw, context.device.index, pool)
        if context.pool == pool:
            context.pool = None  # earlier graphs keep it, later ones get another


def raise_as_capture_error(exc: BaseException, broken: bool) -> NoReturn:
    """Raise ``exc`` itself where it has nothing to do with the capture, else a CaptureError from it."""
    capture_spoke = isinstance(exc, RuntimeError) and not isinstance(exc, torch.OutOfMemoryError | GraphsafeError)
    if capture_spoke and (broken or "captur" in str(exc)):
        raise explain(exc, code_line(exc)) from exc
    raise exc


class capture:
    """Capture the block into a graph: ``with graphsafe.capture() as graph: ...``, then ``graph.replay()``.

    The block's kernels are recorded, not run; its tensors hold values after the first replay. The graph keeps alive
    what the surrounding function's variables reach, and has a memory pool of its own.

    On the CPU the block runs once under the checks that a GPU would fail, and a replay runs its operators again.

    Raises:
        NoContextError: this thread has no context.
        CaptureError: something in the block cannot be captured; nothing else is harmed.
        GateTimeout: the device's gate was not free before the deadline.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._scope: Any = None
        self._frame: FrameType | None = None

    def __enter__(self) -> Graph:
        if self._scope is not None:
            raise GraphsafeError("This capture() was entered before. Call capture() anew for each block.")
        if not active_contexts():
            raise NoContextError("capture()")
        context = current_context()
        if gate.capturing() is not None:
            raise CaptureError("A capture was begun inside a capture of the same thread.", cure="End the first one.")
        self._frame = _users_frame()
        before = walk.tensors(*_reach(self._frame))  # what the block rebinds, its kernels read all the same
        if context.device.type == "cuda":
            graph = Graph(context, torch.cuda.graph_pool_handle())
            self._scope = _Session(graph, context).run()
        else:
            graph = Graph(context)
            self._scope = _record_on_cpu(graph, context)
        try:
            self._scope.__enter__()
        except BaseException:
            graph.close()
            raise
        graph.keep(before)
        self._graph = graph
        return graph

    def __exit__(self, *exc_info: Any) -> bool | None:
        graph, frame = self._graph, self._frame
        assert graph is not None and frame is not None
        self._graph = self._frame = None
        graph._context.check_thread("A capture of the context")
        try:
            handled = self._scope.__exit__(*exc_info)
        except BaseException:
            graph.close()
            raise
        graph.keep(*_reach(frame))
        return bool(handled)


def _users_frame() -> FrameType:
    """The frame whose block is captured: the innermost that is neither ours nor contextlib's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename in _NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _reach(frame: FrameType) -> tuple[dict[str, Any], dict[str, Any]]:
    """A frame's variables, and the globals that its code names."""
    named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return dict(frame.f_locals), named


@contextmanager
def _alone_on_cpu(context: ThreadContext) -> Iterator[None]:
    """The CPU's part of a capture: alone on the device, with the context's generator, which a failure puts back."""
    scope = context.gate.capture(counters=context.counters, on_take=context.swap_in, on_give=context.swap_out)
    with scope, collector_guard:
        before = context.rng_state()
        try:
            yield
        except BaseException:
            context.set_rng_state(before)
            context.counters.failed_captures += 1
            raise
    context.counters.captures += 1


@contextmanager
def _record_on_cpu(graph: Graph, context: ThreadContext) -> Iterator[None]:
    recorder = OperatorRecorder(private.default_generator(context.device))
    with _alone_on_cpu(context):
        before = context.drawn()
        with HostReadChecks(), recorder:
            yield
        recorder.draws = context.drawn() != before
    graph._recorder = recorder


def capture_call(context: ThreadContext, fn: Callable[[], Any], *, shared_pool: bool) -> tuple[Graph, Any]:
    """Capture one call of ``fn`` on a CUDA context: the graph, and what the call returned (its static outputs).

    Args:
        shared_pool: use the context's pool, which is safe where the outputs are copied out right after each replay: the
            context's replays follow each other on one stream. Otherwise the graph has a pool of its own.
    """
    graph = Graph(context, context.shared_pool() if shared_pool else torch.cuda.graph_pool_handle())
    try:
        with _Session(graph, context).run():
            result = fn()
    except BaseException:
        graph.close()
        raise
    return graph, result


def capture_with_retries(
    context: ThreadContext, body: Callable[[], Any], undo: Callable[[], None], *, shared_pool: bool
) -> tuple[Graph, Any]:
    """``capture_call``, again where foreign work broke it; ``undo`` takes back what a failed ``body`` left behind."""
    pause = FIRST_PAUSE_S
    for attempt in range(NUM_RETRIES + 1):
        try:
            return capture_call(context, body, shared_pool=shared_pool)
        except CaptureError as exc:
            undo()
            if attempt == NUM_RETRIES or not exc.foreign:
                raise
        except BaseException:
            undo()
            raise
        with gate.released():
            time.sleep(pause)
        pause *= 4
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def checked_on_cpu(context: ThreadContext) -> Iterator[None]:
    """Run the block under the checks of a capture: CaptureError where a GPU's capture would fail."""
    generator = private.default_generator(context.device)
    with _alone_on_cpu(context), HostReadChecks(), CaptureChecks(generator):
        yield
