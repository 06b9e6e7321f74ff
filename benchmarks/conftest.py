"""What all benchmarks share: one thread for torch, the environment in the JSON, the JSON at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

FIGURES = pytest.StashKey[dict[str, Any]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


@pytest.fixture(autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """Host costs are measured, and more threads would fight over the cores of a small machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def figures_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what each benchmark recorded for the last line."""
    benchmark = request.getfixturevalue("benchmark") if "benchmark" in request.fixturenames else None
    yield
    if benchmark is not None and benchmark.extra_info:
        name = request.node.nodeid.rpartition("/")[2]
        request.config.stash[FIGURES][name] = dict(benchmark.extra_info)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line a comparison: both medians in us a call, and the ratio with its spread."""
    for name, figure in config.stash[FIGURES].items():
        if "ours_us" not in figure:
            continue
        beside, ratio = figure.get("other_us"), figure.get("ratio")
        line = f"{name:75} {figure['ours_us']['median']:12.2f} us "
        line += f"{beside['median']:12.2f} us" if beside else figure.get("other_outcome", "")
        line += f"   {ratio['median']:6.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})" if ratio else ""
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run is JSON: each benchmark's record, by name."""
    figures = config.stash.get(FIGURES, {})
    if figures:
        print(json.dumps(figures, default=str), file=sys.__stdout__, flush=True)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["torch"] = torch.__version__
    machine_info["num_cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine_info["load_average"] = [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else []
    if torch.cuda.is_available():
        machine_info["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        machine_info["cuda"] = torch.version.cuda
