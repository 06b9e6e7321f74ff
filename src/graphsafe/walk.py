"""Finds the tensors that an object reaches, without importing or running anything of it.

Guarantees:
- Looks into containers, ``__dict__`` and ``__slots__``, bound methods, partials, closures, defaults, and the globals
  that a function's code names; never calls a property or any other code of the user's.
- Visits each object once, so cycles end.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_OPAQUE = frozenset({"threading", "_thread", "queue", "logging", "weakref"})  # modules whose objects hold no tensors
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, torch.Size, types.ModuleType)

_OWN = ("_tensors", "_fn", "_roots")  # attributes of graphsafe's classes that lead to what is the user's

Edge = tuple[Any, Any, Any]  # (container, key, child): a dict or list, and what it holds there; or (cell, None, child)
Part = tuple[Any, Any, Any]  # the same, or (None, None, child) where the child hangs on nothing that can be looked up


def _is_library(name: str | None) -> bool:
    return (name or "").split(".")[0] in ("torch", "graphsafe")


def _named_globals(code: types.CodeType, scope: dict[str, Any]) -> Iterator[Part]:
    for name in code.co_names:
        if name in scope:
            yield scope, name, scope[name]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant, scope)


def _function_parts(fn: types.FunctionType) -> Iterator[Part]:
    for cell in fn.__closure__ or ():
        try:
            yield cell, None, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield None, None, value
    if not _is_library(fn.__module__):  # whose globals hold none of the user's tensors
        yield from _named_globals(fn.__code__, fn.__globals__)
    for name, value in vars(fn).items():
        yield fn.__dict__, name, value


def _items(container: Mapping[Any, Any]) -> Iterator[Part]:
    for key, value in tuple(container.items()):
        if not isinstance(value, _LEAVES):  # most of a large container are plain values: not even looked at twice
            yield container, key, value


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base was modified since: torch refuses even to look
        return None


def _parts(item: Any, gradients: bool) -> Iterator[Part]:
    if isinstance(item, dict):
        for key in tuple(item):
            yield None, None, key
        yield from _items(item)
    elif isinstance(item, list | tuple):
        container = item if isinstance(item, list) else None
        for index, value in enumerate(tuple(item)):
            if not isinstance(value, _LEAVES):
                yield container, index, value
    elif isinstance(item, set | frozenset):
        for value in tuple(item):
            yield None, None, value
    elif isinstance(item, types.FunctionType):
        yield from _function_parts(item)
    elif isinstance(item, types.MethodType):
        yield None, None, item.__func__
        yield None, None, item.__self__
    elif isinstance(item, functools.partial):
        for value in (item.func, *item.args, *item.keywords.values()):
            yield None, None, value
    elif isinstance(item, type) or type(item).__module__.split(".")[0] in _OPAQUE:
        return
    if isinstance(item, torch.Tensor) and gradients:
        yield None, None, _gradient(item)
    if not isinstance(item, types.FunctionType):
        yield from _fields(item)
    if not isinstance(item, torch.nn.Module) and callable(item) and not isinstance(item, type):
        call = type(item).__call__
        if isinstance(call, types.FunctionType):
            yield None, None, call


def _fields(item: Any) -> Iterator[Part]:
    """What hangs on an object's ``__dict__`` and ``__slots__``; of graphsafe's own, what is the user's."""
    fields = getattr(item, "__dict__", None)
    if type(item).__module__.split(".")[0] == "graphsafe":
        for name in _OWN:
            if isinstance(fields, dict) and name in fields:
                yield fields, name, fields[name]
        return
    if isinstance(fields, dict):
        yield from _items(fields)
    for base in type(item).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member = base.__dict__.get(slot)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield None, None, member.__get__(item)
                except AttributeError:  # not filled yet
                    continue


def _visit(roots: Iterable[Any], gradients: bool) -> Iterator[tuple[Any, list[Part]]]:
    """Each object once, depth first, with its parts. They all stay alive meanwhile, so that their ids stay theirs."""
    seen: set[int] = set()
    pending: list[Any] = list(roots)[::-1]
    keep: list[Any] = []
    while pending:
        item = pending.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        keep.append(item)
        parts = list(_parts(item, gradients))
        yield item, parts
        pending.extend(child for _, _, child in reversed(parts))


def reachable(*roots: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    """The objects of a type that ``roots`` reach, each once, in the order found.

    Args:
        roots: any objects: functions, modules, optimizers, containers.
        kind: the type, or types, to collect.
    """
    return [item for item, _ in _visit(roots, gradients=True) if isinstance(item, kind)]


def tensors(*roots: Any) -> list[torch.Tensor]:
    """The tensors that ``roots`` reach, gradients included, each once."""
    return reachable(*roots)


def modules(*roots: Any) -> list[torch.nn.Module]:
    """The modules that ``roots`` reach, each once."""
    return reachable(*roots, kind=torch.nn.Module)


@dataclass(frozen=True)
class Trace:
    """The tensors that code may read, and what they hang on.

    Attributes:
        tensors: gradients excepted.
        modules: those reached.
        edges: on the ways to them. Attributes of an object count where code that is reached reads them, so what a
            training loop notes on the same object does not.
        variables: those of the edges that are variables, attributes, and parts of modules, not entries of containers.
    """

    tensors: list[torch.Tensor]
    modules: list[torch.nn.Module]
    edges: list[Edge]
    variables: list[Edge]


def trace(*roots: Any) -> Trace:
    """What ``roots`` reach, with the edges on the way."""
    found: list[Any] = []
    parents: dict[int, int] = {}  # of each object, on the first way to it
    edges: list[Edge] = []
    fields: dict[int, Any] = {}  # attributes' dict -> whose they are
    functions: list[types.FunctionType] = []
    visited: list[Any] = []
    for item, parts in _visit(roots, gradients=False):
        visited.append(item)
        if isinstance(item, types.FunctionType):
            functions.append(item)
        elif isinstance(getattr(item, "__dict__", None), dict) and not isinstance(item, type):
            fields[id(item.__dict__)] = item
        if isinstance(item, torch.Tensor | torch.nn.Module):
            found.append(item)
        for container, key, child in parts:
            if isinstance(child, _LEAVES):
                continue
            parents.setdefault(id(child), id(item))
            if container is not None:
                edges.append((container, key, child))
    relevant: set[int] = set()
    for item in found:
        ident: int | None = id(item)
        while ident is not None and ident not in relevant:
            relevant.add(ident)
            ident = parents.get(ident)
    names = _named(functions, {type(owner) for owner in fields.values()})
    kept = [
        edge
        for edge in edges
        if id(edge[2]) in relevant and (id(edge[0]) not in fields or edge[1] in names or _is_own(fields[id(edge[0])]))
    ]
    tensors = [item for item in found if isinstance(item, torch.Tensor)]
    modules = [item for item in found if isinstance(item, torch.nn.Module)]
    holders = {id(table) for module in modules for table in (module._parameters, module._buffers, module._modules)}
    holders |= set(fields) | {id(fn.__globals__) for fn in functions}
    variables = [edge for edge in kept if isinstance(edge[0], types.CellType) or id(edge[0]) in holders]
    return Trace(tensors, modules, kept, variables)


def _is_own(owner: Any) -> bool:
    """Whether all fields of an object count: an optimizer's, whose code is torch's."""
    return isinstance(owner, torch.optim.Optimizer)


def _named(functions: list[types.FunctionType], classes: set[type]) -> set[str]:
    """Names that the code of functions reads, its strings, and those of the methods that such names may call."""
    names = {"forward", "__call__", "_parameters", "_buffers", "_modules", *_OWN}
    for fn in functions:
        names |= _words(fn.__code__)
    methods = {pair for cls in classes for base in cls.__mro__ for pair in _methods(base)}
    while called := {pair for pair in methods if pair[0] in names}:
        methods -= called
        for _, code in called:
            names |= _words(code)
    return names


def _methods(cls: type) -> Iterator[tuple[str, types.CodeType]]:
    if _is_library(cls.__module__):
        return
    for name, member in tuple(vars(cls).items()):
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType):
            yield name, member.__code__


def _words(code: types.CodeType) -> set[str]:
    found = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")}
    found = {word for word in found if isinstance(word, str)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _words(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found
