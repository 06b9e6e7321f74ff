"""What one call in flight of a graphed function needs: static inputs, a forward graph and its backward graphs.

Guarantees:
- A forward is captured once, a backward once for each set of outputs that gradients reach, each after a real one of its
  kind. The backward graphs run on what the last forward saved, in a pool that these graphs alone use.
- Whoever holds outputs that may still be differentiated holds these buffers: ``in_flight``.
- On CUDA a replay runs no Python of the user's. (``cpu_buffers.py`` is the same on the CPU.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import gate, walk
from .bridge import (
    Gradients,
    Passage,
    SavedTensors,
    check_changed_input,
    check_result,
    check_used,
    differentiate,
    leaves_of,
    sequence_number,
    storages,
)
from .capture import Graph, capture_with_retries
from .compile_gate import CompileInCapture
from .context import ThreadContext
from .errors import CaptureError, require
from .leaf_owners import claimed, note_nodes
from .memory import Memory, refuse_rebound
from .repairs import nested_backward, private, rng_positions
from .repairs.rng_positions import Trace
from .sessions import watch_backwards
from .signature import Call, StaticInputs, copied

# outputs with a gradient; inputs and leaves that need one; whether another backward may follow
Pattern = tuple[tuple[bool, ...], tuple[bool, ...], bool]


@dataclass
class BackwardGraph:
    """One backward graph, or None before its second call: the gradients it reads, and those it leaves."""

    graph: Graph | None = None
    trace: Trace | None = None  # what the first call did with the random state
    given: tuple[torch.Tensor, ...] = ()
    left: Gradients = ()
    compiles: int = 0


class CallBuffers:
    """Captured once with ``capture``, then run for each call.

    Args:
        context: of the calling thread.
        fn: the user's function.
        roots: what ``fn`` reaches, and the arguments that are no tensors.
        alias: whether outputs are given out as they are.
        draws: whether a call of this signature draws random numbers.
        pool: whose memory to use; None: the context's, or one of its own where something must outlive other replays.
        must_be_used: see ``bridge.check_used``.
        padded: the inputs that a padding rule has copied.
    """

    def __init__(
        self,
        context: ThreadContext,
        fn: Callable[..., Any],
        roots: tuple[Any, ...],
        *,
        alias: bool,
        draws: bool,
        pool: tuple[int, int] | None = None,
        must_be_used: Sequence[torch.Tensor] | None = None,
        padded: frozenset[int] = frozenset(),
    ) -> None:
        self.context, self._fn, self._roots, self.alias, self._draws = context, fn, roots, alias, draws
        self._pool, self._must_be_used, self._padded = pool, must_be_used, padded
        self.graph: Graph | None = None
        self.has_short_way = False
        self.generation = 0  # of the outputs: grows with every replay
        self._passage: weakref.ref[Passage] | None = None
        self._backwards: dict[Pattern, BackwardGraph] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a backward may still read what the last forward saved."""
        passage = None if self._passage is None else self._passage()
        return passage is not None and passage.in_flight

    @property
    def differentiates(self) -> bool:
        """Whether gradients flow through the outputs."""
        return bool(self._crossing)

    @property
    def num_graphs(self) -> int:
        return (self.graph is not None) + sum(entry.graph is not None for entry in tuple(self._backwards.values()))

    @property
    def num_bytes(self) -> int:
        """Of the pools, as far as these graphs' captures made them grow."""
        graphs = [self.graph, *(entry.graph for entry in tuple(self._backwards.values()))]
        return sum(graph.num_bytes for graph in graphs if graph is not None)

    def _name(self) -> str:
        return str(getattr(self._fn, "__qualname__", type(self._fn).__name__))

    # the forward

    def capture(self, call: Call, trace: Trace | None = None, leaves: Sequence[torch.Tensor] = ()) -> Any:
        """The capturing call: records, and runs once. Returns its result.

        Args:
            trace: of an eager call like it.
            leaves: that gradients reached in it.
        """
        with torch.inference_mode(False):
            self.inputs = StaticInputs(call)
        self.inputs.load(call)
        self._callers = call.tensors
        self._differentiable = tuple(
            i for i, tensor in enumerate(call.tensors) if torch.is_grad_enabled() and tensor.requires_grad
        )
        self._given = [
            tensor.detach().requires_grad_() if i in self._differentiable else tensor
            for i, tensor in enumerate(self.inputs.tensors)
        ]
        with claimed(self.context, leaves if torch.is_grad_enabled() else ()):
            return self._capture(call, trace)

    def _capture(self, call: Call, trace: Trace | None) -> Any:
        before, memory = walk.tensors(self._roots), Memory(*self._roots)
        gradients = HeldGradients(before)
        watched = [tensor for tensor in (*self._given, *before) if not tensor.is_inference()]
        versions = [tensor._version for tensor in watched]
        saved = SavedTensors([*before, *self._given])
        with_gradient = torch.is_grad_enabled()
        since = sequence_number() if with_gradient else 0
        args, kwargs = call.with_tensors(self._given)

        def body() -> Any:
            with saved.hooks() if with_gradient else nullcontext():
                result = self._fn(*args, **kwargs)
            if with_gradient:
                note_nodes(self.context, private.tree_flatten(result)[0])
            return result

        pool = self._pool
        if pool is None and (with_gradient or self.alias):
            pool = self._pool = torch.cuda.graph_pool_handle()
        self.graph, result = capture_with_retries(
            self.context, body, gradients.restore, shared_pool=pool is None, pool=pool, name=self._name(), trace=trace
        )
        self._pool = self.graph.pool if pool is not None else None  # a failed try may have cost the first one
        try:
            gradients.check()
            refuse_rebound(memory)
            self._note(call, result, since, before)
            changed = [x for x, version in zip(watched, versions, strict=True) if x._version != version]
            self._note_changes(changed, before)
            with claimed(self.context, self._sources) as self._owns_leaves:
                pass  # the graph keeps them
        except BaseException:
            self.close()
            raise
        saved.hand_out(self.aged)
        own = storages(self.inputs.copied)
        self._saved = [tensor for tensor in saved.found if not storages([tensor]) & own]
        self.graph.keep(before, self._roots, self.inputs.tensors, gradients.tensors())
        return self.replay(call, loaded=True)

    def _note_changes(self, changed: Sequence[torch.Tensor], outside: Sequence[torch.Tensor]) -> None:
        """What the function changed in place: inputs are to be copied back, but for those that are read in place."""
        self.mutated: tuple[int, ...] = ()
        for index, tensor in enumerate(self._given):
            if not any(tensor is one for one in changed):
                continue
            check_changed_input(index, tensor.requires_grad)
            if any(self.inputs.tensors[index] is one for one in self.inputs.copied):
                self.mutated += (index,)
        if self.mutated:
            self._check_apart(outside)
        own = storages(self.inputs.copied)
        self._changed = [tensor for tensor in changed if not storages([tensor]) & own]
        self._callers = ()

    def _check_apart(self, outside: Sequence[torch.Tensor]) -> None:
        """Raise where an input that is changed in place shares memory with what would not see the change."""
        for index in self.mutated:
            require(
                index not in self._padded,
                f"The function changes its input {index} in place, which pad= has copied, so nobody sees it. "
                "Return the new value, or do not pad that input (Buckets(names=...)).",
            )
            others = [x for i, x in enumerate(self._callers) if i != index]
            require(
                not storages([self._callers[index]]) & storages([*others, *outside]),
                f"The function changes its input {index} in place, which shares memory with another input or with a "
                "tensor that it reads from outside; a graph has its own copy of each input. Pass it once, or a clone.",
            )

    def _note(self, call: Call, result: Any, since: int, before: Sequence[torch.Tensor]) -> None:
        """What the captured call returned, and what it depends on."""
        self.leaves, self.spec = private.tree_flatten(result)
        check_result(self.leaves)
        self.given = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        self._crossing = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not torch.is_grad_enabled():
            self._crossing = []
        self._outputs = [self.leaves[i] for i in self._crossing]
        self._sources = leaves_of(self._outputs, self._given, since, before)
        check_used(self._outputs, self._wanted(), self._must_be_used, since)
        self.static = [leaf for leaf in self.given if isinstance(leaf, torch.Tensor)]
        known = storages([*before, *self._given])
        self._made = [x for x in self.static if storages([x]) and not storages([x]) & known]
        self.aged = [tensor for tensor in self._made if self.alias and not tensor.is_inference()]
        self.memory = Memory(*self._roots)
        self.training = self.memory.training()

    def replay(self, call: Call, *, loaded: bool = False) -> Any:
        """Run for one more call. Returns its result."""
        if not loaded:
            self.inputs.load(call)
        assert self.graph is not None
        self._forward_offset = self.context.generator.get_offset()
        self.graph.replay()
        self.copy_back(call)
        self.age()
        return self._give_out(call, self.leaves, self._saved, self._differentiate)

    def copy_back(self, call: Call) -> None:
        """Give the caller's tensors what the function changed in place."""
        if self.mutated:
            with torch.no_grad():
                torch._foreach_copy_(
                    [call.tensors[i] for i in self.mutated], [self.inputs.tensors[i] for i in self.mutated]
                )

    def age(self) -> None:
        """Have autograd, and a debug run, know that aliases given out before are out of date."""
        self.generation += 1
        if self.aged or self._changed:
            torch.autograd.graph.increment_version([*self.aged, *self._changed])

    def _give_out(
        self,
        call: Call,
        leaves: Sequence[Any],
        saved: Sequence[torch.Tensor],
        run: Callable[..., Gradients],
        inner: Sequence[torch.Tensor] = (),
    ) -> Any:
        given = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        if not self.alias:
            given = copied(given)
        if self._crossing:
            passage = Passage([given[i] for i in self._crossing], self._sources, saved, run, inner)
            self._passage = weakref.ref(passage)
            crossed = passage.cross([call.tensors[i] for i in self._differentiable])
            for index, tensor in zip(self._crossing, crossed, strict=True):
                given[index] = tensor
        return private.tree_unflatten(given, self.spec)

    # the backward

    def _differentiate(
        self, inner: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]
    ) -> Gradients:
        self.context.check_thread("A backward through a graph of the context")
        pattern: Pattern = (tuple(gradient is not None for gradient in gradients), needed, private.keeps_graph())
        entry = self._backwards.get(pattern)
        eager = not self._owns_leaves or gate.capturing() is not None
        if entry is None or eager or self.graph is None or self.graph.closed:
            entry = self._backwards.setdefault(pattern, BackwardGraph())
            return _own(self._differentiate_traced(entry, gradients, needed))
        present = [gradient for gradient in gradients if gradient is not None]
        if entry.graph is None:
            return self._capture_backward(entry, present, gradients, needed)
        torch._foreach_copy_(list(entry.given), present)
        entry.graph.forward_offset = self._forward_offset
        entry.graph.replay()
        return _own(entry.left)

    def _differentiate_traced(self, entry: BackwardGraph, gradients: Gradients, needed: tuple[bool, ...]) -> Gradients:
        with self.context.seat(exclusive=self._draws):
            assert self.context.device.index is not None
            with rng_positions.tracing(self.context.device.index, self._forward_offset) as entry.trace:
                return self._differentiate_eagerly(self._outputs, gradients, needed)

    def _differentiate_eagerly(
        self, outputs: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]
    ) -> Gradients:
        with self.context.seat(exclusive=self._draws):
            return differentiate(outputs, [*self._wanted(), *self._sources], gradients, needed)

    def _wanted(self) -> list[torch.Tensor]:
        return [self._given[i] for i in self._differentiable]

    def _capture_backward(
        self, entry: BackwardGraph, present: list[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]
    ) -> Gradients:
        given = tuple(torch.empty_like(gradient) for gradient in present)
        torch._foreach_copy_(list(given), present)
        left = iter(given)
        static = tuple(None if gradient is None else next(left) for gradient in gradients)

        def body() -> Gradients:
            return differentiate(self._outputs, [*self._wanted(), *self._sources], static, needed)

        try:
            graph, result = capture_with_retries(
                self.context, body, lambda: None, pool=self._pool, name=f"backward of {self._name()}", trace=entry.trace
            )
        except CompileInCapture:
            entry.compiles += 1
            if entry.compiles > 1:
                raise
            return _own(self._differentiate_traced(entry, gradients, needed))
        graph.keep(self._outputs, self._sources, given)
        entry.graph, entry.given, entry.left = graph, given, result
        graph.forward_offset = self._forward_offset
        graph.replay()
        return _own(result)

    def close(self) -> None:
        """Let the graphs go."""
        for graph in (self.graph, *(entry.graph for entry in tuple(self._backwards.values()))):
            if graph is not None:
                graph.close()
        self._backwards.clear()


class HeldGradients:
    """Sees whether a function runs a backward of its own, and takes back the gradients that it made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        self._held = [(x, x.grad, -1 if x.grad is None else x.grad._version) for x in leaves]
        watch_backwards()
        self._count = nested_backward.accumulations()

    def check(self) -> None:
        """Raise CaptureError where this thread has run a backward; another's, on leaves that are shared, is its own."""
        if self._made_here():
            self.restore()
            raise _ran_a_backward()

    def _made_here(self) -> bool:
        count = nested_backward.accumulations()
        if count is not None and self._count is not None:
            return count != self._count
        return any(x.grad is not held or (held is not None and held._version != v) for x, held, v in self._held)

    def restore(self) -> None:
        if self._made_here():
            for tensor, gradient, _ in self._held:
                tensor.grad = gradient

    def tensors(self) -> list[torch.Tensor]:
        return [gradient for _, gradient, _ in self._held if gradient is not None]


def _ran_a_backward() -> CaptureError:
    return CaptureError(
        "The function ran a backward of its own that made gradients inside the capture: the next replay would "
        "overwrite them.",
        cure="Return the loss and call backward() on it outside, or use graphsafe.TrainStep for whole steps.",
    )


def _own(gradients: Gradients) -> Gradients:
    """Copies in memory of their own."""
    return tuple(copied(gradients))
