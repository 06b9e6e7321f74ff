"""Lets subprocesses import what the tests do, and keeps what tests do to the process from the next ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphsafe.repairs import device_guard

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture(autouse=True)
def no_dispatch_mode_is_noted_for_good() -> Iterator[None]:
    """Threads whose modes overlap leave flags of the process set (A18), and later tests would compile nothing."""
    yield
    flags = vars(torch.utils._python_dispatch)
    flags.update({name: False for name, value in flags.items() if name.startswith("_is_in_") and value is True})


def pytest_configure() -> None:
    """Keep a torch that has A16 from crashing where a test compiles with plain torch in threads of this process."""
    if device_guard.probe(sys.modules["torch._subclasses.fake_tensor"]):
        device_guard._run_and_stay(torch._C._ensureCUDADeviceGuardSet)
        torch._C._ensureCUDADeviceGuardSet = lambda: None
