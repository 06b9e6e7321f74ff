"""Finds the tensors that an object reaches, without importing or running anything of it.

Guarantees:
- Looks into containers, ``__dict__`` and ``__slots__``, bound methods, partials, closures, defaults, and the globals
  that a function's code names; never calls a property or any other code of the user's.
- Visits each object once, so cycles end.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .paths import VALUES, Edge, function_of, globals_read, is_library, is_users, lookup_of, words
from .reads import Route, is_installed, public_values, values_read

_OPAQUE = frozenset({"threading", "_thread", "queue", "logging", "weakref"})  # modules whose objects hold no tensors
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, torch.Size, types.ModuleType)

_OWN = ("_tensors", "_fn", "_roots")  # attributes of graphsafe's classes that lead to what is the user's

Part = tuple[Any, Any, Any]  # an Edge, or (None, None, child) where the child hangs on nothing that can be looked up
_FIRST = frozenset({"forward", "__call__"})  # methods that run without being named


def _function_parts(fn: types.FunctionType) -> Iterator[Part]:
    for cell in fn.__closure__ or ():
        try:
            yield cell, None, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield None, None, value
    if not is_library(fn.__module__):
        scope, names = fn.__globals__, words(fn.__code__)
        for name in globals_read(fn.__code__):
            if name in scope:
                yield scope, name, scope[name]
                yield from _module_parts(scope[name], names)
    for name, value in vars(fn).items():
        yield fn.__dict__, name, value


def _module_parts(module: Any, names: frozenset[str], depth: int = 3) -> Iterator[Part]:
    """What code may read as an attribute of an imported module."""
    if not isinstance(module, types.ModuleType) or not is_users(module.__name__):
        return
    scope = vars(module)
    for name in names & scope.keys():
        yield scope, name, scope[name]
        if depth:
            yield from _module_parts(scope[name], names, depth - 1)


def _items(container: Mapping[Any, Any]) -> Iterator[Part]:
    items = dict.items(container) if isinstance(container, dict) else container.items()  # no method of a subclass
    holder = lookup_of(container)
    for key, value in tuple(items):
        if not isinstance(value, _LEAVES):  # most of a large container are plain values: not even looked at twice
            yield holder, key, value


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base was modified since: torch refuses even to look
        return None


def _parts(item: Any, gradients: bool) -> Iterator[Part]:
    if isinstance(item, dict):
        for key in tuple(dict.keys(item)):
            yield None, None, key
        yield from _items(item)
    elif isinstance(item, list | tuple | collections.deque):
        container = None if isinstance(item, tuple) else lookup_of(item)
        kind: Any = next(kind for kind in (list, tuple, collections.deque) if isinstance(item, kind))
        for index, value in enumerate(tuple(kind.__iter__(item))):  # no method of a subclass
            if not isinstance(value, _LEAVES):
                yield container, index, value
    elif isinstance(item, set | frozenset):
        members: Any = set if isinstance(item, set) else frozenset
        for value in tuple(members.__iter__(item)):
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


class _Walk:
    """Visits each object once, depth first. They all stay alive meanwhile, so that their ids stay theirs.

    Attributes:
        names: that the code reads that was reached: methods and class attributes of these names belong to it.
    """

    def __init__(self, roots: Iterable[Any], gradients: bool) -> None:
        self._roots, self._gradients = tuple(roots), gradients
        self.names: set[str] = set(_FIRST)
        self._classes: dict[type, set[str]] = {}  # -> names of theirs that were not visited yet
        self.methods: dict[type, list[types.CodeType]] = {}
        self.functions: list[types.FunctionType] = []
        self.certain: set[int] = set()  # ids of functions that were not found by their name in a class alone
        self.scopes: list[Any] = []  # mappings of class attributes

    def visit(self) -> Iterator[tuple[Any, list[Part]]]:
        """Objects and their parts; a class stands for those of its attributes that code names."""
        seen: set[int] = set()
        pending: list[Any] = list(self._roots)[::-1]
        self.certain.update(map(id, self._roots))
        keep: list[Any] = []
        while pending:
            while pending:
                item = pending.pop()
                if isinstance(item, _LEAVES) or id(item) in seen:
                    continue
                seen.add(id(item))
                keep.append(item)
                self._note(item)
                parts = list(_parts(item, self._gradients))
                self.certain.update(id(child) for _, _, child in parts)
                yield item, parts
                pending.extend(child for _, _, child in reversed(parts))
            for cls, left in tuple(self._classes.items()):
                found = left & self.names
                if found:
                    self._classes[cls] = left - found
                    parts = list(self._attributes(cls, found))
                    yield cls, parts
                    pending.extend(child for _, _, child in parts)

    def _note(self, item: Any) -> None:
        if isinstance(item, types.MethodType) and isinstance(item.__func__, types.FunctionType):
            self.methods.setdefault(type(item.__self__), []).append(item.__func__.__code__)
        if isinstance(item, types.FunctionType):
            if not is_library(item.__module__):
                self.functions.append(item)
                self.names |= words(item.__code__)
            return
        cls = item if isinstance(item, type) else type(item)
        for base in cls.__mro__:
            if base not in self._classes and is_users(base.__module__):
                self._classes[base] = set(vars(base))

    def _attributes(self, cls: type, names: Iterable[str]) -> Iterator[Part]:
        scope = vars(cls)
        self.scopes.append(scope)
        for name in names:
            member = function_of(scope[name])
            if isinstance(member, types.FunctionType):
                self.methods.setdefault(cls, []).append(member.__code__)
                if name in _FIRST:
                    self.certain.add(id(member))
                yield None, None, member
            elif not isinstance(member, _LEAVES):
                yield scope, name, scope[name]


def reachable(*roots: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    """The objects of a type that ``roots`` reach, each once, in the order found.

    Args:
        roots: any objects: functions, modules, optimizers, containers.
        kind: the type, or types, to collect.
    """
    return [item for item, _ in _Walk(roots, gradients=True).visit() if isinstance(item, kind)]


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
        values: other variables and attributes that the code reads: numbers, strings, None.
        routes: the ways to such values that lead through several objects.
        fixed: what else it reads and seldom is another: functions, and values in packages that are installed.
    """

    tensors: list[torch.Tensor]
    modules: list[torch.nn.Module]
    edges: list[Edge]
    variables: list[Edge]
    values: list[Edge]
    routes: list[Route]
    fixed: list[Edge]


def trace(*roots: Any) -> Trace:
    """What ``roots`` reach, with the edges on the way."""
    found: list[Any] = []
    parents: dict[int, int] = {}  # of each object, on the first way to it
    edges: list[Edge] = []
    fields: dict[int, Any] = {}  # attributes' dict -> whose they are
    scopes: set[int] = set()  # globals of functions and of modules
    installed: set[int] = set()  # containers that installed packages read
    visited: list[Any] = []
    walk = _Walk(roots, gradients=False)
    for item, parts in walk.visit():
        visited.append(item)
        is_function = isinstance(item, types.FunctionType)
        if not is_function and isinstance(getattr(item, "__dict__", None), dict):
            fields[id(item.__dict__)] = item
        if isinstance(item, torch.Tensor | torch.nn.Module):
            found.append(item)
        for container, key, child in parts:
            if not isinstance(child, _LEAVES):
                parents.setdefault(id(child), id(item))
            if container is not None:
                edges.append((container, key, child))
                if is_function and not isinstance(container, types.CellType):
                    scopes.add(id(container))
                if is_function and is_installed(item.__code__):
                    installed.add(id(container))
    relevant: set[int] = set()
    for item in found:
        ident: int | None = id(item)
        while ident is not None and ident not in relevant:
            relevant.add(ident)
            ident = parents.get(ident)
    modules = [item for item in found if isinstance(item, torch.nn.Module)]
    tables = {id(table) for module in modules for table in (module._parameters, module._buffers, module._modules)}
    classes = {id(scope) for scope in walk.scopes}
    names = walk.names | {"_parameters", "_buffers", "_modules", *_OWN}
    kept: list[Edge] = []
    variables: list[Edge] = []
    others = [(edge, True) for item in modules if is_library(type(item).__module__) for edge in public_values(item)]
    owners = [item for item in visited if not isinstance(item, type | types.FunctionType | types.ModuleType)]
    routes: list[Route] = []
    for route, is_fixed in values_read(owners, walk.methods, walk.functions, walk.certain):
        if is_fixed or len(route.edges) == 1:
            others.append((route.edges[-1], is_fixed))
        else:
            routes.append(route)
    for edge in edges:
        container, key, child = edge
        is_variable = isinstance(container, types.CellType) or id(container) in scopes | classes
        if id(child) in relevant and not isinstance(child, _LEAVES):
            owner = fields.get(id(container))
            if owner is None or key in names or isinstance(owner, torch.optim.Optimizer):
                kept.append(edge)
                if is_variable or owner is not None or id(container) in tables:
                    variables.append(edge)
        elif is_variable:
            others.append((edge, id(container) in installed or not isinstance(child, VALUES)))
    values = _once(edge for edge, is_fixed in others if not is_fixed)
    fixed = _once(edge for edge, is_fixed in others if is_fixed)
    tensors = [item for item in found if isinstance(item, torch.Tensor)]
    return Trace(tensors, modules, kept, variables, values, routes, fixed)


def _once(edges: Iterable[Edge]) -> list[Edge]:
    return list({(id(edge[0]), edge[1]): edge for edge in edges}.values())
