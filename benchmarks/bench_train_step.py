"""A whole training step beside a plain eager loop: TrainStep's eager mode, its graph, and several threads at once.

Without a GPU the graph's replay runs the function again, so there it shows the overhead, not the gain. Threads: each
trains a model of its own once its warm-up is over, TrainStep in workers against the plain loop in bare threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare, same_numbers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []
WIDTH, DEPTH, BATCH = 256, 8, 64
NUM_CHECKED_STEPS, NUM_THREAD_STEPS = 12, 8
CONFIG = {
    "device": DEVICE,
    "model": f"{DEPTH} layers of width {WIDTH}, float32, {BATCH} rows",
    "optimizer": "AdamW, fused",
}


def make_step(how: str) -> Callable[[], torch.Tensor]:
    """One step on one batch: the same weights and batch each time."""
    generator = torch.Generator().manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.06, 0.06, generator=generator)
    model = model.to(DEVICE)
    x = torch.randn(BATCH, WIDTH, generator=generator).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    if how != "plain":
        step = gs.TrainStep(loss_fn, optimizer, model=model, mode="graph" if how == "graph" else "eager")
        return lambda: step(x)

    def plain() -> torch.Tensor:
        loss = loss_fn(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return plain


def losses_of(step: Callable[[], torch.Tensor], num_steps: int) -> list[float]:
    return [step().item() for _ in range(num_steps)]


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_training_step_in_one_thread(benchmark: Any, how: str) -> None:
    with gs.thread_context(DEVICE, seed=0) as context:

        def check() -> str:
            same_numbers(losses_of(make_step(how), NUM_CHECKED_STEPS), losses_of(make_step("plain"), NUM_CHECKED_STEPS))
            return f"the losses of {NUM_CHECKED_STEPS} steps equal bit for bit"

        ours, plain = make_step(how), make_step("plain")
        for _ in range(8):
            ours()
        sides = {f"TrainStep(mode='{how}')": ours, "a plain loop": plain}
        compare(benchmark, sides, config=CONFIG, check=check, after=context.synchronize, max_calls=16)


class Team:
    """Threads that own a step each, warmed up, and run a few of them at once whenever they are told to."""

    def __init__(self, how: str, num_threads: int) -> None:
        self.how = how
        self.barrier = threading.Barrier(num_threads + 1, timeout=60)
        self.losses: list[list[float]] = [[] for _ in range(num_threads)]
        self.ended = False

    def body(self, i: int) -> None:
        try:
            step = make_step(self.how)
            losses_of(step, NUM_CHECKED_STEPS)
            self.barrier.wait()
            while True:
                self.barrier.wait()
                if self.ended:
                    return
                self.losses[i] = losses_of(step, NUM_THREAD_STEPS)
                self.barrier.wait()
        except BaseException:
            self.barrier.abort()
            raise

    def run(self) -> list[list[float]]:
        self.barrier.wait()
        self.barrier.wait()
        return self.losses

    def end(self) -> None:
        self.ended = True
        self.barrier.wait()


@pytest.mark.parametrize("num_threads", [2, 4])
def test_training_in_threads(benchmark: Any, num_threads: int) -> None:
    workers, bare = Team("eager", num_threads), Team("plain", num_threads)
    threads = [threading.Thread(target=bare.body, args=(i,), daemon=True) for i in range(num_threads)]
    with gs.WorkerGroup(timeout=60.0) as group:
        for i in range(num_threads):
            group.spawn(workers.body, i, device=DEVICE, seed=i)
            threads[i].start()
        for team in (workers, bare):
            team.barrier.wait()
        config = {**CONFIG, "threads": num_threads, "work": f"{NUM_THREAD_STEPS} steps a thread, each waited for"}
        compare(benchmark, {"TrainStep in workers": workers.run, "a plain loop in threads": bare.run}, config=config)
        for team in (workers, bare):
            team.end()
    for thread in threads:
        thread.join(60)
