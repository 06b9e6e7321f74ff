"""B18: seeding in one thread during another's capture seeds the capture's own state, and the caller's seed is lost.

A capture, and an eager step that draws, swap the default generator's state for their own. Whoever seeds, sets or reads
the default generator meanwhile reaches the wrong state. That includes Dynamo, which saves and puts back the RNG state
around each compile.

The repair has each of these functions run in a scope in which no other thread's generator stands in for the default
one. A thread that holds a seat, or captures itself, reaches its own and does not wait.
"""

from __future__ import annotations

import os
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from ._patches import Evidence, Patches
from .hooks import hooks

FAULT: Final = "B18"
MODULES: Final = ("torch.random", "torch.cuda.random")
EVIDENCE: Final = Evidence(
    fault="a graph replays with the wrong seed, and the caller's own seeding is lost",
    reports=(),
    versions="all read, 2.9 to 2.15",
)
FUNCTIONS: Final = {
    "torch.random": ("manual_seed", "seed", "set_rng_state", "get_rng_state"),
    "torch.cuda.random": ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "get_rng_state"),
}

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """A capture swaps the state of the default generators, so every torch whose functions reach them has the fault."""
    return any(hasattr(module, name) for name in FUNCTIONS[module.__name__])


def repair(module: types.ModuleType) -> None:
    """Have each function of ``module`` run where the default generator is the default one."""
    process = os.getpid()

    def scope(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        # A forked child, such as a data loader's worker, has none of our threads.
        return hooks.seat_scope(None) if os.getpid() == process else nullcontext()

    for name in FUNCTIONS[module.__name__]:
        if hasattr(module, name):
            _patches.during_call(getattr(module, name), scope)
