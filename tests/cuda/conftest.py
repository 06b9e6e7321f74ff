"""Every test of this folder carries the mark ``cuda`` and leaves no work behind on any device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def devices_idle_afterwards() -> Iterator[None]:
    """A kernel that fails late fails the test that launched it."""
    yield
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


@pytest.fixture
def fresh_compiles() -> Iterator[None]:
    """Nothing compiled before counts, and float32 is no TF32."""
    torch.compiler.reset()
    former = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = former
