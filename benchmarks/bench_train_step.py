"""A whole training step: a plain eager loop, TrainStep's eager mode, and its graph; from 1, 2 and 4 threads.

Without a GPU the graph's replay runs the function again, so there it shows the overhead, not the gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsafe as gs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_STEPS = 50
WIDTH, DEPTH, BATCH = 256, 8, 64


def make_step(how: str) -> tuple[Callable[[torch.Tensor], Any], torch.Tensor]:
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(BATCH, WIDTH).to(DEVICE)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    if how != "plain":
        return gs.TrainStep(loss_fn, optimizer, model=model, mode="graph" if how == "graph" else "eager"), x

    def plain(x: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return plain, x


def synchronize() -> None:
    if DEVICE == "cuda":
        gs.current_context().synchronize()


@pytest.mark.parametrize("how", ["plain", "eager", "graph"])
def test_training_step_in_one_thread(benchmark: Any, how: str) -> None:
    with gs.thread_context(DEVICE, seed=0):
        step, x = make_step(how)
        for _ in range(5):
            step(x)

        def steps() -> None:
            for _ in range(NUM_STEPS):
                step(x)
            synchronize()

        benchmark.extra_info["num_steps"] = NUM_STEPS
        benchmark.pedantic(steps, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_training_steps_of_threads_on_one_device(benchmark: Any, how: str, num_threads: int) -> None:
    def train() -> None:
        step, x = make_step(how)
        for _ in range(NUM_STEPS):
            step(x)
        synchronize()

    def everyone() -> None:
        with gs.WorkerGroup() as group:
            for i in range(num_threads):
                group.spawn(train, device=DEVICE, seed=i)

    benchmark.extra_info["num_steps"] = NUM_STEPS * num_threads
    benchmark.pedantic(everyone, rounds=3, warmup_rounds=1)
