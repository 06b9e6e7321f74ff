"""A1: the flag that FX is tracing is one for the process.

While one thread traces, any other thread's compiled call raises "Detected that you are using FX to symbolically trace a
dynamo-optimized function". Two traces that overlap can also leave the flag set for good.

The repair makes the flag a value a thread:
- The module's global becomes an object that is true in the threads that trace. Functions of the module that read the
  global, and all who hold those functions, are right without a change.
- ``Tracer.trace`` is the one function that assigns the global. It runs with that name renamed, this thread's value set.
- Others assign it as an attribute of the module (``torch._higher_order_ops``), so the module's class gets a property.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A1"
MODULES: Final = ("torch.fx._symbolic_trace",)
EVIDENCE: Final = Evidence(
    fault="'Detected that you are using FX to symbolically trace a dynamo-optimized function', now and then",
    reports=("pytorch/pytorch#126024",),
    versions="<= 2.13; thread-local in torch itself from 2.14",
)

_FLAG = "_is_fx_tracing_flag"
_UNUSED = "_is_fx_tracing_flag_of_the_process"
_patches = Patches()
undo = _patches.undo


class _PerThreadFlag(threading.local):
    """True in a thread that traces."""

    tracing = False

    def __bool__(self) -> bool:
        return self.tracing


def probe(module: types.ModuleType) -> bool:
    """Whether a plain global of the module decides what ``is_fx_symbolic_tracing`` answers.

    Its code runs on a copy of the module's globals, so no thread sees the flag set.
    """
    reader = getattr(module, "is_fx_symbolic_tracing", None) or module.is_fx_tracing
    answer: Callable[[], object] = types.FunctionType(reader.__code__, {**vars(module), _FLAG: True})
    return _FLAG in vars(module) and bool(answer())


def repair(module: types.ModuleType) -> None:
    """Make the flag a value a thread."""
    traces = inspect.unwrap(module.Tracer.trace)  # Dynamo wraps the method
    if not isinstance(traces, types.FunctionType) or _FLAG not in traces.__code__.co_names:
        raise RepairError(f"torch.fx.Tracer.trace does not set {_FLAG}")
    flag = _PerThreadFlag()

    def make(original: types.FunctionType) -> Callable[..., Any]:
        names = tuple(_UNUSED if name == _FLAG else name for name in original.__code__.co_names)
        original.__code__ = original.__code__.replace(co_names=names)

        def trace(*args: Any, **kwargs: Any) -> Any:
            if vars(module)[_FLAG] is not flag:  # a trace that was under way during repair() put back what it found
                vars(module)[_FLAG] = flag
            before, flag.tracing = flag.tracing, True
            try:
                return original(*args, **kwargs)
            finally:
                flag.tracing = before

        return trace

    def get(_: types.ModuleType) -> bool:
        return flag.tracing

    def put(_: types.ModuleType, value: object) -> None:
        flag.tracing = bool(value)

    plain_class = type(module)
    repaired_class = type(plain_class.__name__, (plain_class,), {_FLAG: property(get, put)})

    def put_back() -> None:
        module.__class__ = plain_class
        vars(module)[_FLAG] = False
        del vars(module)[_UNUSED]

    _patches.later(put_back)
    vars(module)[_UNUSED] = False
    vars(module)[_FLAG] = flag
    module.__class__ = repaired_class
    _patches.body(traces, make)
