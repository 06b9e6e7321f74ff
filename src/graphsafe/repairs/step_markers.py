"""A6: step markers and generations are one for the process.

What users see: another thread's step ends mine, so that outputs are overwritten early, or steps never end.
Cause: ``MarkStepBox.mark_step_counter`` and ``GenerationTracker.generation`` are one for the process, and unlocked.
Repair: both attributes are kept for each thread. A backward that a context confines sees its thread's own; on a device
thread of autograd's, which counts nothing itself, torch's rule stays: the last value that any thread counted. (Torch's
thread-local store would carry them there, but what lies in it when the process ends can abort it.)

Guarantees:
- Importing this module, and marking, import neither torch._dynamo nor torch._inductor.
- A mark made before torch's modules are loaded counts once they are.
- Torch's names stay readable, and read the calling thread's value.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
import types
from typing import Any, Final

import torch

from ._import_hook import ImportHook
from ._patches import Evidence, RepairError, in_another_thread

TREES: Final = "torch._inductor.cudagraph_trees"
MUTATION_GUARD: Final = "torch._dynamo.mutation_guard"

FAULT: Final = "A6"
MODULES: Final = (TREES, MUTATION_GUARD)
EVIDENCE: Final = Evidence(
    fault="another thread's step ends mine: outputs are overwritten early, or steps never end",
    reports=(),
    versions="2.13, 2.14.1 and 2.15.0, measured",
)
_lock = threading.Lock()  # guards the three below; taken under the registry's lock or alone
_originals: dict[str, tuple[Any, Any]] = {}  # name -> (torch's object, ours)
_hook: list[ImportHook] = []  # waits for torch's modules, once a mark came before them
_generations = itertools.count(1)  # every generation of any thread is a number of its own


class _Counters(threading.local):
    """What one thread has counted; None: nothing yet."""

    def __init__(self) -> None:
        self.mark: int | None = None
        self.generation: int | None = None


_counters = _Counters()
_latest: dict[str, int] = {}  # the last value that any Python thread counted


def _value(mine: int | None, name: str, base: int) -> int:
    """The calling thread's value; in a device thread of autograd, which counts nothing itself, the last one counted."""
    if mine is not None:
        return mine
    ident = threading.get_ident()
    started_by_python = any(thread.ident == ident for thread in threading.enumerate())
    return base if started_by_python else _latest.get(name, base)


def _make_box(original: type) -> type:
    base = int(original.__dict__["mark_step_counter"])

    class PerThreadMark(type):
        @property
        def mark_step_counter(cls) -> int:
            return _value(_counters.mark, "mark", base)

        @mark_step_counter.setter
        def mark_step_counter(cls, value: int) -> None:
            _counters.mark = _latest["mark"] = value

    return PerThreadMark(original.__name__, (original,), {"__module__": original.__module__})


def _make_tracker(original: Any) -> Any:
    """Of torch's class, whose attribute counts, a class; of an object that newer torch has in its place, an object."""
    is_class = isinstance(original, type)
    base = int(original.__dict__["generation"] if is_class else original.generation)

    def get(_: object) -> int:
        return _value(_counters.generation, "generation", base)

    def put(_: object, value: int) -> None:
        # Modules are tagged with a generation, so two threads must never have the same one by accident.
        _counters.generation = _latest["generation"] = next(_generations) if value else 0

    counter = {"generation": property(get, put)}
    if is_class:
        metaclass = type("PerThreadGeneration", (type,), counter)
        return metaclass(original.__name__, (original,), {"__module__": original.__module__})
    kind: Any = type(type(original).__name__, (type(original),), {"__slots__": (), **counter})
    ours = object.__new__(kind)
    _hand_over(original, ours)
    return ours


def _hand_over(old: Any, new: Any) -> None:
    """Have ``new`` know the modules that ``old`` knows, where each is an object."""
    if not isinstance(old, type):
        for name in _TABLES:
            setattr(new, name, getattr(old, name))


_TABLES: Final = ("dynamic_classes", "generation_values")
_MAKERS = {"MarkStepBox": (TREES, _make_box), "GenerationTracker": (MUTATION_GUARD, _make_tracker)}


def probe(module: types.ModuleType) -> bool:
    """Whether torch itself lets one thread see what another counts. No thread's step ends: marks go to a copy."""
    if module.__name__ == MUTATION_GUARD:
        tracker = vars(module)["GenerationTracker"]
        if any(tracker is ours for _, ours in _originals.values()):
            return True
        return isinstance(vars(tracker)["generation"] if isinstance(tracker, type) else tracker.generation, int)
    box = type("MarkStepBox", (), {"mark_step_counter": 0})
    mark = types.FunctionType(module.mark_step_begin.__code__, {**vars(module), "MarkStepBox": box})
    in_another_thread(mark)
    return bool(vars(box)["mark_step_counter"])


def repair(module: types.ModuleType) -> None:
    """Keep the module's counter for each thread. Idempotent.

    Raises:
        RepairError: the module's internals have moved.
    """
    global _generations
    name, make = next((name, make) for name, (home, make) in _MAKERS.items() if home == module.__name__)
    with _lock:
        if name in _originals:
            return
        original = getattr(module, name, None)
        if original is None:
            raise RepairError(f"{module.__name__} has no {name}")
        try:
            ours = make(original)
        except (AttributeError, KeyError, TypeError) as exc:
            raise RepairError(f"{module.__name__}.{name} does not count as it did") from exc
        if name == "GenerationTracker":
            _generations = itertools.count(int(original.generation) + 1)
        _originals[name] = (original, ours)
        _replace(name, original, ours)


def undo() -> None:
    """Give torch its process-wide counters back, going on from this thread's values."""
    with _lock:
        while _hook:
            sys.meta_path.remove(_hook.pop())
        for name, attribute in (("MarkStepBox", "mark_step_counter"), ("GenerationTracker", "generation")):
            if name not in _originals:
                continue
            original, ours = _originals.pop(name)
            _hand_over(ours, original)
            setattr(original, attribute, getattr(ours, attribute) if name == "MarkStepBox" else next(_generations))
            _replace(name, ours, original)


def mark_step_begin() -> None:
    """Mark that the calling thread begins a step; see ``graphsafe.mark_step_begin``."""
    trees: Any = sys.modules.get(TREES)
    if trees is None and MUTATION_GUARD in sys.modules and torch.cuda.is_available():
        trees = importlib.import_module(TREES)  # Dynamo is here, so a compiled step may follow, and must see this mark
    mark = getattr(trees, "mark_step_begin", None)
    if mark is not None:
        if "MarkStepBox" not in _originals:
            for module in filter(None, map(sys.modules.get, MODULES)):
                _imported(module)
        mark()
        return
    if not _hook and trees is None:  # the first compile may come inside this step
        with _lock:
            if not _hook:
                _hook.append(ImportHook(frozenset(MODULES), _imported))
                sys.meta_path.insert(0, _hook[0])
    _counters.mark = (_counters.mark or 0) - 1


def _imported(module: types.ModuleType) -> None:
    with contextlib.suppress(RepairError):  # what has moved is for install() to warn of
        repair(module)


def _replace(name: str, old: Any, new: Any) -> None:
    """Put ``new`` wherever torch's compiler modules have ``old`` under its name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("torch._dynamo", "torch._inductor")) and module.__dict__.get(name) is old:
            setattr(module, name, new)
