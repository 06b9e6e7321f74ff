"""Lets subprocesses import what the tests do, and keeps what tests do to the process from the next ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphsafe.repairs import device_guard, freed_guards
from graphsafe.repairs._patches import Patches

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture(autouse=True)
def nothing_is_noted_for_good() -> Iterator[None]:
    """Threads whose modes overlap leave flags of the process set (A18), and later tests would compile nothing."""
    yield
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None  # and overlapping forwards a model (A23)
    flags = vars(torch.utils._python_dispatch)
    flags.update({name: False for name, value in flags.items() if name.startswith("_is_in_") and value is True})


_guards_outlive_their_readers = Patches()  # of their own, which no uninstall() takes out


@pytest.fixture(autouse=True)
def no_guards_are_freed_in_use() -> None:
    """Keep threads from crashing where a test has them compile with plain torch in this process (A22)."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None and not _guards_outlive_their_readers._undo:
        freed_guards.keep_until_unread(_guards_outlive_their_readers, guards)


def pytest_configure() -> None:
    """Keep a torch that has A16 from crashing where a test compiles with plain torch in threads of this process."""
    if device_guard.probe(sys.modules["torch._subclasses.fake_tensor"]):
        device_guard._run_and_stay(torch._C._ensureCUDADeviceGuardSet)
        torch._C._ensureCUDADeviceGuardSet = lambda: None
