"""A16: a second thread's compile crashes a torch built for CUDA on a machine without a GPU.

What users see: a segmentation fault in ``FakeTensorMode.__enter__`` once a thread that compiled has ended.
Cause: where there is no device, every fake tensor mode has torch put an object of the calling thread in place of
CUDA's device guard, for the whole process; when that thread ends, the next one reads freed memory.

The repair does that once, in a thread that ends with the process alone.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from ._patches import Evidence, Patches

FAULT: Final = "A16"
MODULES: Final = ("torch._subclasses.fake_tensor",)
EVIDENCE: Final = Evidence(
    fault="without a GPU, a crash when a thread compiles after one that compiled has ended",
    reports=(),
    versions="2.11 built for CUDA, measured; not 2.14.1",
)
_NAME = "_ensureCUDADeviceGuardSet"

_patches = Patches()
undo = _patches.undo


def probe(module: types.ModuleType) -> bool:
    """Whether torch replaces the guard here: it was built for CUDA, and there is no device. (To see it is to crash.)"""
    return hasattr(torch._C, _NAME) and torch.backends.cuda.is_built() and not torch.cuda.is_available()


def repair(module: types.ModuleType) -> None:
    """Have torch replace its device guard once, with an object that stays."""
    original: Callable[[], Any] = getattr(torch._C, _NAME)
    once = threading.Lock()  # taken alone
    done: list[int] = []

    def ensure() -> None:
        if os.getpid() not in done:  # a forked child has none of our threads, but its parent's memory
            with once:
                if not done:
                    _run_and_stay(original)
                done.append(os.getpid())

    _patches.attribute(torch._C, _NAME, ensure)


def _run_and_stay(function: Callable[[], Any]) -> None:
    """Call ``function`` in a daemon thread that does not end."""
    called = threading.Event()

    def body() -> None:
        function()
        called.set()
        threading.Event().wait()

    threading.Thread(target=body, name="graphsafe-device-guard", daemon=True).start()
    called.wait()
