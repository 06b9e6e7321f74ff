"""What every repair is made of: replacing an attribute or the body of a function, and putting it back.

Guarantees:
- ``undo()`` puts back the very objects that were there, newest first, and is harmless when repeated.
- What someone else has replaced since is left alone, with a warning: their wrapper would be lost.
- A function whose body is replaced stays the same object. Names imported before the repair see it too, and so do
  Dynamo's tables, which know ``torch.manual_seed`` and its like by identity.
"""

from __future__ import annotations

import inspect
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import GraphsafeWarning

T = TypeVar("T")
_MISSING = object()


class RepairError(Exception):
    """This torch is not built as the repair expects; the message says what is missing."""


@dataclass(frozen=True)
class Evidence:
    """Why a repair exists.

    Attributes:
        fault: what users see.
        reports: public reports, as ``repository#number``; empty where only torch's source and our measurement show it.
        versions: which torch versions have it, as far as known.
    """

    fault: str
    reports: tuple[str, ...]
    versions: str


@dataclass
class Patches:
    """The replacements of one repair. Used under the registry's lock alone."""

    _undo: list[Callable[[], None]] = field(default_factory=list)

    def attribute(self, owner: Any, name: str, value: object) -> None:
        """Set ``owner.name``, where it was missing before too."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name, _MISSING) is not value:
                _warn_replaced(f"{getattr(owner, '__name__', owner)}.{name}")
            elif before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def body(self, function: object, make: Callable[[types.FunctionType], Callable[..., Any]]) -> None:
        """Have ``function`` run ``make(original)``; ``original`` does what it did. Identity and signature stay."""
        if not isinstance(function, types.FunctionType) or function.__closure__:
            raise RepairError(f"{function!r} is not a plain function")
        code, signature = function.__code__, inspect.signature(function)
        original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__
        replacement = jump(code, make(original))
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__code__ = replacement

        def undo() -> None:
            if function.__code__ is not replacement:
                _warn_replaced(function.__qualname__)
                return
            function.__code__ = code
            del function.__signature__  # type: ignore[attr-defined]

        self._undo.append(undo)

    def during_call(self, function: object, scope: Callable[..., AbstractContextManager[None]]) -> None:
        """Have ``function`` run inside ``scope`` of its arguments, with Dynamo's frame evaluation off.

        So a call from partly compiled code compiles none of it.
        """

        def make(original: types.FunctionType) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with without_dynamo(), scope(*args, **kwargs):
                    return original(*args, **kwargs)

            return call

        self.body(function, make)

    def later(self, undo: Callable[[], None]) -> None:
        """Have ``undo()`` call this too."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class without_dynamo:
    """Dynamo compiles no frame of this thread, for what runs inside code that is compiled in part.

    No generator: a forked child would run its end for threads that it has not.
    """

    def __enter__(self) -> None:
        self._set: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
        self._prior = self._set(None)

    def __exit__(self, *error: object) -> None:
        self._set(self._prior)


def in_another_thread(function: Callable[[], T]) -> T:
    """What ``function`` returns in a thread of its own, for a probe."""
    values: list[T] = []
    thread = threading.Thread(target=lambda: values.append(function()))
    thread.start()
    thread.join()
    return values[0]


def jump(code: types.CodeType, body: Callable[..., Any]) -> types.CodeType:
    """Code that calls ``body``, and looks to Dynamo and inspect like ``code`` that it stands in for."""
    return _jump.__code__.replace(
        co_consts=tuple(body if const == _BODY else const for const in _jump.__code__.co_consts),
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


_BODY = "the new body"


def _jump(*args: Any, **kwargs: Any) -> Any:
    body: Any = "the new body"
    return body(*args, **kwargs)


def _warn_replaced(name: str) -> None:
    warnings.warn(
        f"{name} was replaced again after graphsafe.install(); uninstall() leaves it as it is, so that the newer "
        "replacement is not lost. Undo that one first, then install() and uninstall() again.",
        GraphsafeWarning,
        stacklevel=2,
    )
