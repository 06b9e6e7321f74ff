"""A21: a call under a dispatch mode turns compiled code eager for good.

What users see: a compiled function that silently runs eagerly from then on, in every thread; and where it was a module,
every other compiled module too. Cause: Dynamo skips a frame while its thread is in a dispatch mode, rightly, but notes
the skip in the code object and never asks again; all modules are called through one code object of Dynamo's own.

The repair has Dynamo note nothing then, as newer torch does. Graphsafe's own dispatch modes need it without
``install()`` too: ``stays_compiled`` puts it in for a block. Both share one replacement, so they come and go in any
order.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any, Final

from ._import_hook import ImportHook, imported_module
from ._patches import Evidence, Patches, RepairError
from .dispatch_modes import _QUESTION

CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
FAULT: Final = "A21"
MODULES: Final = (CONVERT_FRAME,)
EVIDENCE: Final = Evidence(
    fault="a compiled function that silently runs eagerly for good after one call under a dispatch mode",
    reports=(),
    versions="2.9.1, 2.11 and 2.13, measured; not 2.14.1 and 2.15.0",
)
_FOR_GOOD: Final = "apply_to_code"  # whether a skip holds for every later call
_ON_STACK: Final = "any_torch_dispatch_mode_on_stack"
_INSTALLED: Final = "install()"


def probe(module: types.ModuleType) -> bool:
    """Whether Dynamo's entry never says that a skip is for this call alone."""
    code = _entry(module).__code__
    names = {*code.co_names, *code.co_varnames}
    for const in code.co_consts:  # the names of a call's arguments are a constant
        names.update(const if isinstance(const, tuple) else ())
    return _FOR_GOOD not in names


def repair(module: types.ModuleType) -> None:
    """Have Dynamo ask again about code that it skips because of a dispatch mode."""
    _cure.add(_INSTALLED)
    _cure.put_in(module)


def undo() -> None:
    _cure.remove(_INSTALLED)


class stays_compiled:
    """The repair is in during the block, whether ``install()`` was called or not. Nothing is imported for it.

    Thread safety: any number of threads; each block its own object.
    """

    def __enter__(self) -> None:
        _cure.add(self, await_import=True)
        module = imported_module(CONVERT_FRAME)  # it may wait for another thread's import, so no lock is held
        if module is not None:
            _cure.imported(module)

    def __exit__(self, *error: object) -> None:
        _cure.remove(self)


class _Cure:
    """The one replacement, in as long as somebody wants it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows; after the registry's, held over no import
        self._wanted_by: set[Hashable] = set()
        self._patches = Patches()
        self._is_in = False
        self._hook: ImportHook | None = None

    def add(self, who: Hashable, *, await_import: bool = False) -> None:
        with self._lock:
            self._wanted_by.add(who)
            if await_import and self._hook is None and CONVERT_FRAME not in sys.modules:
                self._hook = ImportHook(frozenset(MODULES), self.imported)
                sys.meta_path.insert(0, self._hook)

    def remove(self, who: Hashable) -> None:
        """Any number of times."""
        with self._lock:
            self._wanted_by.discard(who)
            if self._wanted_by:
                return
            if self._hook is not None:
                sys.meta_path.remove(self._hook)
                self._hook = None
            self._patches.undo()
            self._is_in = False

    def imported(self, module: types.ModuleType) -> None:
        """Put it in where this torch needs it and lets us."""
        with contextlib.suppress(Exception):  # it may run inside a user's import
            if probe(module):
                self.put_in(module)

    def put_in(self, module: types.ModuleType) -> None:
        with self._lock:
            if self._wanted_by and not self._is_in:
                self._patches.body(_entry(module), _asking_again(module))
                self._is_in = True


_cure = _Cure()


def _entry(module: types.ModuleType) -> Any:
    """The function through which Dynamo is asked about a frame, below other repairs' wrappers."""
    entry = getattr(module, "CatchErrorsWrapper", None)
    if entry is None:
        raise RepairError(f"{CONVERT_FRAME} has no CatchErrorsWrapper")
    function = inspect.unwrap(entry.__call__)
    if not isinstance(function, types.FunctionType):
        raise RepairError(f"{CONVERT_FRAME}.CatchErrorsWrapper is not called through a function")
    return function


def _asking_again(module: types.ModuleType) -> Callable[[types.FunctionType], Callable[..., Any]]:
    rules, config = getattr(module, "trace_rules", None), getattr(module, "config", None)
    on_stack: Callable[[], bool] | None = getattr(module, _ON_STACK, None)
    if not hasattr(rules, "check") or (on_stack is None and not hasattr(module, _QUESTION)):
        raise RepairError("Dynamo asks for dispatch modes in an unknown way")
    skips: Callable[..., bool] = rules.check  # type: ignore[union-attr]
    by_frame = "frame" in inspect.signature(skips).parameters

    def in_mode() -> bool:  # as Dynamo asks
        if on_stack is not None and getattr(config, "inline_torch_dispatch_torch_compile", True):
            return on_stack()
        return bool(getattr(module, _QUESTION)())

    def make(original: types.FunctionType) -> Callable[..., Any]:
        def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, frame, *args, **kwargs)
            if result.guarded_code is None and getattr(result, _FOR_GOOD, False) and in_mode():
                by_rule = skips(frame.f_code, frame=frame) if by_frame else skips(frame.f_code)
                setattr(result, _FOR_GOOD, by_rule)  # what its rules skip, Dynamo skips outside of modes too
            return result

        return call

    return make
