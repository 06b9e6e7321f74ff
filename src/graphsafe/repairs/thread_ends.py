"""A24: a process aborts at its end, since a thread that compiled had ended just before.

What users see: 'terminate called without an active exception' and status 134, now and then, after all work is done.
Cause: the thread that first imports Inductor's graph trees keeps objects of Python's in a thread-local of C++, and lets
go of them after Python has declared the thread ended (``join`` returns before). For that it needs the interpreter's
lock; an interpreter that ends meanwhile has it exit in the middle of a destructor.

The repair has the interpreter wait, before it ends, until that thread is gone.
"""

from __future__ import annotations

import atexit
import threading
import time
import types
from pathlib import Path
from typing import Final

import torch

from ._patches import Evidence, Patches

FAULT: Final = "A24"
MODULES: Final = ("torch._inductor.cudagraph_trees",)
EVIDENCE: Final = Evidence(
    fault="'terminate called without an active exception' at the end of a process whose threads compiled",
    reports=(),
    versions="2.13.0, measured; 2.9 to 2.14 read",
)
_KEY: Final = "tree_manager_containers"
_TASKS: Final = Path("/proc/self/task")  # the threads of this process, where the system tells
_WAIT_S: Final = 2.0  # at most
_BLIND_WAIT_S: Final = 0.05  # where the system does not tell
_POLL_S: Final = 0.001

_patches = Patches()
undo = _patches.undo
_holders: set[int] = set()  # the system's names of the threads that hold the objects, or may


def probe(module: types.ModuleType) -> bool:
    """Whether importing ``module`` leaves objects to the thread. (To see it is to abort.)"""
    return hasattr(torch._C, "_stash_obj_in_tls")


def repair(module: types.ModuleType) -> None:
    """Wait for the thread that has imported ``module`` when the interpreter ends."""
    threads = [threading.current_thread()]
    if not torch._C._is_key_in_tls(_KEY):  # it was another one, before
        threads = threading.enumerate()
    main = threading.main_thread()
    _holders.update(one.native_id for one in threads if one is not main and one.native_id is not None)
    atexit.register(_wait)
    _patches.later(lambda: atexit.unregister(_wait))


def _wait() -> None:
    """Wait until the holders that Python has seen the end of are gone."""
    ended = _holders - {thread.native_id for thread in threading.enumerate()}
    if ended and not _TASKS.exists():
        time.sleep(_BLIND_WAIT_S)
    end_s = time.monotonic() + _WAIT_S
    while any((_TASKS / str(name)).exists() for name in ended) and time.monotonic() < end_s:
        time.sleep(_POLL_S)  # gives them the interpreter's lock
