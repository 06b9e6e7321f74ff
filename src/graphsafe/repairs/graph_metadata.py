"""A19: a thread that runs a graph changes the metadata of the one that another thread traces.

What users see: an AssertionError in ``torch.fx.traceback.reset_grad_fn_seq_nr``, or nodes with another graph's stack
traces, when threads compile beside threads that run graphs node by node (backend ``aot_eager``, ``fx.Interpreter``).
Cause: ``torch.fx.traceback`` keeps the current node's metadata, and whether to keep any, once for the process.

The repair lets a thread set the current metadata only inside its own ``preserve_node_meta``.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A19"
MODULES: Final = ("torch.fx.traceback",)
EVIDENCE: Final = Evidence(
    fault="an AssertionError in reset_grad_fn_seq_nr when a thread compiles beside threads that run aot_eager graphs",
    reports=(),
    versions="2.9.1, measured; in the source of all read",
)

_patches = Patches()
undo = _patches.undo


class _PerThread(threading.local):
    """How deep this thread is in blocks that keep metadata."""

    depth = 0


_per_thread = _PerThread()


def probe(module: types.ModuleType) -> bool:
    """Whether plain globals of the module hold the current metadata."""
    return isinstance(vars(module).get("current_meta"), dict) and "should_preserve_node_meta" in vars(module)


def repair(module: types.ModuleType) -> None:
    """Have only a thread that keeps metadata set it."""
    preserve = getattr(module, "preserve_node_meta", None)
    set_meta: Callable[..., AbstractContextManager[None]] | None = getattr(module, "set_current_meta", None)
    if preserve is None or set_meta is None:
        raise RepairError("torch.fx.traceback has no preserve_node_meta or no set_current_meta")

    @functools.wraps(preserve)
    @contextmanager
    def preserve_node_meta(*args: Any, **kwargs: Any) -> Iterator[Any]:
        _per_thread.depth += 1
        try:
            with preserve(*args, **kwargs) as value:
                yield value
        finally:
            _per_thread.depth -= 1

    @functools.wraps(set_meta)
    def set_current_meta(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return set_meta(*args, **kwargs) if _per_thread.depth else nullcontext()

    for name, ours in (("preserve_node_meta", preserve_node_meta), ("set_current_meta", set_current_meta)):
        former = getattr(module, name)
        for holder in [other for other in list(sys.modules.values()) if _holds(other, name, former)]:
            _patches.attribute(holder, name, ours)


def _holds(module: Any, name: str, value: object) -> bool:
    """Whether one of torch's modules has imported ``value`` by its name."""
    is_torchs = isinstance(module, types.ModuleType) and module.__name__.startswith("torch.")
    return is_torchs and vars(module).get(name) is value
