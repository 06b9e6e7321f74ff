"""Functions that run as CUDA graphs: warm-up, capture and replay, for each thread and signature.

Guarantees:
- The caller's tensors are never a graph's, slots of StaticBuffers and BufferRing excepted, which are read in place.
- The first calls of a signature are real eager ones; then one capture, then replays. What cannot be captured raises
  before anything has run.
- Never replays onto memory that is no longer the captured tensor's (``memory.py``).
- Threads share the function, its modules and compiled code; graphs, pools and random numbers are each thread's own.
"""

from __future__ import annotations

import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from . import gate, walk
from .bridge import call_eagerly
from .call_buffers import CallBuffers
from .compile_gate import CompileInCapture
from .context import ThreadContext, active_contexts
from .cpu_buffers import CpuBuffers
from .draws import Draws
from .errors import NoContextError, ShapeMismatchError, is_count, require
from .failures import warn
from .fast_path import MISS, FastPath
from .leaf_owners import alive, claimed, note_leaves
from .memory import MAX_STALE
from .padding import Buckets
from .plans import GraphedStats, PerThread, Plan, State, check_aliases
from .repairs import private, rng_positions
from .signature import Call, differs, read_leaves
from .streams import on_own_stream

MAX_IN_FLIGHT = 16  # calls of one signature whose backward may still come; each keeps buffers of its own
MAX_SHORT_WAYS = 8  # signatures a thread looks through before it reads a call's signature
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)


class GraphedCallable:
    """A function whose calls are replayed as CUDA graphs. Made by ``graphed``; see there."""

    def __init__(
        self,
        fn: Callable[..., Any],
        num_warmup_iters: int = 3,
        max_graphs: int = 16,
        on_mismatch: Literal["capture", "eager", "error"] = "capture",
        outputs: Literal["copy", "alias"] = "copy",
        pad: Buckets | None = None,
    ) -> None:
        for name, value, right, rule in (
            ("fn", fn, callable(fn), "a function or a module"),
            ("num_warmup_iters", num_warmup_iters, is_count(num_warmup_iters, 0), "an int of at least 0"),
            ("max_graphs", max_graphs, is_count(max_graphs, 1), "an int of at least 1"),
            ("on_mismatch", on_mismatch, on_mismatch in ("capture", "eager", "error"), "'capture', 'eager' or 'error'"),
            ("outputs", outputs, outputs in ("copy", "alias"), "'copy' or 'alias'"),
            ("pad", pad, pad is None or isinstance(pad, Buckets), "a graphsafe.padding.Buckets, or None"),
        ):
            require(right, f"{name} is {value!r}; it is {rule}.")
        if isinstance(fn, types.FunctionType):
            functools.update_wrapper(self, fn)
        self._fn, self._pad = fn, pad
        self._arguments: tuple[Any, ...] = (fn, num_warmup_iters, max_graphs, on_mismatch, outputs, pad)
        self._num_warmup_iters, self._max_graphs = num_warmup_iters, max_graphs
        self._on_mismatch, self._alias = on_mismatch, outputs == "alias"
        self._debug = self._alias and os.environ.get("GRAPHSAFE_DEBUG", "0") not in ("", "0")
        self._per_thread = PerThread()
        self._lock = threading.Lock()  # guards the two below; taken alone
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._ended = GraphedStats()
        self._epoch = 0  # grows with every reset(), so that other threads drop their graphs at their next call
        self._closed = False

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Arguments and results are pytrees; tensors are inputs, all else is part of the signature.

        With ``outputs="alias"`` the tensors returned are the graph's own: the next call of the thread overwrites them.

        Raises:
            NoContextError: this thread has no context on the inputs' device.
            ShapeMismatchError: another signature than the first, under ``on_mismatch="error"``; or inputs on several
                devices. Nothing has run.
            CaptureError: the function cannot be captured. Nothing has run.
            GraphsafeError: an argument cannot be part of a signature, or the function was closed.
        """
        for fast in self._per_thread.fast:
            result = fast.run(args, kwargs, self._epoch)
            if result is not MISS:
                return result
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        require(not self._closed, f"{self._name} was closed; make a new graphed function.")
        callers: set[int] | None = None
        if self._pad is not None:
            callers = set(map(id, private.tree_flatten((args, kwargs))[0]))
            args, kwargs = self._pad.apply(args, kwargs)
        if gate.capturing() is not None or torch.compiler.is_dynamo_compiling():
            return self._fn(*args, **kwargs)  # part of the outer graph
        leaves, spec = private.tree_flatten((args, kwargs))
        context = self._context(leaves)
        state = self._state(context)
        odd = [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]
        if state.modules is None or not state.live():  # until something is captured the function may still change
            state.modules = walk.modules(self._fn)
        call = read_leaves(leaves, spec, context.device, [*state.modules, *(walk.modules(*odd) if odd else ())])
        self._check_call(call)
        if self._debug:
            check_aliases(call)
        plan = self._plan(state, call)
        padded = frozenset(i for i, x in enumerate(call.tensors) if callers is not None and id(x) not in callers)
        return on_own_stream(context, lambda: self._serve(state, plan, call, (self._fn, *odd), padded))

    def _serve(self, state: State, plan: Plan, call: Call, roots: tuple[Any, ...], padded: frozenset[int]) -> Any:
        if not plan.admitted:
            return self._eager(state, plan, call)
        mine = plan.buffers.get(call.slots, [])
        free = next((one for one in mine if not one.in_flight), None)
        if free is not None:
            if not free.memory.holds() or free.memory.training() != free.training:
                self._drop(state, plan, free)
                return self._eager(state, plan, call)
            plan.used = True
            state.counts.replays += 1
            self._note_short_way(state, free, call)
            return self._given(free, free.replay(call))
        if plan.calls < self._num_warmup_iters or self._is_crowded(plan, mine):
            return self._eager(state, plan, call)
        return self._capture(state, plan, call, roots, padded)

    def _capture(self, state: State, plan: Plan, call: Call, roots: tuple[Any, ...], padded: frozenset[int]) -> Any:
        kind = CpuBuffers if state.context.device.type == "cpu" else CallBuffers
        buffers = kind(
            state.context,
            self._fn,
            roots,
            alias=self._alias,
            draws=state.draws.of(call) is not False,
            pool=self._pool(state.context),
            must_be_used=self._must_be_used(),
            padded=padded,
        )
        try:
            result = buffers.capture(call, plan.trace, alive(plan.leaves))
        except CompileInCapture:
            plan.compiles += 1
            if plan.compiles > 1:
                raise
            return self._eager(state, plan, call)  # compiles outside the capture
        plan.compiles, plan.used = 0, False
        plan.buffers.setdefault(call.slots, []).append(buffers)
        state.counts.captures += 1
        state.counts.replays += 1
        return self._given(buffers, result)

    def _eager(self, state: State, plan: Plan, call: Call) -> Any:
        context, used = state.context, self._must_be_used()
        plan.draws = draws = state.draws.of(call)
        alone = draws is not False or plan.leaves is None  # so that no other thread makes the nodes that it meets
        with context.seat(exclusive=alone), claimed(context, known := alive(plan.leaves)):
            drawn = context.drawn() if draws is None else None
            with rng_positions.tracing_on(context.device) as plan.trace:
                result, leaves = call_eagerly(context, self._fn, call, lambda: plan.draws is not False, used)
            plan.leaves = note_leaves(context, leaves, known)
            if draws is None:  # the call tells
                plan.draws = state.draws.note(call, context.drawn() != drawn)
        plan.calls += 1
        state.counts.eager_calls += 1
        context.counters.eager_steps += 1
        return result

    # what a subclass asks of a call

    def _check_call(self, call: Call) -> None:
        """Raise where the call is not one that it serves."""

    def _must_be_used(self) -> Sequence[torch.Tensor] | None:
        """Parameters that outputs must depend on, as on all inputs that require grad; None: nothing must be used."""
        return None

    def _pool(self, context: ThreadContext) -> tuple[int, int] | None:
        """The pool to capture into; None: one of graphsafe's own."""
        return None

    # which graph serves a call

    def _context(self, leaves: list[Any]) -> ThreadContext:
        contexts = active_contexts()
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if device is None and contexts:
            return contexts[-1]
        found = next((context for context in contexts if context.device == device), None)
        if found is None:
            raise NoContextError(f"A graphed function ({self._name})", None if device is None else str(device))
        return found

    def _state(self, context: ThreadContext) -> State:
        states = self._per_thread.states
        state = states.get(context)
        if state is None:
            state = states[context] = State(context, self._epoch, self._forget, Draws(self._fn))
            context.register(state)
            with self._lock:
                self._states.add(state)
                weakref.finalize(state, _note_end, weakref.ref(self), state.counts).atexit = False
        elif state.epoch != self._epoch:
            state.drop()
            state.epoch = self._epoch
        return state

    def _forget(self, state: State) -> None:
        self._per_thread.states.pop(state.context, None)
        self._per_thread.fast = [fast for fast in self._per_thread.fast if fast.context is not state.context]

    def _plan(self, state: State, call: Call) -> Plan:
        plan = state.plans.get(call.key)
        if plan is not None:
            return plan
        admitted = len(state.plans) < self._max_graphs
        if state.plans:
            state.counts.mismatches += 1
            state.context.counters.mismatches += 1
            if self._on_mismatch == "error":
                first = next(iter(state.plans.values()))
                raise ShapeMismatchError(f"The call of {self._name}", first.summary, call.summary())
            admitted = admitted and self._on_mismatch == "capture"
        plan = Plan(call.summary(), admitted)
        if admitted:
            state.plans[call.key] = plan
        elif self._on_mismatch == "capture" and not state.warned:
            state.warned = True
            self._warn(
                f"has met more than max_graphs={self._max_graphs} signatures; further ones run eagerly until reset(). "
                f"This call: {call.summary()}; {differs(call, next(iter(state.plans)))}. Pad inputs to fewer shapes "
                "(pad=, graphsafe.padding), pass numbers that vary as tensors, or raise max_graphs."
            )
        return plan

    def _is_crowded(self, plan: Plan, mine: list[CallBuffers]) -> bool:
        if len(mine) < MAX_IN_FLIGHT:
            return False
        if not plan.crowded:
            plan.crowded = True
            self._warn(
                f"has {len(mine)} calls whose backward may still come, each with graphs of its own; further ones run "
                "eagerly. Use torch.no_grad() where nothing is trained, and detach() what is kept."
            )
        return True

    def _drop(self, state: State, plan: Plan, buffers: CallBuffers) -> None:
        """What ``buffers`` were captured with is no longer there: drop all that the signature has."""
        self._per_thread.fast.clear()
        state.modules = None
        plan.drop()
        plan.stale = 0 if plan.used else plan.stale + 1
        if plan.stale >= MAX_STALE:
            plan.admitted = False
            self._warn(
                f"reads {buffers.memory.changed()}, which was another one at every call, so it runs eagerly. Pass what "
                "changes as an argument, or change it in place."
            )

    def _note_short_way(self, state: State, buffers: CallBuffers, call: Call) -> None:
        """Have the next call like this one go the short way, if it can."""
        if self._pad is None and not self._debug and not buffers.has_short_way:
            fast = FastPath.of(state.context, buffers, call, state.counts, self._epoch)
            if fast is not None:
                buffers.has_short_way = True
                forgotten = self._per_thread.fast[MAX_SHORT_WAYS - 1 :]
                self._per_thread.fast = [fast, *self._per_thread.fast[: MAX_SHORT_WAYS - 1]]
                for other in forgotten:
                    other.buffers.has_short_way = False

    def _given(self, buffers: CallBuffers, result: Any) -> Any:
        if self._debug:
            for leaf in filter(torch.is_tensor, private.tree_flatten(result)[0]):
                leaf._graphsafe_alias = (buffers, buffers.generation)
        return result

    # managing

    def reset(self) -> None:
        """Drop all graphs: this thread's now, another's at its next call. The next calls warm up and capture again."""
        with self._lock:
            self._epoch += 1
        self._per_thread.fast.clear()
        for state in self._per_thread.states.values():
            state.drop()
            state.epoch = self._epoch

    def close(self) -> None:
        """``reset()`` for good: a further call raises GraphsafeError. A second close does nothing."""
        self._closed = True
        self.reset()

    def stats(self) -> GraphedStats:
        """What the function did so far, in all threads."""
        total = GraphedStats()
        with self._lock:
            total.add(self._ended)
            for state in list(self._states):
                total.add(state.counts)
                live = state.live()
                total.num_graphs += sum(one.num_graphs for one in live)
                total.num_bytes += sum(one.num_bytes for one in live)
        return total

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and what unpickles, is a graphed function without graphs."""
        return type(self), self._arguments

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__qualname__", type(self._fn).__name__)

    def _warn(self, text: str) -> None:
        warn(f"The graphed function {self._name} {text}")

    def _lint_call(self) -> Callable[..., Any]:
        return self._fn


def _note_end(function: weakref.ref[GraphedCallable], counts: GraphedStats) -> None:
    """A finaliser, which may interrupt anything: no lock."""
    owner = function()
    if owner is not None:
        owner._ended.add(counts)


@overload
def graphed(
    fn: None = None,
    num_warmup_iters: int = 3,
    max_graphs: int = 16,
    on_mismatch: Literal["capture", "eager", "error"] = "capture",
    outputs: Literal["copy", "alias"] = "copy",
    pad: Buckets | None = None,
) -> Callable[[Callable[..., Any]], GraphedCallable]: ...


@overload
def graphed(
    fn: Callable[..., Any],
    num_warmup_iters: int = 3,
    max_graphs: int = 16,
    on_mismatch: Literal["capture", "eager", "error"] = "capture",
    outputs: Literal["copy", "alias"] = "copy",
    pad: Buckets | None = None,
) -> GraphedCallable: ...


def graphed(
    fn: Callable[..., Any] | None = None,
    num_warmup_iters: int = 3,
    max_graphs: int = 16,
    on_mismatch: Literal["capture", "eager", "error"] = "capture",
    outputs: Literal["copy", "alias"] = "copy",
    pad: Buckets | None = None,
) -> Any:
    """Have a function or module run as CUDA graphs, one a thread and signature. A decorator, with or without arguments.

    A signature is the shapes, dtypes, devices, strides and ``requires_grad`` of the tensors among the arguments, every
    other argument, grad mode, inference mode, autocast, and train/eval of the modules that ``fn`` reaches. Gradients
    reach the inputs and every leaf that ``fn`` reads; several calls may be in flight before their backwards.

    Args:
        fn: pytrees in and out. What it does to Python objects happens when it is captured, and not in a replay.
        num_warmup_iters: eager calls of a signature before it is captured.
        max_graphs: signatures a thread captures; further ones run eagerly, with one warning, until ``reset()``.
        on_mismatch: what a signature unlike the first gets: "capture" (a graph of its own), "eager", or "error".
        outputs: "copy", or "alias": the graph's own tensors, which the thread's next call overwrites. With the
            environment variable GRAPHSAFE_DEBUG=1, an overwritten one that comes back as an input raises.
        pad: pads inputs to few shapes, and hands ``fn`` a ``mask``; see ``graphsafe.padding.Buckets``.

    Raises:
        GraphsafeError: an argument makes no sense.
    Thread safety: any number of threads, each in a context of the inputs' device.
    Sync: none after the capture.
    """
    if fn is None:
        return functools.partial(
            GraphedCallable,
            num_warmup_iters=num_warmup_iters,
            max_graphs=max_graphs,
            on_mismatch=on_mismatch,
            outputs=outputs,
            pad=pad,
        )
    return GraphedCallable(fn, num_warmup_iters, max_graphs, on_mismatch, outputs, pad)
