"""A7: a symbolic trace patches the modules of every thread.

``torch.fx.Tracer.trace`` replaces ``torch.nn.Module.__call__`` and ``__getattr__`` while it runs, and, in the globals
of their modules, ``math``'s functions and those registered with ``torch.fx.wrap``. A thread that calls a module
meanwhile gets "NameError: module is not installed as a submodule", or is traced into the other thread's graph. Traces
that overlap put back each other's patches: one goes on without its own, or a patch stays for good. A Dynamo compile,
which takes the patches out for its length, takes out those of any thread.

The repair has each patch count in the thread that made it:
- What is put in torch's places is a stand-in, which calls this thread's wrapper, or the original where it has none.
- The first thread that patches a place puts the stand-in there, the last one puts the original back. While nobody
  traces, every place holds the very object that it always had.
- Dynamo follows ``_torchdynamo_inline``, so another thread's compile beside a trace sees the original.

Where nothing else can stand in for an object, an innocent thread sees the stand-in: ``module.function is function``
is false for a function registered with ``torch.fx.wrap`` as long as some thread traces.
"""

from __future__ import annotations

import builtins
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError, in_another_thread

FAULT: Final = "A7"
MODULES: Final = ("torch.fx._symbolic_trace",)
EVIDENCE: Final = Evidence(
    fault="'NameError: module is not installed as a submodule' in a thread that traces nothing",
    reports=("pytorch/pytorch#112775",),
    versions="2.13, 2.14.1 and 2.15.0, measured",
)

_patches = Patches()
undo = _patches.undo

_MISSING = object()
# Guards the tables below, and that a place and what is in it change together. Taken last; no user code runs under it.
_lock = threading.RLock()
_places: dict[int, dict[str, _Place]] = {}  # by the id of the owner, which the place keeps alive
_originals: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()  # of every stand-in


def _after_fork() -> None:
    """A thread that the child does not have may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Here(threading.local):
    """This thread's patches of one place, the innermost last."""

    stack: list[_Patch] | tuple[()] = ()


class _Place:
    """An attribute of a class, or a key of a dict of globals, that at least one thread has patched."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.here, self.num_patches = owner, name, _Here(), 0
        if isinstance(owner, dict):
            self.before = owner.get(name, _MISSING) if hasattr(builtins, name) else owner[name]
            found = getattr(builtins, name) if self.before is _MISSING else self.before
        else:
            self.before, found = vars(owner).get(name, _MISSING), getattr(owner, name)
        self.original = _original(found)
        if self.original is not found:  # somebody has put back a stand-in that he had saved
            self.before = self.original
        self.stand_in = _make_stand_in(self.here, self.original)
        self._put(self.stand_in)

    def put_back(self) -> None:
        """The original, unless someone else has replaced the stand-in since."""
        present = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        if present.get(self.name) is self.stand_in:
            self._put(self.before)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is _MISSING:
                del self.owner[self.name]
            else:
                self.owner[self.name] = value
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def _original(found: Any) -> Any:
    """What ``found`` stands in for, if it is a stand-in."""
    return _originals.get(found, found) if isinstance(found, types.FunctionType) else found


def _make_stand_in(here: _Here, original: Callable[..., Any]) -> types.FunctionType:
    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        stack = here.stack
        return (stack[-1].new_fn if stack else original)(*args, **kwargs)

    assert isinstance(stand_in, types.FunctionType)
    stand_in._torchdynamo_inline = original
    _originals[stand_in] = original
    return stand_in


class _Patch:
    """One thread's wrapper in one place: an entry of torch's ``_Patcher.patches_made``, with its attributes."""

    def __init__(self, owner: Any, name: str, new_fn: Callable[..., Any]) -> None:
        self.frame_dict, self.fn_name, self.new_fn = owner, name, new_fn
        self._place: _Place | None = None  # None while it is reverted
        self._stack: list[_Patch] = []
        self.patch()
        self.orig_fn = self._place.original if self._place is not None else None

    def patch(self) -> None:
        """Count in the calling thread."""
        with _lock:
            if self._place is not None:
                return
            places = _places.setdefault(id(self.frame_dict), {})
            place = places.get(self.fn_name)
            if place is None:
                try:
                    place = places[self.fn_name] = _Place(self.frame_dict, self.fn_name)
                finally:
                    if not places:
                        del _places[id(self.frame_dict)]
            if not isinstance(place.here.stack, list):
                place.here.stack = []
            self._place, self._stack = place, place.here.stack
            self._stack.append(self)
            place.num_patches += 1

    def revert(self) -> None:
        """Count no more, whichever thread says so."""
        with _lock:
            place, self._place = self._place, None
            if place is None:
                return
            self._stack.remove(self)
            place.num_patches -= 1
            if place.num_patches == 0:
                places = _places[id(place.owner)]
                del places[place.name]
                if not places:
                    del _places[id(place.owner)]
                place.put_back()


def _see_through(wrapper: Any) -> None:
    """Have a wrapper that was made around another thread's stand-in call, and record, the original."""
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            found = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
        original = _original(found)
        if original is not found:
            cell.cell_contents = original
            if getattr(wrapper, "__wrapped__", None) is found:
                functools.update_wrapper(wrapper, original)


def probe(module: types.ModuleType) -> bool:
    """Whether what one thread patches is patched in another one too, tried on a class of our own."""
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
    """Have every patch of a ``_Patcher`` count in its thread alone, and every thread have its own current patcher."""
    patcher_class = getattr(module, "_Patcher", None)
    if not all(callable(getattr(patcher_class, name, None)) for name in ("patch", "patch_method")):
        raise RepairError("torch.fx._symbolic_trace has no _Patcher with patch and patch_method")

    def patch(self: Any, frame_dict: Any, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        with _lock:
            _see_through(new_fn)
            self.patches_made.append(_Patch(frame_dict, name, new_fn))

    def patch_method(self: Any, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        patch(self, cls, name, new_fn)

    for name in ("_patch_wrapped_functions", "_autowrap_check"):
        if hasattr(module, name):
            _patches.body(getattr(module, name), functools.partial(_locked, module))
    _patches.attribute(patcher_class, "patch", patch)
    _patches.attribute(patcher_class, "patch_method", patch_method)
    _repair_tracer(module.Tracer)
    _repair_current(module)


def _locked(module: types.ModuleType, original: types.FunctionType) -> Callable[..., Any]:
    """What looks for functions to patch: no place changes meanwhile, and no stand-in hides one of them."""

    def look(patcher: Any, frame_dict: Any = None, function_ids: Any = frozenset()) -> None:
        with _lock:
            if frame_dict is None:
                original(patcher)
                return
            original(patcher, frame_dict, function_ids)
            for place in list(_places.get(id(frame_dict), {}).values()):
                is_sought = id(place.original) in function_ids and not place.name.startswith("_")
                if is_sought and not place.here.stack:
                    patcher.patch(frame_dict, place.name, module._create_wrapped_func(place.original))

    return look


def _repair_tracer(tracer_class: Any) -> None:
    """Have a tracer, which keeps the ids of what it wraps, never keep that of a stand-in."""
    init: Callable[..., None] = tracer_class.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with _lock:
            init(self, *args, **kwargs)
            ids = getattr(self, "_autowrap_function_ids", None)
            if ids:
                by_id = {id(stand_in): original for stand_in, original in _originals.items()}
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
