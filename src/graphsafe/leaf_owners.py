"""Knows on which context's stream the gradients of a leaf arrive, where threads share it.

Autograd has one node a leaf that takes its gradients, on the stream that was current when the node was made; all graphs
that reach the leaf keep it, and a new one is made once they are gone. A captured backward that meets a node of another
thread would draw that thread's stream into its capture, and what is launched there meanwhile would be recorded and not
run.

Guarantees:
- A node that a graphed function or a captured TrainStep makes is marked with its context's stream. Contexts with
  another stream capture no backward that meets it: those of graphed functions and of a TrainStep run eagerly, any other
  raises CaptureError.
- Once a graphed function has differentiated on a GPU, threads with contexts hold a shared seat in each backward, whose
  gradients may arrive on another's stream: captures and exclusive steps wait for it, and it for them.

Not seen: a node that plain code, outside graphsafe's calls, made on another stream and still keeps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from . import gate
from .context import ThreadContext, active_contexts
from .errors import CaptureError
from .repairs import nested_backward, private

_MARK = "graphsafe.stream"  # in a node's metadata, which lives as long as the node
_lock = threading.Lock()  # makes making a node and marking it one; taken alone
Leaves = tuple["weakref.ref[torch.Tensor]", ...]


class _Use:
    """Whether graphed functions differentiate, so that every other eager step marks its nodes too."""

    graphed = False


def watch() -> None:
    """Have each backward of the process hold the seats that it needs."""
    nested_backward.around(_Backward)


class AnothersStream(CaptureError):
    """A captured backward would have met a node of another stream."""


@contextmanager
def claimed(context: ThreadContext, leaves: Iterable[torch.Tensor], *, alone: bool = False) -> Iterator[bool]:
    """Keep the nodes of those ``leaves`` that lie on the context's device; mark those that nobody has marked.

    Entered on the context's stream, where the nodes are made that there are not. Graphs made inside keep them.

    Args:
        alone: wait for eager steps of other threads, which do not mark theirs before graphed functions differentiate.
    Yields:
        whether all of them have the context's stream. On the CPU always True.
    """
    kept: list[Any] = []
    own = True
    here = [leaf for leaf in leaves if _takes_gradients(leaf, context)]
    if here:
        with context.seat(exclusive=alone):  # no capture is making nodes meanwhile
            own = _mark(here, context, kept)
    yield own
    kept.clear()


def claimed_if_shared(context: ThreadContext, leaves: Iterable[torch.Tensor]) -> AbstractContextManager[bool]:
    """``claimed`` where another thread's graphed function may meet the nodes of this step. Called on a seat."""
    return claimed(context, leaves if _Use.graphed else ())


def note_leaves(
    context: ThreadContext, leaves: Iterable[torch.Tensor], claimed_before: Iterable[torch.Tensor] = ()
) -> Leaves:
    """Mark the nodes of what a graphed call has differentiated through, still on its seat. Returns the leaves."""
    here = [leaf for leaf in leaves if _takes_gradients(leaf, context)]
    if here:
        _Use.graphed = True
        if not set(map(id, here)) <= set(map(id, claimed_before)):
            _mark(here, context, [])
    return tuple(map(weakref.ref, here))


def note_nodes(context: ThreadContext, results: Iterable[Any]) -> None:
    """Mark the nodes that a graphed call has met, still inside its capture."""
    _Use.graphed = True
    for node in _nodes([one for one in results if isinstance(one, torch.Tensor)], ()):
        if node.variable.device == context.device:
            _is_own(node, context)


def alive(leaves: Leaves | None) -> list[torch.Tensor]:
    """Those that there still are."""
    return [leaf for ref in leaves or () if (leaf := ref()) is not None]


def _takes_gradients(tensor: torch.Tensor, context: ThreadContext) -> bool:
    if context.stream is None or tensor.device != context.device or tensor.layout is not torch.strided:
        return False
    if torch.is_inference_mode_enabled():  # where no graph is made
        return False
    try:
        return tensor.requires_grad and tensor.is_leaf and not torch.nn.parameter.is_lazy(tensor)
    except RuntimeError:  # a view whose base was modified since: torch refuses even to look
        return False


def _mark(leaves: Iterable[torch.Tensor], context: ThreadContext, kept: list[Any]) -> bool:
    """Mark the nodes of ``leaves`` that are not, and keep them. Returns whether all have the context's stream."""
    with _lock:
        kept += [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
        return all([_is_own(node, context) for node in kept])


def _is_own(node: Any, context: ThreadContext) -> bool:
    """Whether a node has the context's stream, which no other context has; from now on, if it was not marked."""
    assert context.stream is not None
    stream = context.stream.cuda_stream
    return bool(node.metadata.setdefault(_MARK, stream) == stream)


class _Backward:
    """Holds the seats that a backward needs, and refuses one that would draw another's stream into a capture."""

    def __init__(self, roots: Any, inputs: Any) -> None:
        self._roots, self._inputs = roots, inputs
        self._seats: list[gate.Scope] = []

    def __enter__(self) -> None:
        contexts = [context for context in active_contexts() if context.device.type == "cuda"]
        captured = gate.capturing()
        if captured is not None:
            _check_nodes(self._roots, self._inputs, [context for context in contexts if context.gate is captured])
            return
        if not _Use.graphed or threading.get_ident() in gate.compiling:  # a compile's own backward launches nothing
            return
        held = {hold.gate for hold in gate.held()}  # in another asyncio task, perhaps, which does not run meanwhile
        try:
            for context in sorted(contexts, key=lambda one: one.gate.order):
                if context.gate not in held:
                    seat = context.seat(exclusive=False)
                    self._seats.append(seat)
                    seat.__enter__()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        while self._seats:
            self._seats.pop().__exit__(*exc_info)


private.have_dynamo_skip(_mark, _Backward.__init__, _Backward.__enter__, _Backward.__exit__)


def _check_nodes(roots: Any, inputs: Any, contexts: list[ThreadContext]) -> None:
    """Raise CaptureError where a backward inside the context's capture reaches a leaf's node of another stream."""
    for context in contexts:
        nodes = [node for node in _nodes(roots, inputs) if node.variable.device == context.device]
        for node in nodes:
            if _MARK in node.metadata and not _is_own(node, context):
                raise AnothersStream(
                    f"The backward reaches a parameter of shape {tuple(node.variable.shape)} whose gradients arrive on "
                    "another stream, since a graph of another thread, or of a context that has ended, reads it too.",
                    cure="Run the other thread's calls under torch.no_grad(), let go of what they returned, or give "
                    "each thread parameters of its own.",
                )
        for node in nodes:
            _is_own(node, context)


def _nodes(roots: Any, inputs: Any) -> Iterator[Any]:
    """The nodes that take leaves' gradients, of all that ``roots`` depend on, or of those ``inputs`` alone."""
    wanted = {_node(one) for one in _tuple(inputs)}
    for node in private.nodes_below(_node(root) for root in _tuple(roots)):
        if private.takes_gradients(node) and (not wanted or node in wanted):
            yield node


def _node(found: Any) -> Any:
    """The node of a tensor or a gradient edge; None where it has none."""
    if not isinstance(found, torch.Tensor):
        return found.node
    if found.grad_fn is None and found.requires_grad and not torch.is_inference_mode_enabled():
        return torch.autograd.graph.get_gradient_edge(found).node
    return found.grad_fn


def _tuple(found: Any) -> tuple[Any, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found or ())
