"""B1: graph trees capture through ``torch.cuda.graph``, which synchronises the device and knows of no other capture.

What users see: "operation not permitted when stream is capturing", in either thread.

The repair has a tree's warm-ups and recordings hold the device's gate, with the thread's own generator in place of the
default one, so that each thread's recorded graphs draw from a state of their own. Replays hold nothing.

Newer torch has one lock for the recordings of all devices; the gate stands in for it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from ._patches import Evidence, Patches, RepairError
from .hooks import hooks

FAULT: Final = "B1"
MODULES: Final = ("torch._inductor.cudagraph_trees",)
EVIDENCE: Final = Evidence(
    fault="'operation not permitted when stream is capturing', in either of two threads that capture",
    reports=(),
    versions="all: CUDA's rule, and torch.cuda.graph's ways",
)
_RECORD = {"__init__": True, "record_function": True, "run_eager": False}  # whether the method captures

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Trees capture with ``torch.cuda.graph``, so every torch that has them has the fault."""
    return hasattr(module, "CUDAGraphTreeManager")


def repair(module: types.ModuleType) -> None:
    """Have the trees' warm-ups and recordings hold the gate: one thread at a time on a device."""
    manager = module.CUDAGraphTreeManager
    for name, capture in _RECORD.items():
        if name not in vars(manager):
            raise RepairError(f"CUDAGraphTreeManager has no method {name} of its own")
        _patches.attribute(manager, name, _recording(vars(manager)[name], capture))
    if hasattr(module, "graph_capture_lock"):
        _patches.attribute(module, "graph_capture_lock", nullcontext())


def _recording(original: Callable[..., Any], capture: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = getattr(self, "device_index", None)
        if index is None:  # __init__, which has it as its argument
            index = kwargs["device_index"] if "device_index" in kwargs else args[0]
        with hooks.recording_scope(index, capture):
            return original(self, *args, **kwargs)

    return call
