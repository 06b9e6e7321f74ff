"""Skips the tests and benchmarks whose devices are not there."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("two_gpus") is not None and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {num_gpus}"))
        elif item.get_closest_marker("cuda") is not None and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
