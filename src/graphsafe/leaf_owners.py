"""Knows the thread on whose stream the gradients of a leaf arrive that threads share.

Autograd has one node a leaf that takes its gradients, on the stream that was current when the node was made. A captured
backward of another thread would draw that stream into its capture, and what its owner launches there meanwhile would be
recorded and not run.

Guarantees:
- The first context that differentiates through a leaf owns it as long as it lives; its backwards may be captured. Those
  of other contexts run eagerly, on what their forward graph saved.
- Once a leaf is shared, backwards of threads with contexts hold a shared seat: they wait for captures, and captures for
  them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .context import ThreadContext, active_contexts
from .repairs import nested_backward


class _Owners:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; taken alone
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[ThreadContext]]] = {}  # by id of the leaf
        self._nodes: weakref.WeakKeyDictionary[ThreadContext, list[Any]] = weakref.WeakKeyDictionary()

    def claim(self, context: ThreadContext, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether all of ``leaves`` are the context's own, from now on where they were nobody's."""
        own = True
        with self._lock:
            for leaf in leaves:
                found = self._owners.get(id(leaf))
                owner = found[1]() if found is not None and found[0]() is leaf else None
                if owner is None or owner.closed:
                    self._owners[id(leaf)] = (weakref.ref(leaf), weakref.ref(context))
                    # Made here, on this stream, unless something alive has it already.
                    node = torch.autograd.graph.get_gradient_edge(leaf).node
                    self._nodes.setdefault(context, []).append(node)
                elif owner is not context:
                    own = False
            if len(self._owners) > 2 * sum(map(len, self._nodes.values())) + 64:
                self._owners = {key: pair for key, pair in self._owners.items() if pair[0]() is not None}
        if not own:
            nested_backward.around(_on_seats)
        return own


@contextmanager
def _on_seats() -> Iterator[None]:
    """A shared seat on the devices of this thread's contexts."""
    contexts = [context for context in active_contexts() if context.device.type == "cuda"]
    if not contexts:
        yield
        return
    with contexts[0].seat(exclusive=False):
        yield


_owners = _Owners()
claim = _owners.claim
