"""Captures: of a block, or of one call that is tried again where foreign work broke it.

Guarantees:
- A capture runs on the context's own stream, with an RNG state of its own, alone on its device; sessions.py says how.
- No graph is destroyed while its context captures, neither by the garbage collector nor by a dropped reference.
- A graph keeps alive every tensor that its code could reach when it was captured.

On the CPU a capture records the operators below autograd and a replay runs them again on the same tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from . import gate, walk
from .context import ThreadContext, active_contexts, current_context
from .errors import CaptureError, GraphsafeError, NoContextError, WrongThreadError
from .failures import thread_name
from .graph import Graph as Graph
from .repairs import private
from .repairs.rng_positions import Trace
from .sessions import CpuSession, CudaSession, Session

NUM_RETRIES = 3
FIRST_PAUSE_S = 0.05  # between a capture that foreign work broke and the next; four times longer each time

_OWN_REFERENCES = 3  # to a frame's dict of variables: the frame's, that of the code which looks, and its argument
_NOT_THE_USERS = frozenset({__file__, contextlib.__file__})


class _Block:
    """A session around a ``with`` block."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        try:
            self._session.begin()
        except BaseException:
            self._session.put_back()
            raise

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        session = self._session
        try:
            if not session.is_open:
                return  # it was given up inside the block
            if exc is None:
                session.end()
                return
            error = session.failed(exc)
        except BaseException:
            session.put_back()
            raise
        if error is not None:
            raise error from exc

    def take_back(self) -> None:
        """Have the context's generator as it was: a capture that worked is not wanted after all."""
        self._session.put_back()
        self._session.take_back()


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
        self._block: _Block | None = None
        self._frame: FrameType | None = None

    def __enter__(self) -> Graph:
        if self._block is not None:
            raise GraphsafeError("This capture() was entered before. Call capture() anew for each block.")
        if not active_contexts():
            raise NoContextError("capture()")
        context = current_context()
        if gate.capturing() is not None:
            text = "A capture was begun inside a capture of the same thread."
            raise CaptureError(text, cure="End the first one.", thread=thread_name())
        self._frame = frame = _users_frame()
        before = walk.tensors(*_reach(frame))  # what the block rebinds, its kernels read all the same
        name = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if context.device.type == "cuda":
            graph = Graph(context, torch.cuda.graph_pool_handle(), name=name)
            block = _Block(CudaSession(graph, context))
        else:
            graph = Graph(context, name=name)
            block = _Block(CpuSession(graph, context))
        graph.keep(before)
        self._block, self._graph = block, graph
        try:
            block.__enter__()
        except BaseException:
            graph.close()
            raise
        return graph

    def __exit__(self, *exc_info: Any) -> bool | None:
        graph, frame, block = self._graph, self._frame, self._block
        assert graph is not None and frame is not None and block is not None
        try:
            graph._context.check_thread("A capture of the context")
            self._graph = self._frame = None
            block.__exit__(*exc_info)
            graph.keep(*_reach(frame))
        except WrongThreadError:  # its own thread goes on
            raise
        except BaseException:
            graph.close()
            block.take_back()
            raise
        return None


def _users_frame() -> FrameType:
    """The frame whose block is captured: the innermost that is neither ours nor contextlib's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename in _NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _reach(frame: FrameType) -> tuple[dict[str, Any], dict[str, Any]]:
    """A frame's variables, and the globals that its code names."""
    named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    found = frame.f_locals
    variables = dict(found)
    copied = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(found) is dict
    if copied and sys.getrefcount(found) <= _OWN_REFERENCES:  # else the user has it from locals()
        found.clear()  # before Python 3.13 a function's frame keeps this copy, and so all that was in it
    return variables, named


def _name(fn: Callable[[], Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def capture_call(
    context: ThreadContext,
    fn: Callable[[], Any],
    *,
    shared_pool: bool = False,
    pool: tuple[int, int] | None = None,
    name: str | None = None,
    trace: Trace | None = None,
) -> tuple[Graph, Any]:
    """Capture one call of ``fn`` on a CUDA context: the graph, and what the call returned (its static outputs).

    Args:
        shared_pool: use the context's pool, which is safe where the outputs are copied out right after each replay: the
            context's replays follow each other on one stream. Otherwise the graph has a pool of its own.
        pool: handle of the pool to use instead, whose graphs the caller knows to be safe with each other. A pool that
            a failed capture made unusable (torch <= 2.13) is replaced by a new one: ``graph.pool`` says which it is.
        name: of the graph, for reports; None: the function's.
        trace: what an eager call did with the random state, where it saved or set it.
    """
    shares = shared_pool or pool is not None
    if pool is None and shared_pool:
        pool = context.shared_pool()
    if pool is None or private.pool_is_spoiled(pool):
        pool = torch.cuda.graph_pool_handle()
    graph = Graph(context, pool, name=name or _name(fn), pool_shared=shares)
    block = _Block(CudaSession(graph, context, trace))
    try:
        with block:
            result = fn()
    except BaseException as exc:
        try:
            block.__exit__(type(exc), exc, None)  # nothing is left to do, unless an interrupt kept `with` from it
        finally:
            graph.close()
        raise
    return graph, result


def capture_with_retries(
    context: ThreadContext,
    body: Callable[[], Any],
    undo: Callable[[], None],
    *,
    shared_pool: bool = False,
    pool: tuple[int, int] | None = None,
    name: str | None = None,
    trace: Trace | None = None,
) -> tuple[Graph, Any]:
    """``capture_call``, again where foreign work broke it; ``undo`` takes back what a failed ``body`` left behind."""
    name = name or _name(body)
    pause = FIRST_PAUSE_S
    for attempt in range(NUM_RETRIES + 1):
        try:
            return capture_call(context, body, shared_pool=shared_pool, pool=pool, name=name, trace=trace)
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


def checked_on_cpu(context: ThreadContext) -> AbstractContextManager[None]:
    """Run the block under the checks of a capture: CaptureError where a GPU's capture would fail."""
    return _Block(CpuSession(None, context))
