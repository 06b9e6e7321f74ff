"""compile(): torch.compile that any number of threads may call.

Guarantees:
- The compiled function is torch.compile's own; its arguments, results and errors are unchanged.
- Threads may make, call and train compiled functions at once, their own and shared ones: no thread waits for another
  one's backward while it compiles (``repairs/`` has each fault of torch behind this, and its proof).
- ``install()`` gives plain torch.compile the same, for the whole process; ``uninstall()`` puts everything back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from . import repairs, tree_scopes  # noqa: F401 - plugs the contexts into the repairs
from .repairs import Status

_F = TypeVar("_F", bound=Callable[..., Any])


def install() -> None:
    """Repair torch for the whole process, so that plain torch.compile, seeding and synchronize are safe with threads.

    Imports no part of torch: what is not imported yet is repaired on its first import. Calling it again does nothing.
    What this torch does not let us repair is a GraphsafeWarning that names the fault; the rest works.

    Thread safety: any thread, at any time; compiles under way end as they began.
    Sync: none.
    """
    repairs.apply()


def uninstall() -> None:
    """Put back every object of torch that ``install()`` or ``compile()`` replaced.

    Thread safety: any thread; compiles under way end as they began.
    """
    repairs.undo()


def installed() -> Mapping[str, Status]:
    """What ``install()`` did, for each fault of torch by its id.

    Returns:
        ``"repaired"``; ``"absent"`` where this torch lacks the fault; ``"pending"`` where the module that has it is not
        imported yet; ``"failed"`` where this torch does not let us. Empty where nothing is installed.
    """
    return repairs.statuses()


@overload
def compile(
    model: _F,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    backend: str | Callable[..., Any] = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    **kwargs: Any,
) -> _F: ...
@overload
def compile(
    model: None = None,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    backend: str | Callable[..., Any] = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    **kwargs: Any,
) -> Callable[[_F], _F]: ...
def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """torch.compile, for use from any number of threads; installs the repairs first.

    Args:
        model: the function or module to compile. Without it, returns a decorator.
        fullgraph, dynamic, backend, mode, options: as for torch.compile.
        kwargs: further arguments that this torch's compile has.
    Raises:
        TypeError: ``model`` is not callable, or this torch's compile has no such argument.
        RuntimeError: torch's own, for an unknown mode or backend, or both mode and options.
    Thread safety: any thread, and so is what it returns. One thread compiles at a time.
    """
    if model is not None and not callable(model):
        raise TypeError(
            f"compile() needs a function or a module and got {type(model).__name__}. As a decorator with arguments, "
            "write @graphsafe.compile(fullgraph=True); every argument but the model is given by name."
        )
    known = inspect.signature(torch.compile).parameters
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise TypeError(
            f"compile() got unknown argument {', '.join(map(repr, unknown))}. torch {torch.__version__} knows "
            f"{', '.join(name for name in known if name != 'model')}."
        )
    install()
    options = dict(options) if options is not None else None
    compiler = functools.partial(
        torch.compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, **kwargs
    )
    return compiler(model)
