"""What a context costs: to enter and leave one, to be in one, and its eager seat.

The other side does the same work without graphsafe, so the difference (`more_us`) is the cost of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare

SHAPE = (64, 64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []
CONFIG = {"device": DEVICE, "work": f"x * 2 + 1, float32 {SHAPE}"}


def make_work() -> Callable[[], torch.Tensor]:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return lambda: x * 2 + 1


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_enter_and_leave(benchmark: Any) -> None:
    work = make_work()

    def ours() -> torch.Tensor:
        with gs.thread_context(DEVICE, seed=0):
            return work()

    sides = {"with thread_context(): work()": ours, "work()": work}
    compare(benchmark, sides, config=CONFIG, after=synchronize, max_calls=256)


def test_work_in_a_context(benchmark: Any) -> None:
    """Being in a context costs nothing; the ratio is 1 but for noise."""
    work = make_work()
    with ExitStack() as stack:

        def enter() -> None:
            stack.close()
            stack.enter_context(gs.thread_context(DEVICE, seed=0))

        sides = {"work(), in a context": work, "work(), in none": work}
        before = dict(zip(sides, (enter, stack.close), strict=True))
        compare(benchmark, sides, config=CONFIG, before=before, after=synchronize, max_calls=256)


@pytest.mark.parametrize("rng", [False, True], ids=["shared", "exclusive"])
def test_eager_seat(benchmark: Any, rng: bool) -> None:
    work = make_work()
    with gs.thread_context(DEVICE, seed=0) as context:

        def ours() -> torch.Tensor:
            with context.eager(rng=rng):
                return work()

        sides = {f"with eager(rng={rng}): work()": ours, "work()": work}
        compare(benchmark, sides, config=CONFIG, after=synchronize, max_calls=256)
