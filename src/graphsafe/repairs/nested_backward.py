"""Sees a backward that torch is about to move to another thread, since it is nested too deep in others.

Autograd runs a backward that a backward starts on the same thread, 60 deep; the next one runs on a thread of a pool,
where nothing holds that is this thread's: its locks, context, capture and settings.

Guarantees:
- Works without ``install()``, is put in for good, and costs a backward one count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import private

MAX_DEPTH = 60  # of backwards inside a backward that torch keeps on one thread


class Scope(Protocol):
    """What a backward runs inside of. Not a generator: Dynamo must be told to skip its methods.

    Args:
        roots: what is differentiated: tensors or gradient edges.
        inputs: by what; nothing for all leaves.
    """

    def __init__(self, roots: Any, inputs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


class _PerThread(threading.local):
    """How many backwards this thread is in, and how many it has begun that make gradients."""

    def __init__(self) -> None:
        self.depth = 0
        self.accumulations = 0


_per_thread = _PerThread()
_scopes: list[type[Scope]] = []  # one at most
_lock = threading.Lock()  # guards the replacement; taken alone


def watch(too_deep: Callable[[], None]) -> None:
    """Have ``too_deep()`` called before each backward that would leave its thread; what it raises is raised there.

    Does nothing from the second call on, and in a torch whose engine cannot be replaced.
    """
    owner = torch.autograd.Variable
    engine = getattr(owner, "_execution_engine", None)
    if engine is None or getattr(type(engine), "counts_depth", False):
        return
    with _lock:
        engine = owner._execution_engine
        if not getattr(type(engine), "counts_depth", False):
            try:
                owner._execution_engine = _counting(type(engine), too_deep)()
            except TypeError:  # this torch's engine is no base for another
                return


def around(scope: type[Scope]) -> None:
    """Have each backward run inside ``scope(roots, inputs)``, from now on."""
    _scopes[:] = [scope]


def accumulations() -> int | None:
    """How many backwards this thread has begun that add to ``.grad``; None where they cannot be counted."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return _per_thread.accumulations if getattr(type(engine), "counts_depth", False) else None


def _counting(base: Any, too_deep: Callable[[], None]) -> Any:
    per_thread, scopes, run = _per_thread, _scopes, base.run_backward

    class CountingEngine(base):  # type: ignore[misc]
        """Torch's own engine, which says when a backward is nested too deep."""

        counts_depth = True

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            depth = per_thread.depth
            if depth > MAX_DEPTH:
                too_deep()
            per_thread.depth = depth + 1
            per_thread.accumulations += bool(kwargs.get("accumulate_grad"))
            try:
                if not scopes:
                    return run(self, *args, **kwargs)
                roots = args[0] if args else kwargs.get("tensors")
                with scopes[0](roots, args[4] if len(args) > 4 else kwargs.get("inputs")):
                    return run(self, *args, **kwargs)
            finally:
                per_thread.depth = depth

    private.have_dynamo_skip(CountingEngine.run_backward, callees=False)
    return CountingEngine
