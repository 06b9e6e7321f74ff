"""Lets a compiled backward overwrite what its forward saved, inside a backward that keeps its graph.

Torch compiles a backward whose graph is not kept to put results where saved tensors were ("donated buffers"), and then
refuses to run it in one that keeps the graph. The backward of a graphed function keeps the function's own graph, since
it differentiates that graph once for each replay; but every replay computes anew what is saved.

Guarantees:
- Works without ``install()``, and changes no one else's backward: a graph that the caller keeps is refused as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from . import private


class _PerThread(threading.local):
    """The graphs whose saved tensors this thread's backward reads for the last time before they are computed anew."""

    def __init__(self) -> None:
        self.once: tuple[_Indices, ...] = ()


_per_thread = _PerThread()
_lock = threading.Lock()  # guards the replacement of indices; taken alone


class _Indices(list[int]):
    """Which saved tensors a compiled backward overwrites; torch asks whether there are any before it refuses."""

    def __ne__(self, other: object) -> bool:
        return not any(self is one for one in _per_thread.once) and list.__ne__(self, other)


class allowed:
    """For the block, in this thread, compiled backwards of the graph of ``outputs`` may overwrite what was saved.

    No generator: compiled code may run inside, and Dynamo would look at a generator's frame.
    """

    def __init__(self, outputs: Iterable[torch.Tensor]) -> None:
        self._found = _indices(outputs)

    def __enter__(self) -> None:
        self._before, _per_thread.once = _per_thread.once, (*_per_thread.once, *self._found)

    def __exit__(self, *exc_info: object) -> None:
        _per_thread.once = self._before


def _indices(outputs: Iterable[torch.Tensor]) -> list[_Indices]:
    """Of each compiled backward below ``outputs`` that was compiled to overwrite."""
    found = []
    for node in private.nodes_below(output.grad_fn for output in outputs):
        compiled: Any = getattr(node, "_forward_cls", None)
        metadata: Any = getattr(compiled, "metadata", None)
        if getattr(compiled, "compiled_bw", None) is None or not getattr(metadata, "bw_donated_idxs", None):
            continue  # what is compiled in here will not overwrite
        with _lock:
            if not isinstance(metadata.bw_donated_idxs, _Indices):
                metadata.bw_donated_idxs = _Indices(metadata.bw_donated_idxs)
            found.append(metadata.bw_donated_idxs)
    return found
