"""The gate beside the standard library's lock: uncontended, and with threads that all want it.

The work in the block adds one to a tensor; that no addition is lost is the check. A shared seat lets threads work at
once, where a lock does not; an exclusive one is fair, first come, first served, where a lock is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare

NUM_STEPS = 200  # of each thread


def test_uncontended(benchmark: Any) -> None:
    with gs.thread_context("cpu", seed=0) as context:
        lock = threading.Lock()
        counts = {"seat": torch.zeros((), dtype=torch.int64), "lock": torch.zeros((), dtype=torch.int64)}

        def seat() -> torch.Tensor:
            with context.eager(rng=False):
                return counts["seat"].add_(1)

        def locked() -> torch.Tensor:
            with lock:
                return counts["lock"].add_(1)

        compare(
            benchmark,
            {"a shared seat": seat, "threading.Lock": locked},
            config={"threads": 1, "work": "add_(1) on one int64"},
        )


def count_together(num_threads: int, block: Callable[[], AbstractContextManager[Any]]) -> int:
    """Threads that start at once and each add one NUM_STEPS times, under the block; returns the sum."""
    total = torch.zeros((), dtype=torch.int64)
    together = threading.Barrier(num_threads)

    def body() -> None:
        together.wait(30)
        for _ in range(NUM_STEPS):
            with block():
                total.add_(1)

    with gs.WorkerGroup() as group:
        for i in range(num_threads):
            group.spawn(body, device="cpu", seed=i)
    return int(total)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_contended(benchmark: Any, num_threads: int) -> None:
    lock = threading.Lock()
    sides = {
        "exclusive seats": lambda: count_together(num_threads, lambda: gs.current_context().eager(rng=True)),
        "threading.Lock": lambda: count_together(num_threads, lambda: lock),
    }

    def check() -> str:
        for name, side in sides.items():
            assert side() == num_threads * NUM_STEPS, f"{name} lost additions"
        return f"both counted to {num_threads * NUM_STEPS}"

    config = {
        "threads": num_threads,
        "work": f"{NUM_STEPS} additions a thread, the workers' start and end included",
        "note": "an exclusive seat also swaps in the context's RNG",
    }
    compare(benchmark, sides, config=config, check=check)
