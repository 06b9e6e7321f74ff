"""Sees calls that no operator shows: synchronising, seeding, reentrant checkpoints, backwards.

Guarantees:
- Only the thread that watches is watched, through ``sys.setprofile``, which is the thread's own. Nothing of torch is
  patched.
- Where a profiler written in Python, or an old cProfile, is in that place already, it is left alone: nothing is seen.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from .failures import DEEP_BACKWARD, is_users
from .repairs import observing
from .repairs.nested_backward import MAX_DEPTH

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "repairs") + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WRAPPERS = (_OURS, *(os.path.join(_TORCH, name) for name in ("_compile.py", "_dynamo", "utils/_contextlib.py")))

_SYNC = "the host waits for the device, which a capture forbids"
_SEED = "the generator's seed cannot be set in a capture"
_CACHE = "the allocator's cache cannot be emptied in a capture"
_ASK = "the host asks how far the device is, which a capture forbids"
_WAIT_FIX = "Leave it out: work on one stream needs no wait, and another stream is joined by wait_stream."
_SEED_FIX = "Seed before the step, or give the thread_context a seed."
_CACHE_FIX = "Leave it out: a graph has a memory pool of its own."
_WATCHED: tuple[tuple[str, str, str], ...] = (
    ("torch.cuda.synchronize", _SYNC, _WAIT_FIX),
    ("torch.accelerator.synchronize", _SYNC, _WAIT_FIX),
    ("torch.cuda.Stream.synchronize", _SYNC, _WAIT_FIX),
    ("torch.cuda.Event.synchronize", _SYNC, _WAIT_FIX),
    ("torch.cuda.Stream.query", _ASK, _WAIT_FIX),
    ("torch.cuda.Event.query", _ASK, _WAIT_FIX),
    ("torch.cuda.empty_cache", _CACHE, _CACHE_FIX),
    ("torch.accelerator.empty_cache", _CACHE, _CACHE_FIX),
    ("torch.manual_seed", _SEED, _SEED_FIX),
    ("torch.seed", _SEED, _SEED_FIX),
    ("torch.cuda.manual_seed", _SEED, _SEED_FIX),
    ("torch.cuda.manual_seed_all", _SEED, _SEED_FIX),
    ("torch.cuda.seed", _SEED, _SEED_FIX),
    ("torch.cuda.seed_all", _SEED, _SEED_FIX),
)
_BUILTINS = {
    "synchronize": (_SYNC, _WAIT_FIX),
    "query": (_ASK, _WAIT_FIX),
}  # of torch.Stream and torch.Event
_FROM_MEMORY = frozenset(filter(None, (getattr(torch, name, None) for name in ("from_numpy", "frombuffer"))))

Report = Callable[[str, str, str, FrameType], None]


def _code(dotted: str) -> types.CodeType | None:
    """The code of torch's own function, below any wrapper."""
    try:
        found = functools.reduce(getattr, dotted.split(".")[1:], torch)
    except AttributeError:  # this torch has none
        return None
    function = inspect.unwrap(found)  # type: ignore[arg-type]
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _called_by_user(frame: FrameType | None) -> bool:
    """Whether the user's code called, not torch's or graphsafe's for it."""
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


class CallWatch:
    """A block in which calls of the running thread are watched.

    Args:
        report: called with operation, why, fix and the frame.
        from_memory: called before a tensor is made of memory that is not torch's.
        around_backward: has ``__enter__`` and ``__exit__``, called within each backward. (Torch leaves a function mode
            while it runs a function that the mode has seen, ``Tensor.backward`` as any.) After an interrupt, which ends
            the watch, ``__exit__`` may not be called.
    """

    def __init__(self, report: Report, from_memory: Callable[[], None], around_backward: Any) -> None:
        self._report, self._from_memory, self._around_backward = report, from_memory, around_backward
        self._depth = 0
        self._on = False
        self._functions: dict[int, tuple[types.CodeType, str, str, str]] = {}
        for dotted, why, fix in _WATCHED:
            code = _code(dotted)
            if code is not None:
                self._functions[id(code)] = (code, dotted, why, fix)
        self._checkpoint = _code("torch.utils.checkpoint.CheckpointFunction.forward")
        self._backward = observing.backward_code()

    def __enter__(self) -> CallWatch:
        if sys.getprofile() is None:
            self._on = True
            sys.setprofile(self._see)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Watch no more. A second call does nothing."""
        if self._on:
            sys.setprofile(None)
            self._on = False

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            self._see_builtin(frame, argument)
        elif event == "call":
            known = self._functions.get(id(code))
            if known is not None:
                if _called_by_user(frame.f_back):
                    self._report(*known[1:], frame)
            elif code is self._backward:
                self._enter_backward(frame)
            elif code is self._checkpoint:
                self._report(
                    "torch.utils.checkpoint.checkpoint",
                    "with use_reentrant=True the recompute is a backward inside a backward, with a state of its own",
                    "Pass use_reentrant=False.",
                    frame,
                )
        elif event == "return" and code is self._backward:
            self._depth -= 1
            self._around_backward.__exit__(None, None, None)

    def _enter_backward(self, frame: FrameType) -> None:
        if self._depth == MAX_DEPTH + 1:
            self._report(
                "torch.autograd.backward",
                f"a backward is nested deeper than {MAX_DEPTH}",
                DEEP_BACKWARD,
                frame,
            )
        self._depth += 1
        self._around_backward.__enter__()

    def _see_builtin(self, frame: FrameType, function: Any) -> None:
        name = getattr(function, "__name__", None)
        if name in _BUILTINS:
            owner = getattr(function, "__self__", None)
            if isinstance(owner, torch.Stream | torch.Event) and _called_by_user(frame):
                self._report(f"torch.{type(owner).__name__}.{name}", *_BUILTINS[name], frame)
        elif function in _FROM_MEMORY if name in ("from_numpy", "frombuffer") else False:
            self._from_memory()
