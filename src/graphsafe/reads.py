"""The plain values that code reads: numbers, strings, None, on paths of names and constant keys.

Guarantees:
- A method counts where code runs it: ``forward`` and ``__call__``, what was passed in, what such code looks up on a
  path, and what it names, unless tensors and containers have a method of that name. Of others, which are only named
  alike, what they read of ``self`` directly.
- What a path leads through may be replaced: only another value at its end counts.
- Attributes that the code itself binds are its own: what a method puts into ``self`` and reads again is no setting.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .paths import (
    VALUES,
    Edge,
    Path,
    attributes_bound,
    attributes_read,
    called_on,
    follow,
    is_library,
    paths_read,
)

_COMMON = frozenset(name for kind in (torch.Tensor, dict, list, tuple, str, set) for name in dir(kind))


class Route:
    """A path to a value, from an object or a variable.

    Attributes:
        edges: on the way, of which the last holds the value.
    """

    def __init__(self, begin: Callable[[], Edge | None], path: Path, edges: list[Edge]) -> None:
        self._begin, self._path, self.edges = begin, path, edges

    @property
    def value(self) -> Any:
        return self.edges[-1][2]

    def again(self) -> list[Edge] | None:
        """The edges as of now; None where it leads to no value any more."""
        return _edges(self._begin, self._path)

    def __str__(self) -> str:
        steps = (f"[{step.key!r}]" if step.is_entry else f".{step.key}" for step in self._path.steps)
        return self._path.name + "".join(steps)


def values_read(
    owners: Sequence[Any],
    methods: dict[type, list[types.CodeType]],
    functions: Sequence[types.FunctionType],
    certain: set[int],
) -> Iterator[tuple[Route, bool]]:
    """What code reads, each with whether it belongs to an installed package.

    Args:
        owners: objects whose methods may run.
        methods: the code of those, by class.
        functions: that were reached, methods too.
        certain: ids of those functions that run whatever they are called.
    """
    of_type: dict[type, list[Any]] = {}
    for owner in owners:
        if not (isinstance(owner, torch.nn.Module) and is_library(type(owner).__module__)):  # see public_values
            of_type.setdefault(type(owner), []).append(owner)
    of_class = {kind: [x for one, some in of_type.items() if kind in one.__mro__ for x in some] for kind in methods}
    found: dict[types.CodeType, dict[int, Any]] = {}  # owners, by their ids
    for kind, codes in methods.items():
        for code in dict.fromkeys(codes):
            found.setdefault(code, {}).update((id(owner), owner) for owner in of_class[kind])
    owners_of = {code: list(some.values()) for code, some in found.items()}
    runs = _running([fn for fn in functions if id(fn) in certain], functions, owners_of)
    bound = {
        one: {
            name
            for kind in one.__mro__
            for code in methods.get(kind, ())
            if code in runs
            for name in attributes_bound(code)
        }
        for one in of_type
    }
    for code, some in owners_of.items():
        for path in paths_read(code):
            if path.root == "self" and (len(path.steps) == 1 or code in runs):
                for owner in some:
                    if path.steps[0].key not in bound[type(owner)]:
                        yield from _routes(_of_object(owner), path, code)
    for fn in functions:
        if fn.__code__ in runs:
            for path in paths_read(fn.__code__):
                if path.root != "self" and path.steps[0].key not in attributes_bound(fn.__code__):
                    yield from _routes(_of_variable(fn, path), path, fn.__code__)


def is_installed(code: types.CodeType) -> bool:
    """Whether code belongs to an installed package."""
    return "-packages" in code.co_filename


def _running(
    certain: Iterable[types.FunctionType],
    functions: Iterable[types.FunctionType],
    owners_of: dict[types.CodeType, list[Any]],
) -> set[types.CodeType]:
    methods: dict[str, list[types.FunctionType]] = {}
    for fn in functions:
        if fn.__code__ in owners_of:
            methods.setdefault(fn.__name__, []).append(fn)
    found: set[types.CodeType] = set()
    pending = list(certain)
    while pending:
        fn = pending.pop()
        if fn.__code__ in found:
            continue
        found.add(fn.__code__)
        pending += [one for name in attributes_read(fn.__code__) - _COMMON for one in methods.get(name, ())]
        for path in paths_read(fn.__code__):
            if path.root == "self":
                starts = list({type(owner): owner for owner in owners_of.get(fn.__code__, ())}.values())
            else:
                edge = _of_variable(fn, path)()
                starts = [] if edge is None else [edge[2]]
            pending += [one for start in starts for one in called_on(start, path)]
    return found


def _of_object(owner: Any) -> Callable[[], Edge | None]:
    return lambda: (None, None, owner)


def _of_variable(fn: types.FunctionType, path: Path) -> Callable[[], Edge | None]:
    if path.root == "global":
        scope, name = fn.__globals__, path.name
        return lambda: (scope, name, scope[name]) if name in scope else None
    return _of_cell((fn.__closure__ or ())[fn.__code__.co_freevars.index(path.name)])


def _of_cell(cell: types.CellType) -> Callable[[], Edge | None]:
    def begin() -> Edge | None:
        try:
            return cell, None, cell.cell_contents
        except ValueError:  # not filled yet
            return None

    return begin


def _edges(begin: Callable[[], Edge | None], path: Path) -> list[Edge] | None:
    first = begin()
    edges = [] if first is None else follow(first[2], path)
    if first is None or not edges:
        return None
    return edges if first[0] is None else [first, *edges]


def _routes(begin: Callable[[], Edge | None], path: Path, code: types.CodeType) -> Iterator[tuple[Route, bool]]:
    edges = _edges(begin, path)
    if edges is not None:
        yield Route(begin, path, edges), is_installed(code)


def public_values(module: torch.nn.Module) -> Iterator[Edge]:
    """The plain values of one of torch's own modules."""
    for name, value in module.__dict__.items():
        if not name.startswith("_") and name != "training" and isinstance(value, VALUES):
            yield module.__dict__, name, value
