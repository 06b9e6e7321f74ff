"""A15: threads that make the first call of one function together compile it once each.

They wait for the compile lock one after the other, and each then compiles without looking whether the artefact is there
by now. Eight threads compile eight times, and may hit the recompile limit.

The repair looks once more, with the lock held. Where an artefact of the same function and backend passes its guards,
the frame runs its code. Dynamo can only be answered with an entry for its cache; the one it gets never matches again
and counts for no limit, so that later calls find the artefact itself.

An older torch compiles a function's lazy backward once a thread in the same way; there its compiler runs once.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError
from .hooks import hooks

CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
FAULT: Final = "A15"
MODULES: Final = (CONVERT_FRAME, "torch._functorch._aot_autograd.runtime_wrappers")
EVIDENCE: Final = Evidence(
    fault="threads that make the first call of one function together compile it once each",
    reports=(),
    versions="2.13, 2.14.1 and 2.15.0, measured",
)

_WRAPPER: Final = "_dynamo/external_utils.py"
_BACKEND: Final = "_graphsafe_backend"
_STANDS_IN: Final = "_graphsafe_stands_in"
_COUNTS: Final = ("num_cache_entries", "total_cache_entries_all_regions")  # what accumulated_recompile_limit limits

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether whoever gets the compile lock compiles at once: torch evaluates no guards once it has the lock."""
    if module.__name__ != CONVERT_FRAME:
        return not hasattr(getattr(module, "_AutogradBackwardCompiler", None), "get_or_compile")
    entry = getattr(module, "ConvertFrameAssert", None)
    return entry is None or "_debug_get_cache_entry_list" not in entry.__call__.__code__.co_names


def repair(module: types.ModuleType) -> None:
    """Look for an artefact before a frame is compiled, or compile a lazy backward once: as ``module`` says."""
    if module.__name__ == CONVERT_FRAME:
        _repair_frames(module)
    else:
        _repair_backwards(module)


def _repair_frames(module: types.ModuleType) -> None:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import guards
    from torch._dynamo import types as dynamo_types

    entry = getattr(module, "ConvertFrameAssert", None)
    if entry is None or not hasattr(dynamo_types, "wrap_guarded_code") or not hasattr(guards, "GuardManagerWrapper"):
        raise RepairError("Dynamo answers a frame in a way that is not known")
    outer = getattr(module, "CatchErrorsWrapper", None)
    if outer is None:
        raise RepairError("torch._dynamo.convert_frame has no CatchErrorsWrapper")
    original: Callable[..., Any] = entry.__call__
    region: Callable[[], int] = getattr(module, "get_eval_frame_isolate_recompiles_id", lambda: -1)

    def find(backend: object, frame: Any) -> tuple[Any, Any] | None:
        """The newest artefact that fits this call, if another thread has compiled one, and its code."""
        here = region()
        candidates = [(one.backend, one.region, one.artefact) for one in _made if one.code is frame.f_code]
        candidates += [(*_origin(entry, here), entry) for entry in _debug_get_cache_entry_list(frame.f_code)]
        for compiled_by, compiled_in, artefact in candidates:
            code = artefact.code  # taken first: an entry that goes out of use meanwhile has none
            same_backend = compiled_by is not None and _innermost(compiled_by) == backend
            if not same_backend or compiled_in not in (here, -1) or code is None:
                continue
            if artefact.guard_manager.check(frame.f_locals):
                return artefact, code
        return None

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_export", False) or getattr(self, "_package", None) is not None:
            return original(self, frame, *args, **kwargs)
        found = find(_innermost(self), frame)
        if found is None:
            result = original(self, frame, *args, **kwargs)
            if result.guarded_code is not None:
                hooks.compiled(_name(frame))
                setattr(result.guarded_code.guard_manager, _BACKEND, self)
                one = _Made(frame.f_code, self, region(), result.guarded_code)
                _made.append(one)
                _per_thread.made.append(one)
            return result
        artefact, code = found
        never = _never(guards, artefact.guard_manager)
        return dynamo_types.wrap_guarded_code(
            dynamo_types.GuardedCode(code, never, artefact.compile_id, artefact.trace_annotation)
        )

    enter: Callable[..., Any] = outer.__call__

    @functools.wraps(enter)
    def look_at_frame(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _per_thread.made = _per_thread.made, []
        try:
            return enter(self, *args, **kwargs)
        finally:  # from here Dynamo puts what was made into its cache
            for one in _per_thread.made:
                _made.remove(one)
            _per_thread.made = before

    _patches.attribute(entry, "__call__", call)
    _patches.attribute(outer, "__call__", look_at_frame)
    if not hasattr(module, "compute_cache_size"):
        raise RepairError("Dynamo counts its artefacts in an unknown place")
    count: Callable[..., Any] = module.compute_cache_size

    @functools.wraps(count)
    def compute_cache_size(frame: Any, *args: Any, **kwargs: Any) -> Any:
        counted = count(frame, *args, **kwargs)
        stand_ins = sum(hasattr(one.guard_manager, _STANDS_IN) for one in _debug_get_cache_entry_list(frame.f_code))
        for name in _COUNTS:
            if hasattr(counted, name):
                setattr(counted, name, max(0, getattr(counted, name) - stand_ins))
        return counted

    _patches.attribute(module, "compute_cache_size", compute_cache_size)


@dataclass(eq=False)
class _Made:
    """An artefact that Dynamo has made and not kept yet."""

    code: types.CodeType  # compared by identity: a file that is imported twice has equal code with other globals
    backend: Any
    region: int
    artefact: Any


class _PerThread(threading.local):
    """What this thread has made for the frame that Dynamo looks at."""

    def __init__(self) -> None:
        self.made: list[_Made] = []


_per_thread = _PerThread()
_made: list[_Made] = []  # by all threads; written under the compile lock, or by the thread that made it


def _name(frame: Any) -> str:
    """What is compiled: function, file and line; of a module, or what else Dynamo calls through a function of its own,
    that one's name."""
    code = frame.f_code
    wrapped = frame.f_locals.get("fn") if code.co_filename.endswith(_WRAPPER) else None
    if wrapped is None:
        return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    owner = getattr(wrapped, "__self__", None)
    name = getattr(wrapped, "__qualname__", type(wrapped).__qualname__)
    return name if owner is None else f"{type(owner).__qualname__}.{getattr(wrapped, '__name__', name)}"


def _origin(entry: Any, here: int) -> tuple[Any, int]:
    """The backend and the region of a cache entry; older torch shows no backend, and has no regions."""
    compiled_by = getattr(entry, "backend", None) or getattr(entry.guard_manager, _BACKEND, None)
    return compiled_by, getattr(entry, "isolate_recompiles_id", here)


def _innermost(backend: Any) -> Any:
    """The backend itself, below Dynamo's wrappers, which a cache entry is compared by."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


class _Anything:
    """Lives for ever, and is no local of any frame."""


_anything = _Anything()


def _never(guards: types.ModuleType, like: Any) -> Any:
    """Guards that no call passes, and that count for no recompile limit: one counts entries for the same objects.

    Args:
        like: the guards of the artefact, whose names the report of a recompile reads.
    """
    manager = guards.GuardManagerWrapper()
    manager.global_scope, manager.closure_vars = like.global_scope, like.closure_vars
    guard = (lambda _: False, ["False  # stood in for another thread's artefact"])
    try:
        manager.root.add_lambda_guard(*guard, None)
    except TypeError:  # older torch notes no user's stack with a guard
        manager.root.add_lambda_guard(*guard)
    setattr(manager, _STANDS_IN, True)
    manager.id_matched_objs = {"no local has this name": lambda: _anything}
    return manager


def _repair_backwards(module: types.ModuleType) -> None:
    dispatch = getattr(module, "AOTDispatchAutograd", None)
    if dispatch is None or not isinstance(vars(dispatch).get("post_compile"), staticmethod):
        raise RepairError("torch compiles its lazy backward in an unknown place")
    original: Callable[..., Any] = dispatch.post_compile
    signature = inspect.signature(original)
    if "aot_config" not in signature.parameters:
        raise RepairError("torch's lazy backward has no aot_config")

    @functools.wraps(original)
    def post_compile(*args: Any, **kwargs: Any) -> Any:
        config = signature.bind(*args, **kwargs).arguments["aot_config"]
        if getattr(config, "bw_compiler", None) is not None and not isinstance(config.bw_compiler, _Once):
            config.bw_compiler = _Once(config.bw_compiler)
        return original(*args, **kwargs)

    _patches.attribute(dispatch, "post_compile", staticmethod(post_compile))


class _Once:
    """Calls ``compiler`` for the first call, whose result every later one gets. Called under the compile lock."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler
        self._lock = threading.RLock()  # guards the result; taken inside the compile lock
        self._results: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if not self._results:
                self._results.append(self.compiler(*args, **kwargs))
            return self._results[0]
