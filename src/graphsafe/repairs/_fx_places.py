"""The places that a symbolic trace patches: each counts what each thread has put there (see symbolic_trace).

Guarantees:
- A patch is seen by the thread that made it, and by no other.
- The first patch of a place changes it, and the last one that goes puts the very object back that was there.
- A function that torch's own tracer patches stays the same object; its body changes.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from ._patches import jump

_MISSING = object()
# Guards the tables below, and that a place and what is in it change together. Taken last; no user code runs under it.
lock = threading.RLock()
places: dict[int, dict[str, Place]] = {}  # by the id of the owner, which the place keeps alive
bodies: dict[types.FunctionType, Body] = {}  # by the function that is patched now
torchs_functions: dict[types.FunctionType, TorchsFunction] = {}  # by the function; kept for good
originals: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()  # of every stand-in


def _after_fork() -> None:
    """A thread that the child does not have may have held the lock."""
    global lock
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Here(threading.local):
    """This thread's patches of one place, the innermost last."""

    stack: list[Patch] | tuple[()] = ()


class Place:
    """An attribute of a class, or a key of a dict of globals, that at least one thread has patched."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.here, self.num_patches = owner, name, _Here(), 0
        if isinstance(owner, dict):
            self.before = owner.get(name, _MISSING) if hasattr(builtins, name) else owner[name]
            found = getattr(builtins, name) if self.before is _MISSING else self.before
        else:
            self.before, found = vars(owner).get(name, _MISSING), getattr(owner, name)
        self.original = original_of(found)
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

    def forget(self) -> None:
        here = places[id(self.owner)]
        del here[self.name]
        if not here:
            del places[id(self.owner)]


class TorchsFunction:
    """A function of ``torch.nn.Module`` that torch's tracer patches, and calls by a name of its own module.

    Attributes:
        copy: does for good what the function does while nobody traces.
        leaving: the repair is taken out, and the name goes back to the function once no thread's trace calls it.
    """

    def __init__(self, module: types.ModuleType, name: str, function: types.FunctionType) -> None:
        self.module, self.name, self.function, self.leaving = module, name, function, False
        code, defaults = function.__code__, function.__defaults__
        self.copy = types.FunctionType(code, function.__globals__, function.__name__, defaults)
        self.copy.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(self.copy, function)
        del self.copy.__wrapped__  # type: ignore[attr-defined]

    def is_wrapped_by(self, wrapper: Any) -> bool:
        """Whether ``wrapper`` is torch's own, and goes on in the copy, not in the function that it patches."""
        return getattr(wrapper, "__wrapped__", None) is self.copy and getattr(self.module, self.name) is self.copy

    def put_name(self) -> None:
        setattr(self.module, self.name, self.copy)
        self.leaving = False

    def put_name_back(self) -> None:
        self.leaving = self.function in bodies
        if not self.leaving and getattr(self.module, self.name, None) is self.copy:
            setattr(self.module, self.name, self.function)


class Body:
    """A function of torch's that at least one thread has patched; it asks which thread calls."""

    def __init__(self, torchs: TorchsFunction) -> None:
        self.here, self.num_patches, self.original = _Here(), 0, torchs.function
        self._torchs, self._code = torchs, torchs.function.__code__
        self.original.__signature__ = inspect.signature(self.original)  # type: ignore[attr-defined]
        self._present = self.original.__code__ = jump(self._code, _of_this_thread(self.here, torchs.copy))

    def put_back(self) -> None:
        """The body, unless someone else has replaced it since."""
        if self.original.__code__ is self._present:
            self.original.__code__ = self._code
        vars(self.original).pop("__signature__", None)

    def forget(self) -> None:
        del bodies[self.original]
        if self._torchs.leaving:
            self._torchs.put_name_back()


def original_of(found: Any) -> Any:
    """What ``found`` stands in for, if it is a stand-in."""
    return originals.get(found, found) if isinstance(found, types.FunctionType) else found


def _of_this_thread(here: _Here, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = here.stack
        return (stack[-1].new_fn if stack else original)(*args, **kwargs)

    return call


def _make_stand_in(here: _Here, original: Callable[..., Any]) -> types.FunctionType:
    stand_in = functools.wraps(original)(_of_this_thread(here, original))
    assert isinstance(stand_in, types.FunctionType)
    stand_in._torchdynamo_inline = original
    originals[stand_in] = original
    return stand_in


class Patch:
    """One thread's wrapper in one place: an entry of torch's ``_Patcher.patches_made``, with its attributes."""

    def __init__(self, owner: Any, name: str, new_fn: Callable[..., Any]) -> None:
        self.frame_dict, self.fn_name, self.new_fn = owner, name, new_fn
        self._place: Place | Body | None = None  # None while it is reverted
        self._stack: list[Patch] = []
        self.patch()
        self.orig_fn = self._place.original if self._place is not None else None

    def patch(self) -> None:
        """Count in the calling thread."""
        with lock:
            if self._place is not None:
                return
            place = self._body() or self._stood_in()
            if not isinstance(place.here.stack, list):
                place.here.stack = []
            self._place, self._stack = place, place.here.stack
            self._stack.append(self)
            place.num_patches += 1

    def revert(self) -> None:
        """Count no more, whichever thread says so."""
        with lock:
            place, self._place = self._place, None
            if place is None:
                return
            self._stack.remove(self)
            place.num_patches -= 1
            if place.num_patches == 0:
                place.put_back()
                place.forget()

    def _body(self) -> Body | None:
        """The body to change, where this is torch's own wrapper of one of its two functions."""
        found = None if isinstance(self.frame_dict, dict) else vars(self.frame_dict).get(self.fn_name)
        found = original_of(found)
        torchs = torchs_functions.get(found) if isinstance(found, types.FunctionType) else None
        if torchs is None or not torchs.is_wrapped_by(self.new_fn):
            return None
        other = places.get(id(self.frame_dict), {}).get(self.fn_name)
        if other is not None and other.here.stack:  # this thread's own stand-in would hide the body
            return None
        return bodies.get(torchs.function) or bodies.setdefault(torchs.function, Body(torchs))

    def _stood_in(self) -> Place:
        here = places.setdefault(id(self.frame_dict), {})
        try:
            return here.get(self.fn_name) or here.setdefault(self.fn_name, Place(self.frame_dict, self.fn_name))
        finally:
            if not here:
                del places[id(self.frame_dict)]


def see_through(wrapper: Any) -> None:
    """Have a wrapper that was made around another thread's stand-in call, and record, the original."""
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            found = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
        original = original_of(found)
        if original is not found:
            cell.cell_contents = original
            if getattr(wrapper, "__wrapped__", None) is found:
                functools.update_wrapper(wrapper, original)
