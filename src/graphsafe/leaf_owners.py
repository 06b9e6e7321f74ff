"""Knows on which context's stream the gradients of a leaf arrive, where threads share it.

Autograd has one node a leaf that takes its gradients, on the stream that was current when the node was made; all graphs
that reach the leaf keep it, and a new one is made once they are gone. A captured backward that meets a node of another
thread would draw that thread's stream into its capture, and what is launched there meanwhile would be recorded and not
run.

Guarantees:
- A node is marked with the stream of the context that made it, for as long as anything keeps the node. Contexts with
  another stream capture no backward that meets it: those of graphed functions and of a TrainStep run eagerly, any other
  raises CaptureError.
- A thread whose gradients may arrive on another's stream holds a shared seat in each backward: captures and exclusive
  steps wait for it, and it for them.

Not seen: a node that plain code, outside graphsafe's calls, made on another stream and still keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import gate
from .context import ThreadContext, active_contexts
from .errors import CaptureError
from .repairs import nested_backward, private

_MARK = "graphsafe.stream"  # in a node's metadata, which lives as long as the node
_guests: weakref.WeakSet[ThreadContext] = weakref.WeakSet()  # that have met nodes of others


@contextmanager
def claimed(context: ThreadContext, tensors: Iterable[torch.Tensor]) -> Iterator[bool]:
    """Keep the nodes of those leaves among ``tensors`` that lie on the context's device; mark those that nobody has.

    Entered on the context's stream, where the nodes are made that there are not. Waits for other threads' eager steps,
    which may have made some. A graph that is made inside keeps them.

    Yields:
        whether all of them are the context's own.
    """
    leaves = [x for x in tensors if x.device == context.device and x.layout is torch.strided and _takes_gradients(x)]
    nodes: list[Any] = []
    own = True
    if leaves:
        with context.seat(exclusive=True):
            nodes += [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
            own = all([_is_own(node, context) for node in nodes])
    nested_backward.around(_Backward)
    if not own:
        _guests.add(context)
    yield own
    nodes.clear()


def _takes_gradients(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view whose base was modified since: torch refuses even to look
        return False


def _is_own(node: Any, context: ThreadContext) -> bool:
    """Whether a node has the context's stream, which no other context has; from now on, if it was not marked."""
    stream = id(context) if context.stream is None else context.stream.cuda_stream
    return bool(node.metadata.setdefault(_MARK, stream) == stream)


class _Backward:
    """Holds the seats that a backward needs, and refuses one that would draw another's stream into a capture."""

    def __init__(self, roots: Any) -> None:
        self._roots, self._seats = roots, []  # type: ignore[var-annotated]

    def __enter__(self) -> None:
        contexts = [context for context in active_contexts() if context.device.type == "cuda"]
        captured = gate.capturing()
        if captured is not None:
            _check_nodes(self._roots, [context for context in contexts if context.gate is captured])
            return
        try:
            for context in sorted(_guests.intersection(contexts), key=lambda one: one.gate.order):
                seat = context.seat(exclusive=False)
                self._seats.append(seat)
                seat.__enter__()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        while self._seats:
            self._seats.pop().__exit__(*exc_info)


private.have_dynamo_skip(_Backward.__init__, _Backward.__enter__, _Backward.__exit__)


def _check_nodes(roots: Any, contexts: list[ThreadContext]) -> None:
    """Raise CaptureError where a backward inside the context's capture reaches a leaf's node of another context."""
    for context in contexts:
        for node in _nodes(roots):
            leaf = node.variable
            if leaf.device == context.device and not _is_own(node, context):
                raise CaptureError(
                    f"The backward reaches a parameter of shape {tuple(leaf.shape)} whose gradients arrive on another "
                    "thread's stream, since a graph of that thread reads it too.",
                    cure="Run the other thread's calls under torch.no_grad(), let go of what they returned, or give "
                    "each thread parameters of its own.",
                )


def _nodes(roots: Any) -> Iterator[Any]:
    """The nodes that take leaves' gradients, of all that ``roots`` depend on."""
    seen: set[Any] = set()
    some = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots or ())
    pending = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in some]
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions and private.takes_gradients(node):
            yield node
        pending.extend(one for one, _ in node.next_functions)
