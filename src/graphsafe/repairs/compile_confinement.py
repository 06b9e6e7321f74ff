"""A2: a compile waits for autograd's device thread, which waits for the compile.

A compile that calls autograd (flex_attention's, or any higher-order operator with a joint graph of its own) holds the
compile lock while it waits for the GPU's autograd thread, which all threads share. That thread may be in another
thread's backward, which compiles lazily and waits for the compile lock: all threads hang.

The repair turns autograd's device threads off in the compiling thread for the length of every compile, so that a thread
that holds the compile lock never waits for another one. The device thread may still wait for the compile lock: its
holder ends without it. A lazy backward that compiles on the device thread is confined in the same way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from ._compiles import wrap_lazy_backward
from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A2"
MODULES: Final = ("torch._dynamo.convert_frame", "torch._functorch._aot_autograd.runtime_wrappers")
EVIDENCE: Final = Evidence(
    fault="all threads hang at their first steps when they compile and train flex_attention",
    reports=(),
    versions="all read, 2.9 to 2.15",
)

_patches = Patches()
undo = _patches.undo


class _Confined:
    """Autograd runs in this thread alone; the former setting comes back even after an exception.

    No generator: a forked child would run its end for threads that it has not.
    """

    def __init__(self, _: str) -> None:
        self._before = torch._C._is_multithreading_enabled()

    def __enter__(self) -> None:
        try:
            torch._C._set_multithreading_enabled(False)
        except BaseException:  # an interrupt
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        torch._C._set_multithreading_enabled(self._before)


def probe(module: types.ModuleType) -> bool:
    """Whether compiles hold a lock while autograd's device threads may be on; false where torch confines itself."""
    if module.__name__ != MODULES[0]:
        return True
    entry = getattr(module, "CatchErrorsWrapper", None)
    confines = entry is not None and "set_multithreading_enabled" in entry.__call__.__code__.co_names
    return hasattr(module, "compile_lock") and not confines


def repair(module: types.ModuleType) -> None:
    """Confine Dynamo's entry to a compile, or the lazy backward's, whichever ``module`` holds."""
    if module.__name__ != MODULES[0]:
        wrap_lazy_backward(_patches, module, _Confined)
        return
    entry = getattr(module, "CatchErrorsWrapper", None)
    if entry is None:
        raise RepairError("torch._dynamo.convert_frame has no CatchErrorsWrapper")
    original: Callable[..., Any] = entry.__call__

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Confined("a frame"):
            return original(*args, **kwargs)

    _patches.attribute(entry, "__call__", call)
