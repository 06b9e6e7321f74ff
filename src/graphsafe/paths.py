"""What code reads, by its bytecode: names, and paths of attributes and entries, as ``cfg.scale`` and ``table["s"]``.

Guarantees:
- Nothing is imported, and no code of the user's is run: no property, no ``__getattr__``.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from typing import Any, Literal, NamedTuple

import torch

VALUES = (str, bytes, int, float, complex, bool, type(None))
Edge = tuple[Any, Any, Any]  # (mapping or list, key, child), where it holds the child; or (cell, None, child)

_LIBRARIES = frozenset({"torch", "graphsafe", "numpy", *sys.stdlib_module_names})  # hold none of the user's tensors
_CODE_CACHE_SIZE = 4096
_NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"})  # instructions that leave the stack as it is


class Step(NamedTuple):
    """One step of a path: an attribute's name, or the constant key of an entry."""

    is_entry: bool
    key: Any


Chain = tuple[str, str, tuple[Step, ...]]  # the kind of variable, "global" or "variable", its name, steps


class Path(NamedTuple):
    """Where a path begins, and how it goes on.

    Attributes:
        root: "self" is the function's first argument, "free" a variable of a function around it.
    """

    root: Literal["global", "free", "self"]
    name: str
    steps: tuple[Step, ...]


@functools.lru_cache(maxsize=_CODE_CACHE_SIZE)
def words(code: types.CodeType) -> frozenset[str]:
    """The names that code reads, and its strings, which may be names too."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")}
    names = {word for word in found if isinstance(word, str)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= words(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=_CODE_CACHE_SIZE)
def _named(code: types.CodeType, *operations: str) -> frozenset[str]:
    """The names that these instructions of the code, and of the code inside of it, have as their argument."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _named(constant, *operations)
    return frozenset(found)


def globals_read(code: types.CodeType) -> frozenset[str]:
    """The global variables that code reads."""
    return _named(code, "LOAD_GLOBAL", "LOAD_NAME")


def attributes_read(code: types.CodeType) -> frozenset[str]:
    """The names of attributes, of whatever object, that code reads."""
    return _named(code, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def attributes_bound(code: types.CodeType) -> frozenset[str]:
    """The names of attributes, of whatever object, that code binds."""
    return _named(code, "STORE_ATTR")


@functools.lru_cache(maxsize=_CODE_CACHE_SIZE)
def paths_read(code: types.CodeType) -> frozenset[Path]:
    """The paths that code reads, of one step or more. What it reads to change it in place, as a counter, is none."""
    first = code.co_varnames[0] if code.co_argcount else None
    chains, aliases = _chains(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for root, name, steps in paths_read(constant):
                if root == "global":
                    chains.append((root, name, steps))
                elif root == "free":  # a variable of this code, or of one around it
                    kind, name, known = aliases.get(name, ("variable", name, ()))
                    chains.append((kind, name, known + steps))
    found: set[Path] = set()
    for kind, name, steps in chains:
        if kind == "global":
            found.add(Path("global", name, steps))
        elif name == first:
            found.add(Path("self", name, steps))
        elif name in code.co_freevars:
            found.add(Path("free", name, steps))
    return frozenset(found)


def _chains(code: types.CodeType) -> tuple[list[Chain], dict[str, Chain]]:
    """Each variable that is read, with what is read of it at once; and local variables that stand for such a chain.

    Those are bound once, to it.
    """
    bound = collections.Counter(name for step in dis.get_instructions(code) for name in _stored(step))
    chains: list[Chain] = []
    aliases: dict[str, Chain] = {}
    kind, name, key = "", "", None
    steps: list[Step] = []
    awaits_key = False
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation in _NOTHING:
            continue
        if kind and awaits_key:
            awaits_key = False
            if operation == "BINARY_SUBSCR" or (operation == "BINARY_OP" and instruction.argrepr == "[]"):
                steps.append(Step(True, key))
                continue
        elif kind and operation in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(Step(False, value))
            continue
        elif kind and operation in ("LOAD_CONST", "LOAD_SMALL_INT"):
            awaits_key, key = True, value
            continue
        if kind and steps:
            chains.append((kind, name, tuple(steps)))
        stored = _stored(instruction)
        if kind and stored and bound[stored[0]] == 1:
            aliases[stored[0]] = kind, name, tuple(steps)
        kind, steps = "", []
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            kind, name = "global", value
        elif "LOAD_FAST" in operation or operation.startswith(("LOAD_DEREF", "LOAD_CLASSDEREF")):
            last = value[-1] if isinstance(value, tuple) else value  # some load two at once
            kind, name, known = aliases.get(last, ("variable", last, ()))
            steps = list(known)
    return chains, aliases  # the last instruction returns or raises, and reads nothing


def _stored(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables that an instruction binds."""
    value = instruction.argval
    if not instruction.opname.startswith(("STORE_FAST", "STORE_DEREF")):
        return ()
    if not isinstance(value, tuple):
        return (value,)
    return value[:1] if "LOAD_FAST" in instruction.opname else value


def is_library(name: str | None) -> bool:
    """Whether a module is torch's, graphsafe's, numpy's or Python's own."""
    top = (name or "").split(".")[0]
    return top in _LIBRARIES and top != "__main__"


def is_users(name: str | None) -> bool:
    """Whether a module is neither a library nor an installed package, whose classes and modules are not looked into."""
    module = sys.modules.get(name or "")
    return not is_library(name) and "-packages" not in (getattr(module, "__file__", None) or "")


_OPAQUE = (torch.Tensor, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class _Attributes:
    """An object's attributes, or those of a class, as a mapping. Runs no code of the user's."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        kind = type if isinstance(self._of, type) else object
        try:
            return kind.__getattribute__(self._of, name)
        except AttributeError:
            raise KeyError(name) from None


class Entries:
    """The entries of a dict or list whose class looks them up in its own way, as they lie there."""

    __slots__ = ("_kind", "_of")

    def __init__(self, of: Any) -> None:
        self._of: Any = of
        self._kind: Any = dict if isinstance(of, dict) else list

    def __getitem__(self, key: Any) -> Any:
        return self._kind.__getitem__(self._of, key)


def lookup_of(container: Any) -> Any:
    """What to look entries of a container up in without running code of the user's."""
    has_own_way = isinstance(container, dict | list) and not is_plain_container(container)
    return Entries(container) if has_own_way else container


def follow(start: Any, path: Path) -> list[Edge]:
    """The edges on a path that leads to a plain value; none where it does not, or leads through what sets numbers."""
    edges, end, left = _along(start, path)
    return edges if left is None and isinstance(end, VALUES) else []


def called_on(start: Any, path: Path) -> list[types.FunctionType]:
    """The method or property of a class that a path looks up, if it leads to one."""
    _, end, left = _along(start, path)
    if left is None or left.is_entry or _is_opaque(end):
        return []
    classes = end.__mro__ if isinstance(end, type) else type(end).__mro__
    member = next((vars(base)[left.key] for base in classes if left.key in vars(base)), None)
    function = function_of(member)
    return [function] if isinstance(function, types.FunctionType) else []


def function_of(member: Any) -> Any:
    """The function that a class's attribute stands for; the attribute itself where there is none."""
    if isinstance(member, property):
        member = member.fget
    return member.__func__ if isinstance(member, classmethod | staticmethod | types.MethodType) else member


def _along(start: Any, path: Path) -> tuple[list[Edge], Any, Step | None]:
    """The edges on a path as far as it can be followed, the object there, and the step that leads no further."""
    edges: list[Edge] = []
    for step in path.steps:
        is_flag = isinstance(start, torch.nn.Module) and step.key == "training"  # which is part of signatures
        look_up = _entry if step.is_entry else _attribute
        edge = None if is_flag or _is_opaque(start) else look_up(start, step.key)
        if edge is None:
            return edges, start, step
        edges.append(edge)
        start = edge[2]
    return edges, start, None


def _is_opaque(item: Any) -> bool:
    return isinstance(item, _OPAQUE) or (isinstance(item, types.ModuleType) and not is_users(item.__name__))


def _entry(item: Any, key: Any) -> Edge | None:
    if not is_plain_container(item):
        return None
    if isinstance(item, dict):
        return (item, key, item[key]) if key in item else None
    if isinstance(item, list | tuple) and isinstance(key, int) and -len(item) <= key < len(item):
        return item, key, item[key]
    return None


def is_plain_container(item: Any) -> bool:
    """Whether looking up an entry of a dict, list or tuple runs no code of the user's."""
    kinds = (kind for kind in (dict, list, tuple) if isinstance(item, kind))
    return any(type(item).__getitem__ is kind.__getitem__ for kind in kinds)


def _attribute(item: Any, name: str) -> Edge | None:
    fields = getattr(item, "__dict__", None)
    if not isinstance(item, type):
        tables = [fields] if isinstance(fields, dict) else []
        if isinstance(item, torch.nn.Module):
            tables += [item._parameters, item._buffers, item._modules]
        for table in tables:
            if name in table:
                return table, name, table[name]
    classes = item.__mro__ if isinstance(item, type) else type(item).__mro__
    for base in classes:
        if name in vars(base):
            member = vars(base)[name]
            is_slot = isinstance(member, types.MemberDescriptorType) and not isinstance(item, type)
            if hasattr(type(member), "__get__") and not is_slot:
                return None  # what it would give is code's to say
            try:
                return (attributes := _Attributes(item)), name, attributes[name]
            except KeyError:  # a slot that is not filled yet
                return None
    return None
