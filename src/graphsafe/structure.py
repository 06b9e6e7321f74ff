"""Takes nested dicts, lists and tuples apart, and puts them together, faster than a general pytree.

Guarantees:
- The leaves are those of ``torch.utils._pytree``, in its order; what has containers of other kinds is ``None`` to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .repairs import private

_Take = Callable[[Any, list[Any]], bool]  # appends a value's leaves; False where it is nested otherwise
_Make = Callable[[Iterator[Any]], Any]


class Structure:
    """The nesting of ``example``."""

    def __init__(self, example: Any) -> None:
        self._take, self._make = _parts(example)
        leaves: list[Any] = []
        self._take(example, leaves)
        expected, self._spec = private.tree_flatten(example)
        self._plain = list(map(id, leaves)) == list(map(id, expected))

    def leaves(self, value: Any) -> Sequence[Any] | None:
        """The leaves of a value of the same nesting, else None."""
        if not self._plain:
            leaves, spec = private.tree_flatten(value)
            return leaves if spec == self._spec else None
        found: list[Any] = []
        return found if self._take(value, found) else None

    def build(self, leaves: Sequence[Any]) -> Any:
        """A new value with these leaves."""
        return self._make(iter(leaves)) if self._plain else private.tree_unflatten(leaves, self._spec)


def _parts(example: Any) -> tuple[_Take, _Make]:
    kind = type(example)
    if kind is dict:
        return _dict_parts(example)
    if kind is tuple or kind is list:
        return _sequence_parts(example, kind)

    def take(value: Any, found: list[Any]) -> bool:
        found.append(value)
        return True

    return take, next


def _dict_parts(example: dict[Any, Any]) -> tuple[_Take, _Make]:
    keys = list(example)
    children = [_parts(value) for value in example.values()]
    takes, makes = [take for take, _ in children], [make for _, make in children]

    def take(value: Any, found: list[Any]) -> bool:
        if type(value) is not dict or list(value) != keys:
            return False
        for child, part in zip(takes, value.values(), strict=True):  # noqa: SIM110  a generator would cost more
            if not child(part, found):
                return False
        return True

    return take, lambda left: {key: make(left) for key, make in zip(keys, makes, strict=True)}


def _sequence_parts(example: Sequence[Any], kind: Callable[[list[Any]], Any]) -> tuple[_Take, _Make]:
    children = [_parts(value) for value in example]
    takes, makes = [take for take, _ in children], [make for _, make in children]

    def take(value: Any, found: list[Any]) -> bool:
        if type(value) is not kind or len(value) != len(takes):
            return False
        for child, part in zip(takes, value, strict=True):  # noqa: SIM110
            if not child(part, found):
                return False
        return True

    return take, lambda left: kind([make(left) for make in makes])
