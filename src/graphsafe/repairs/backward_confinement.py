"""A3: a backward leaves the thread that called it.

Autograd runs what belongs to a GPU on a thread of its own, one a device for the whole process. There a gradient
checkpoint's recompute meets a lock that its own worker holds (an RLock's owner is the worker), compiled code runs with
the thread-locals and settings of no worker, and all threads' backwards share one set of recorded graphs.

The repair confines every backward to the thread that calls it, as a context does, the main thread's too. Numbers do not
change. A graph that spans several GPUs is launched by one thread instead of one a device.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch

from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A3"
MODULES: Final = ("torch.autograd.graph",)
EVIDENCE: Final = Evidence(
    fault="a hang with a lock around a step and gradient checkpointing: the recompute runs on another thread",
    reports=(),
    versions="all read, 2.9 to 2.15",
)
_ENTRY = "_engine_run_backward"

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether a backward leaves its thread unless told otherwise: torch's flag is on in a thread that set nothing."""
    entry = getattr(module, _ENTRY, None)
    return entry is None or "set_multithreading_enabled" not in entry.__code__.co_names


def repair(module: types.ModuleType) -> None:
    """Confine the one function through which every backward of Python's enters the engine."""
    if not hasattr(module, _ENTRY):
        raise RepairError(f"torch.autograd.graph has no {_ENTRY}")
    enabled: Callable[[], bool] = torch._C._is_multithreading_enabled
    enable: Callable[[bool], None] = torch._C._set_multithreading_enabled

    def make(original: types.FunctionType) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not enabled():  # a context, or an outer backward, has confined it
                return original(*args, **kwargs)
            enable(False)
            try:
                return original(*args, **kwargs)
            finally:
                enable(True)

        return run_backward

    _patches.body(getattr(module, _ENTRY), make)
