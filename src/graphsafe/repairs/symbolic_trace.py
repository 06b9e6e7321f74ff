"""A7: a symbolic trace patches the modules of every thread.

``torch.fx.Tracer.trace`` replaces ``torch.nn.Module.__call__`` and ``__getattr__`` while it runs, and, in the globals
of their modules, ``math``'s functions and those registered with ``torch.fx.wrap``. A thread that calls a module
meanwhile gets "NameError: module is not installed as a submodule", or is traced into the other thread's graph. Traces
that overlap put back each other's patches: one goes on without its own, or a patch stays for good. A Dynamo compile,
which takes the patches out for its length, takes out those of any thread.

The repair has each patch count in the thread that made it:
- ``Module.__call__`` and ``__getattr__`` stay the objects that they are. While some thread traces, their bodies call
  this thread's wrapper, or do what they always did where it has none. Dynamo, which tells them by identity, goes the
  same way in every pass of a compile, whoever begins or ends a trace meanwhile, and never looks at the bodies.
- What is put in any other place is a stand-in, which does the same. Dynamo sees the original in its stead.
- The first thread that patches a place changes it, the last one puts everything back. While nobody traces, every place
  holds the very object that it always had.

Where nothing else can stand in for an object, an innocent thread sees the stand-in: ``module.function is function``
is false for a function registered with ``torch.fx.wrap`` as long as some thread traces, and compiled code that calls
it by that name is compiled again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from . import _fx_places
from ._patches import Evidence, Patches, RepairError, in_another_thread

FAULT: Final = "A7"
MODULES: Final = (
    "torch.fx._symbolic_trace",
    "torch._dynamo.variables.functions",
    "torch._dynamo.variables.builder",
    "torch._dynamo.guards",
)
EVIDENCE: Final = Evidence(
    fault="'NameError: module is not installed as a submodule' in a thread that traces nothing",
    reports=("pytorch/pytorch#112775",),
    versions="2.13, 2.14.1 and 2.15.0, measured",
)

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether what one thread patches is patched in another one too, tried on a class of our own; if so Dynamo needs to
    be told of it."""
    if module.__name__ != MODULES[0]:
        return bool(_fx_places.torchs_functions) or probe(importlib.import_module(MODULES[0]))
    if not hasattr(module, "_Patcher"):
        raise RepairError("torch.fx._symbolic_trace has no _Patcher")

    class Tried:
        def method(self) -> str:
            return "original"

    patcher = module._Patcher()
    patcher.patch_method(Tried, "method", lambda self: "patched", deduplicate=False)
    try:
        return in_another_thread(lambda: Tried().method()) == "patched"
    finally:
        patcher.revert_all_patches()


def repair(module: types.ModuleType) -> None:
    """Have every patch of a ``_Patcher`` count in its thread alone, and every thread have its own current patcher; or
    have Dynamo see through what was changed: as ``module`` says."""
    match module.__name__:
        case "torch._dynamo.variables.functions":
            owner = getattr(module, "UserFunctionVariable", None)
            if owner is None:
                _let_go()  # or Dynamo would look at the bodies
            _see_through(owner, "__init__", _copy_of)
        case "torch._dynamo.variables.builder":
            _see_through(getattr(module, "VariableBuilder", None), "__call__", _fx_places.original_of)
        case "torch._dynamo.guards":
            _repair_guards(module)
        case _:
            _repair_traces(module)


def _repair_traces(module: types.ModuleType) -> None:
    patcher_class = getattr(module, "_Patcher", None)
    if not all(callable(getattr(patcher_class, name, None)) for name in ("patch", "patch_method")):
        raise RepairError("torch.fx._symbolic_trace has no _Patcher with patch and patch_method")

    def patch(self: Any, frame_dict: Any, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        with _fx_places.lock:
            _fx_places.see_through(new_fn)
            self.patches_made.append(_fx_places.Patch(frame_dict, name, new_fn))

    def patch_method(self: Any, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        patch(self, cls, name, new_fn)

    for name in ("_patch_wrapped_functions", "_autowrap_check"):
        if hasattr(module, name):
            _patches.body(getattr(module, name), functools.partial(_locked, module))
    _patches.attribute(patcher_class, "patch", patch)
    _patches.attribute(patcher_class, "patch_method", patch_method)
    for name in ("_orig_module_call", "_orig_module_getattr"):
        _repair_name(module, name)
    _repair_tracer(module.Tracer)
    _repair_current(module)


def _repair_name(module: types.ModuleType, name: str) -> None:
    """Have torch's tracer call a copy of one of its two functions, whose body is free to change then."""
    function = getattr(module, name, None)
    torchs = next((one for one in _fx_places.torchs_functions.values() if one.copy is function), None)
    if torchs is None:
        if not isinstance(function, types.FunctionType) or function.__closure__:
            return  # then a stand-in takes its place
        torchs = _fx_places.torchs_functions.setdefault(function, _fx_places.TorchsFunction(module, name, function))
    torchs.put_name()
    _patches.later(_let_go)


def _let_go() -> None:
    """Have torch's tracer call its two functions again, once no trace is under way."""
    with _fx_places.lock:
        for torchs in _fx_places.torchs_functions.values():
            torchs.put_name_back()


def _see_through(owner: Any, name: str, what: Callable[[Any], Any]) -> None:
    """Have a method of Dynamo's be called with ``what`` it makes of its first argument."""
    look: Callable[..., Any] | None = getattr(owner, name, None)
    if look is None:
        raise RepairError("Dynamo looks at functions in an unknown place")

    @functools.wraps(look)
    def look_through(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (what(args[0]), *args[1:])
        elif "fn" in kwargs:
            kwargs["fn"] = what(kwargs["fn"])
        return look(self, *args, **kwargs)

    _patches.attribute(owner, name, look_through)


def _copy_of(found: Any) -> Any:
    """What a function does while nobody traces, for whoever looks at its body."""
    torchs = _fx_places.torchs_functions.get(found) if isinstance(found, types.FunctionType) else None
    return found if torchs is None else torchs.copy


def _repair_guards(module: types.ModuleType) -> None:
    """Have Dynamo guard on torch's two functions, not on their bodies, which change."""
    builder = getattr(module, "GuardBuilder", None)
    original: Callable[..., Any] | None = getattr(builder, "CLOSURE_MATCH", None)
    if builder is None or original is None or not hasattr(builder, "FUNCTION_MATCH"):
        raise RepairError("torch._dynamo.guards has no GuardBuilder with CLOSURE_MATCH and FUNCTION_MATCH")
    by_name = "name" in inspect.signature(builder.get).parameters  # an older torch

    @functools.wraps(original)
    def closure_match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.get(guard.name if by_name else guard)
        if _copy_of(found) is not found:
            return self.FUNCTION_MATCH(guard)
        return original(self, guard, *args, **kwargs)

    _patches.attribute(builder, "CLOSURE_MATCH", closure_match)


def _locked(module: types.ModuleType, original: types.FunctionType) -> Callable[..., Any]:
    """What looks for functions to patch: no place changes meanwhile, and no stand-in hides one of them."""

    def look(patcher: Any, frame_dict: Any = None, function_ids: Any = frozenset()) -> None:
        with _fx_places.lock:
            if frame_dict is None:
                original(patcher)
                return
            original(patcher, frame_dict, function_ids)
            for place in list(_fx_places.places.get(id(frame_dict), {}).values()):
                is_sought = id(place.original) in function_ids and not place.name.startswith("_")
                if is_sought and not place.here.stack:
                    patcher.patch(frame_dict, place.name, module._create_wrapped_func(place.original))

    return look


def _repair_tracer(tracer_class: Any) -> None:
    """Have a tracer, which keeps the ids of what it wraps, never keep that of a stand-in."""
    init: Callable[..., None] = tracer_class.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with _fx_places.lock:
            init(self, *args, **kwargs)
            ids = getattr(self, "_autowrap_function_ids", None)
            if ids:
                by_id = {id(stand_in): original for stand_in, original in _fx_places.originals.items()}
                self._autowrap_function_ids = {id(by_id[key]) if key in by_id else key for key in ids}

    _patches.attribute(tracer_class, "__init__", __init__)


class _Current(threading.local):
    """This thread's innermost patcher."""

    patcher: Any = None


def _repair_current(module: types.ModuleType) -> None:
    """Keep the current patcher, which a Dynamo compile takes out for its length, for each thread."""
    if not hasattr(module, "_new_patcher") or not hasattr(module, "_maybe_revert_all_patches"):
        return  # this torch has no current patcher
    current = _Current()

    @functools.wraps(module._new_patcher)
    @contextmanager
    def new_patcher() -> Iterator[Any]:
        prior = current.patcher
        patcher = current.patcher = module._Patcher()
        try:
            yield patcher
        finally:
            current.patcher = prior
            patcher.revert_all_patches()

    @functools.wraps(module._maybe_revert_all_patches)
    @contextmanager
    def maybe_revert_all_patches() -> Iterator[None]:
        patcher = current.patcher
        if patcher is None:
            yield
            return
        patcher.revert_all_patches()
        try:
            yield
        finally:
            patcher.reapply_all_patches()

    _patches.attribute(module, "_new_patcher", new_patcher)
    _patches.attribute(module, "_maybe_revert_all_patches", maybe_revert_all_patches)
