"""B17: a compile starts inside a capture, or a thread holds its seat at the gate while it waits for the compile lock.

A capture then waits for a compile, which waits for a synchronize, which waits for the capture; and Inductor's
benchmarks break the capture that they run in.

The repair enters ``hooks.compile_scope`` before the compile lock is waited for, in every thread and for a lazily
compiled backward too. The gate's scope gives the thread's seats back meanwhile; where the thread captures it raises,
and the error leaves the compiled call with nothing begun. A frame that Dynamo looks at and skips enters no scope.

Where torch has an object for the lazy backward's compiler, threads that share a function compile its backward once: the
second thread takes the lock and finds it done.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from ._compiles import wrap_lazy_backward
from ._patches import Evidence, Patches, RepairError
from ._recompiles import looking_at
from .hooks import hooks

FAULT: Final = "B17"
MODULES: Final = (
    "torch._dynamo.trace_rules",
    "torch._dynamo.convert_frame",
    "torch._functorch._aot_autograd.runtime_wrappers",
)
EVIDENCE: Final = Evidence(
    fault="a hang: a capture waits for a compile that waits for a synchronize that waits for the capture",
    reports=(),
    versions="all",
)

_TRIES: Final = 3  # of an end that is interrupted

_patches = Patches()
undo = _patches.undo


class _PerThread(threading.local):
    """What this thread compiles."""

    def __init__(self) -> None:
        self.what: str | None = None  # the frame that Dynamo looks at
        self.locked: list[_Entry] = []  # of the compile lock; the outermost alone has a scope


_per_thread = _PerThread()


class _Entry:
    """One entry of a thread into the compile lock. Known before anything has changed, and undone by any number of
    ``close()``, so that an interrupt leaves nothing behind. (No generator: a forked child would run its end.)"""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._scope: AbstractContextManager[None] | None = None
        # A thread that has it, from before the repair too, waits for nothing: another may be in the scope by now.
        self._is_outermost, self._acquired = not lock._is_owned(), False

    def open(self) -> None:
        if self._is_outermost:
            self._scope = hooks.compile_scope(_per_thread.what or "torch._dynamo, outside a frame")
            self._scope.__enter__()
        self._lock.acquire()
        self._acquired = True

    def close(self) -> None:
        while self._is_outermost and self._lock._is_owned():
            self._lock.release()
        if self._acquired and not self._is_outermost:
            self._acquired = False
            self._lock.release()
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None


class ScopedLock:
    """Torch's compile lock, entered inside the gate's scope; whoever holds the plain one still excludes this one."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __enter__(self) -> bool:
        entry = _Entry(self.lock)
        depth = len(_per_thread.locked)
        try:
            _per_thread.locked.append(entry)
            entry.open()
        except BaseException:
            _close_down_to(depth)
            raise
        return True

    def __exit__(self, *error: Any) -> None:
        _close_down_to(len(_per_thread.locked) - 1)

    def __getattr__(self, name: str) -> Any:  # acquire() and release() by hand, as torch never does
        return getattr(self.lock, name)


def _close_down_to(depth: int) -> None:
    """Leave the compile lock, and its scope, until this thread has entered it ``depth`` times."""
    locked = _per_thread.locked
    first: BaseException | None = None
    tries = 0
    while len(locked) > depth:
        entry = locked[-1]
        try:
            entry.close()
        except BaseException as exc:
            first, tries = first or exc, tries + 1
            if not isinstance(exc, Exception) and tries < _TRIES:
                continue
        if locked and locked[-1] is entry:
            locked.pop()
    if first is not None:
        raise first


class _Forked:
    """Torch's compile lock, for a child that lacks the thread that held it."""

    def __init__(self) -> None:
        self.lock: Any = None

    def free(self) -> None:
        if self.lock is not None and not self.lock._is_owned() and hasattr(self.lock, "_at_fork_reinit"):
            self.lock._at_fork_reinit()


_forked = _Forked()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked.free)


class _Looking:
    """Dynamo looks at ``what`` in the block; what an interrupt left open in it is closed at its end."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before, self._depth = _per_thread.what, len(_per_thread.locked)
        _per_thread.what = self._what

    def __exit__(self, *error: object) -> None:
        _per_thread.what = self._before
        _close_down_to(self._depth)


def probe(module: types.ModuleType) -> bool:
    """Whether compiles take a lock that knows nothing of captures; torch has no such thing of its own."""
    return module.__name__ != "torch._dynamo.convert_frame" or hasattr(module, "compile_lock")


def repair(module: types.ModuleType) -> None:
    """Scope the compile lock, or the lazy backward, or have Dynamo skip the repairs' frames: as ``module`` says."""
    match module.__name__.rpartition(".")[2]:
        case "trace_rules":
            _skip_repairs(module)
        case "convert_frame":
            _scope_lock(module)
        case _:
            wrap_lazy_backward(_patches, module, _LazyBackward)


def _skip_repairs(trace_rules: types.ModuleType) -> None:
    """Have Dynamo compile no frame of this package when a backward runs inside partly compiled code."""
    before = list(trace_rules.SKIP_DIRS)
    trace_rules.add(__package__)
    added = [path for path in trace_rules.SKIP_DIRS if path not in before]

    def put_back() -> None:
        for path in added:
            trace_rules.SKIP_DIRS.remove(path)
        trace_rules._recompile_re()

    _patches.later(put_back)


def _scope_lock(convert_frame: types.ModuleType) -> None:
    entry, lock = getattr(convert_frame, "CatchErrorsWrapper", None), getattr(convert_frame, "compile_lock", None)
    if entry is None or not hasattr(lock, "_is_owned"):
        raise RepairError("torch._dynamo.convert_frame has no CatchErrorsWrapper, or no compile_lock that has an owner")
    original: Callable[..., Any] = entry.__call__

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        code = frame.f_code
        what = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        with _Looking(what), looking_at(frame, self):
            return original(self, frame, *args, **kwargs)

    _forked.lock = lock
    _patches.attribute(convert_frame, "compile_lock", ScopedLock(lock))
    _patches.attribute(entry, "__call__", call)


class _LazyBackward(_Looking):
    """The compile lock, and so the scope, for a lazy backward."""

    def __enter__(self) -> None:
        from torch._dynamo import convert_frame  # by now the compiled forward has imported it

        lock: Any = convert_frame.compile_lock
        super().__enter__()
        try:
            (lock if isinstance(lock, ScopedLock) else ScopedLock(lock)).__enter__()
        except BaseException:
            self.__exit__()
            raise
