"""A12: an autotuner uses another thread's arguments on the first launch.

Triton's ``Autotuner`` keeps a call's arguments in ``self.nargs``, on the one object that all threads share, for as long
as it benchmarks, and clears them when it is done. Another thread's launch meanwhile replaces or clears them: hooks and
pruning get the wrong tensors, or "'NoneType' object is not a mapping". Inductor's ``CachingAutotuner`` benchmarks in
each thread that comes before the first one has chosen, and unloads candidates that another thread is timing.

The repair:
- ``Autotuner.nargs`` is a value a thread.
- What has to be tuned is tuned by one thread, under a lock of that artefact; the others wait for it, then launch what
  it has chosen with their own arguments. What is tuned is launched without a lock.
- The thread takes a shared seat on its device first, so that a benchmark, which synchronises, runs beside no capture,
  and whoever holds such a lock waits for no gate. The order is compile, gate, first launch, buffers.
- A thread whose stream is capturing takes no lock: its benchmark ends the capture, with torch's error, as ever. The
  warm-up before a capture is what makes first launches.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ._patches import Evidence, Patches, RepairError
from .hooks import hooks

INDUCTOR: Final = "torch._inductor.runtime.triton_heuristics"
TRITON: Final = "triton.runtime.autotuner"

FAULT: Final = "A12"
MODULES: Final = (INDUCTOR, TRITON)
EVIDENCE: Final = Evidence(
    fault="hooks that get another thread's arguments, or a TypeError, on the first launch of an autotuned kernel",
    reports=("triton-lang/triton#11494", "triton-lang/triton#3095"),
    versions="Triton 3.6 and its main branch, read; Inductor in torch 2.11 and 2.13, read",
)

_patches = Patches()
undo = _patches.undo

_MISSING = object()
_table_lock = threading.Lock()  # guards the table of locks; nothing is done under it
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()  # one an artefact
_LAUNCHED: Final = "_graphsafe_launched"  # an attribute of the launcher that a first launch has chosen
_launches_itself: weakref.WeakSet[Any] = weakref.WeakSet()  # what launches without one chosen launcher: plugins do


@contextmanager
def _first_launch(artefact: Any) -> Iterator[None]:
    """This thread alone tunes ``artefact``; re-entrant, for an autotuner around another one."""
    if not torch.cuda.is_initialized():
        with _lock_of(artefact):
            yield
    elif torch.cuda.is_current_stream_capturing():
        yield
    else:
        with hooks.seat_scope(torch.cuda.current_device()), _lock_of(artefact):
            yield


def _lock_of(artefact: Any) -> threading.RLock:
    with _table_lock:
        return _locks.setdefault(artefact, threading.RLock())


def probe(module: types.ModuleType) -> bool:
    """Whether a launch keeps its arguments on the shared object, or tunes it without a lock: read in its code."""
    names = _class(module).run.__code__.co_names
    return "nargs" in names if module.__name__ == TRITON else "launchers" in names and "lock" not in names


def _class(module: types.ModuleType) -> Any:
    name = "Autotuner" if module.__name__ == TRITON else "CachingAutotuner"
    autotuner = getattr(module, name, None)
    if not isinstance(getattr(autotuner, "run", None), types.FunctionType):
        raise RepairError(f"{module.__name__} has no {name} with a run")
    return autotuner


def repair(module: types.ModuleType) -> None:
    """Have the module's autotuner tune in one thread at a time, with that thread's arguments."""
    autotuner = _class(module)
    if module.__name__ == TRITON:
        _repair_triton(autotuner)
        return
    _repair_inductor(autotuner)
    debugging = getattr(module, "DebugAutotuner", None)
    if debugging is not None and "run" in vars(debugging):
        _repair_inductor(debugging)


def _repair_inductor(autotuner: Any) -> None:
    original: Callable[..., Any] = autotuner.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launchers = self.launchers
        if len(launchers) == 1 and hasattr(launchers[0], _LAUNCHED):
            return original(self, *args, **kwargs)
        if self in _launches_itself:
            return original(self, *args, **kwargs)
        with _first_launch(self):
            result = original(self, *args, **kwargs)
            try:
                (launcher,) = self.launchers
                setattr(launcher, _LAUNCHED, True)  # the mark goes where the choice goes
            except (AttributeError, TypeError, ValueError):
                _launches_itself.add(self)
            else:
                if type(self).run is run:  # later launches come to torch's own function, at no cost
                    self.run = types.MethodType(original, self)
            return result

    _patches.attribute(autotuner, "run", run)
    prepare = vars(autotuner).get("prepare_for_pickle")
    if prepare is not None:

        @functools.wraps(prepare)
        def prepare_for_pickle(self: Any) -> Any:
            vars(self).pop("run", None)  # what it has chosen is dropped, so that its next launch is a first one
            return prepare(self)

        _patches.attribute(autotuner, "prepare_for_pickle", prepare_for_pickle)


class _Untuned(BaseException):
    """Leaves a launch that finds nothing tuned, before it has done anything, to begin it again under the lock."""


class _Calls(threading.local):
    """What this thread launches."""

    def __init__(self) -> None:
        self.nargs: dict[int, Any] = {}  # the arguments, by the id of the autotuner that runs
        self.unlocked: Any = None  # the autotuner whose launch leaves when there is something to tune


_calls = _Calls()


class _Nargs:
    """This thread's arguments. They are kept on the object too, for a launch that outlives the repair."""

    def __get__(self, tuner: Any, owner: type | None = None) -> Any:
        if tuner is None:
            return self
        if id(tuner) in _calls.nargs:
            return _calls.nargs[id(tuner)]
        try:
            return vars(tuner)["nargs"]
        except KeyError:
            raise AttributeError("nargs") from None

    def __set__(self, tuner: Any, value: Any) -> None:
        _calls.nargs[id(tuner)] = vars(tuner)["nargs"] = value


def _repair_triton(autotuner: Any) -> None:
    run, prune, warmup = (getattr(autotuner, name, None) for name in ("run", "prune_configs", "warmup"))
    if run is None or prune is None or "prune_configs" not in run.__code__.co_names:
        raise RepairError("triton's Autotuner.run does not ask prune_configs what to benchmark")

    def call(function: Callable[..., Any], tuner: Any, unlocked: Any, args: Any, kwargs: Any) -> Any:
        """Call ``function``, and have this thread's arguments and state afterwards as they were before."""
        nargs, key = _calls.nargs, id(tuner)
        former, before = _calls.unlocked, nargs.get(key, _MISSING)
        _calls.unlocked = unlocked
        try:
            return function(tuner, *args, **kwargs)
        finally:
            _calls.unlocked = former
            if before is not _MISSING:
                nargs[key] = before
            else:
                nargs.pop(key, None)

    @functools.wraps(run)
    def locked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(run, self, self, args, kwargs)
        except _Untuned:
            pass
        with _first_launch(self):  # by now another thread may have tuned it
            return call(run, self, None, args, kwargs)

    @functools.wraps(prune)
    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _calls.unlocked is self:
            raise _Untuned
        return prune(self, *args, **kwargs)

    _patches.attribute(autotuner, "nargs", _Nargs())
    _patches.attribute(autotuner, "run", locked_run)
    _patches.attribute(autotuner, "prune_configs", prune_configs)
    if warmup is not None:

        @functools.wraps(warmup)
        def own_warmup(self: Any, *args: Any, **kwargs: Any) -> Any:
            return call(warmup, self, None, args, kwargs)

        _patches.attribute(autotuner, "warmup", own_warmup)
