"""B9: a device-wide synchronize in one thread breaks another thread's capture, in any capture mode.

The repair has ``torch.cuda.synchronize`` and ``torch.accelerator.synchronize`` hold a shared seat on the device: they
wait for a running capture, and a capture waits for them. A thread that holds a seat, or captures itself, does not wait.
An error that comes out of them is told to the capture that it may have broken all the same.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from ._patches import Evidence, Patches
from .hooks import hooks

FAULT: Final = "B9"
MODULES: Final = ("torch.cuda", "torch.accelerator")
EVIDENCE: Final = Evidence(
    fault="a capture fails because another thread synchronised the device",
    reports=("NVIDIA/TensorRT#2888",),
    versions="all: CUDA's rule",
)

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """CUDA's rule, so every torch has the fault; false where ``module`` cannot synchronise."""
    return hasattr(module, "synchronize")


def repair(module: types.ModuleType) -> None:
    """Have ``module.synchronize`` run beside no capture of its device."""
    process = os.getpid()
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized

    @contextmanager
    def scope(device: Any = None) -> Iterator[None]:
        ours = os.getpid() == process and is_initialized()  # a forked child has none of our threads
        with hooks.seat_scope(_device_index(device)) if ours else nullcontext():
            try:
                yield
            except RuntimeError as error:
                hooks.saw_error(error)
                raise

    _patches.during_call(module.synchronize, scope)


def _device_index(device: Any) -> int | None:
    """The CUDA device that torch will take ``device`` for; None where torch will raise."""
    try:
        if device is None or (index := device if isinstance(device, int) else torch.device(device).index) is None:
            return torch.cuda.current_device()
        return index
    except (RuntimeError, TypeError):
        return None
