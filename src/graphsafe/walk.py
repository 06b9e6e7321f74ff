"""Finds the tensors that an object reaches, without importing or running anything of it.

Guarantees:
- Looks into containers, ``__dict__`` and ``__slots__``, bound methods, partials, closures, defaults, and the globals
  that a function's code names; never calls a property or any other code of the user's.
- Visits each object once, so cycles end.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_OPAQUE = frozenset({"threading", "_thread", "queue", "logging", "weakref"})  # modules whose objects hold no tensors
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, torch.Size, types.ModuleType)


def _named_globals(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    for name in code.co_names:
        if name in scope:
            yield scope[name]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant, scope)


def _function_parts(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    if (fn.__module__ or "").split(".")[0] != "torch":  # torch's own globals hold none of the user's tensors
        yield from _named_globals(fn.__code__, fn.__globals__)
    yield from vars(fn).values()


def _not_leaves(items: Iterable[Any]) -> Iterator[Any]:
    """Most of a large container are plain values: they are not even looked at twice."""
    return (item for item in tuple(items) if not isinstance(item, _LEAVES))


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base was modified since: torch refuses even to look
        return None


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from _not_leaves(item.keys())
        yield from _not_leaves(item.values())
    elif isinstance(item, list | tuple | set | frozenset):
        yield from _not_leaves(item)
    elif isinstance(item, types.FunctionType):
        yield from _function_parts(item)
    elif isinstance(item, types.MethodType):
        yield item.__func__
        yield item.__self__
    elif isinstance(item, functools.partial):
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, type) or type(item).__module__.split(".")[0] in _OPAQUE:
        return
    if isinstance(item, torch.Tensor):
        yield _gradient(item)
    if not isinstance(item, types.FunctionType):
        fields = getattr(item, "__dict__", None)
        if isinstance(fields, dict):
            yield from fields.values()
        for base in type(item).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                member = base.__dict__.get(slot)
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        yield member.__get__(item)
                    except AttributeError:  # not filled yet
                        continue
    if not isinstance(item, torch.nn.Module) and callable(item) and not isinstance(item, type):
        call = type(item).__call__
        if isinstance(call, types.FunctionType):
            yield call


def reachable(*roots: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    """The objects of a type that ``roots`` reach, each once, in the order found.

    Args:
        roots: any objects: functions, modules, optimizers, containers.
        kind: the type, or types, to collect.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = list(reversed(roots))
    keep: list[Any] = []  # temporaries stay alive, so that their ids stay theirs
    while pending:
        item = pending.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        keep.append(item)
        if isinstance(item, kind):
            found.append(item)
        pending.extend(reversed(list(_parts(item))))
    return found


def tensors(*roots: Any) -> list[torch.Tensor]:
    """The tensors that ``roots`` reach, gradients included, each once."""
    return reachable(*roots)


def modules(*roots: Any) -> list[torch.nn.Module]:
    """The modules that ``roots`` reach, each once."""
    return reachable(*roots, kind=torch.nn.Module)
