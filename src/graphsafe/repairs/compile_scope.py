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
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from ._compiles import wrap_lazy_backward
from ._patches import Evidence, Patches, RepairError
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

_patches = Patches()
undo = _patches.undo


class _PerThread(threading.local):
    """What this thread compiles."""

    def __init__(self) -> None:
        self.what: str | None = None  # the frame that Dynamo looks at
        self.depth = 0  # of compiles inside compiles; the outermost alone has a scope
        self.locked: list[ExitStack] = []


_per_thread = _PerThread()


@contextmanager
def _scope(what: str) -> Iterator[None]:
    """The gate's scope around the outermost compile of this thread."""
    with ExitStack() as stack:
        if _per_thread.depth == 0:
            stack.enter_context(hooks.compile_scope(what))
        _per_thread.depth += 1
        try:
            yield
        finally:
            _per_thread.depth -= 1


class ScopedLock:
    """Torch's compile lock, entered inside the gate's scope; whoever holds the plain one still excludes this one."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __enter__(self) -> bool:
        with ExitStack() as stack:
            # A thread that has it, from before the repair too, waits for nothing: another may be in the scope by now.
            if not self.lock._is_owned():
                stack.enter_context(_scope(_per_thread.what or "torch._dynamo, outside a frame"))
            stack.enter_context(self.lock)
            _per_thread.locked.append(stack.pop_all())
        return True

    def __exit__(self, *error: Any) -> None:
        _per_thread.locked.pop().__exit__(*error)

    def __getattr__(self, name: str) -> Any:  # acquire() and release() by hand, as torch never does
        return getattr(self.lock, name)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    before, _per_thread.what = _per_thread.what, what
    try:
        yield
    finally:
        _per_thread.what = before


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
            wrap_lazy_backward(_patches, module, _locked)


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
        with _naming(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"):
            return original(self, frame, *args, **kwargs)

    _patches.attribute(convert_frame, "compile_lock", ScopedLock(lock))
    _patches.attribute(entry, "__call__", call)


@contextmanager
def _locked(what: str) -> Iterator[None]:
    """The compile lock, and so the scope, for a lazy backward."""
    from torch._dynamo import convert_frame  # by now the compiled forward has imported it

    with _naming(what), convert_frame.compile_lock:
        yield
