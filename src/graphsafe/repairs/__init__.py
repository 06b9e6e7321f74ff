"""The repairs of torch's faults: one module for each, the list of them, and how they are put in and taken out.

A module of a repair has ``FAULT`` (its id), ``MODULES`` (the torch modules it changes) and four parts:
``probe(module)`` says whether this torch has the fault, ``repair(module)`` ends it, ``undo()`` puts everything back,
``EVIDENCE`` says where the fault is reported. Probe and repair are called once for each of ``MODULES``, as soon as that
one is imported.

Guarantees:
- ``apply()`` imports no torch module. What is not imported yet is repaired on its first import, by whichever thread.
- A repair that does not fit this torch costs a GraphsafeWarning that names the fault; the others work.
- ``undo()`` puts back every object, newest first, and the import hook goes.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Literal, Protocol, cast

from ..errors import GraphsafeWarning
from ._import_hook import ImportHook, imported_module
from ._patches import Evidence

Status = Literal["repaired", "absent", "pending", "failed"]


class Repair(Protocol):
    """What a module of a repair has."""

    FAULT: str
    MODULES: tuple[str, ...]
    EVIDENCE: Evidence

    def probe(self, module: types.ModuleType) -> bool: ...
    def repair(self, module: types.ModuleType) -> None: ...
    def undo(self) -> None: ...


_NAMES = (
    "fx_flag",
    "dispatch_modes",
    "graph_metadata",
    "fullgraph",
    "backward_confinement",
    "recompile_limit",
    "compile_confinement",
    "compile_scope",
    "dispatch_skip",
    "one_flight",
    "freed_guards",
    "active_ddp",
    "thread_ends",
    "inner_imports",
    "synchronize",
    "seeding",
    "thread_errors",
    "step_markers",
    "tree_threads",
    "tree_functions",
    "tree_captures",
    "device_guard",
    "device_sharing",
    "symbolic_trace",
    "autotuner",
)
# undone in reverse: two repairs wrap the same function
REPAIRS: tuple[Repair, ...] = tuple(
    cast(Repair, import_module(f".{name}", __name__))
    for name in _NAMES
    if importlib.util.find_spec(f".{name}", __name__) is not None
)


class _State:
    """What is put in: for each fault, how each of its modules fared."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the two below; first of graphsafe's locks, held over no import
        self.hook: ImportHook | None = None
        self.statuses: dict[str, dict[str, Status]] = {}


_state = _State()


def apply() -> None:
    """Put in every repair that this torch needs. Idempotent; any thread may call it.

    Raises nothing: what cannot be repaired is a GraphsafeWarning.
    """
    with _state.lock:
        if _state.hook is None:
            hook = ImportHook(frozenset(name for repair in REPAIRS for name in repair.MODULES), _imported)
            _state.statuses = {repair.FAULT: dict.fromkeys(repair.MODULES, "pending") for repair in REPAIRS}
            _state.hook = hook
            sys.meta_path.insert(0, hook)
        pending = {name for parts in _state.statuses.values() for name in parts if parts[name] == "pending"}
    for name in sorted(pending):  # the hook sees each import that begins from here on
        module = imported_module(name)
        if module is not None:
            _imported(module)


def undo() -> None:
    """Take out every repair, newest first. Compiles under way end as they began."""
    with _state.lock:
        if _state.hook is None:
            return
        sys.meta_path.remove(_state.hook)
        _state.hook = None
        _state.statuses = {}
        for repair in reversed(REPAIRS):
            repair.undo()


def statuses() -> Mapping[str, Status]:
    """For each fault ``"repaired"``, ``"absent"``, ``"pending"`` or ``"failed"``; empty where nothing is put in."""
    with _state.lock:
        return types.MappingProxyType({fault: _overall(parts) for fault, parts in _state.statuses.items()})


def _overall(parts: Mapping[str, Status]) -> Status:
    for status in ("failed", "pending", "repaired"):
        if status in parts.values():
            return status
    return "absent"


def _imported(module: types.ModuleType) -> None:
    """Repair ``module``, which is whole now, unless that is done."""
    with _state.lock:
        for repair in REPAIRS:
            parts = _state.statuses.get(repair.FAULT, {})
            if parts.get(module.__name__) == "pending":
                parts[module.__name__] = _repair(repair, module)


def _repair(repair: Repair, module: types.ModuleType) -> Status:
    try:
        if not repair.probe(module):
            return "absent"
        repair.repair(module)
    except Exception as error:
        warnings.warn(
            f"graphsafe could not repair fault {repair.FAULT} in this torch: {type(error).__name__}: {error}. Threads "
            f"may still see {repair.EVIDENCE.fault}. The other repairs work.",
            GraphsafeWarning,
            stacklevel=2,
        )
        return "failed"
    return "repaired"
