"""Step markers where backward would run on autograd's device threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsafe as gs
from tests.helpers import run_threads

pytestmark = pytest.mark.cuda


def test_backward_sees_the_counters_of_the_thread_that_called_it() -> None:
    import torch._inductor.cudagraph_trees as trees

    def work(index: int) -> list[tuple[int, int]]:
        with gs.thread_context("cuda"):  # confines backward to this thread
            return marks(index)

    def marks(index: int) -> list[tuple[int, int]]:
        seen = []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                seen.append((trees.MarkStepBox.mark_step_counter, trees.CUDAGraphTreeManager.get_curr_generation()))
                return grad

        for _ in range(5 * (index + 1)):
            gs.mark_step_begin()
            mine = (trees.MarkStepBox.mark_step_counter, trees.CUDAGraphTreeManager.get_curr_generation())
            Look.apply(torch.ones(1, device="cuda", requires_grad=True)).backward()
            assert seen.pop() == mine
        return [mine]

    gs.mark_step_begin()
    marks(0)  # without a context: on the device thread, which has the last marks, and these are this thread's
    assert len({str(counters) for counters in run_threads(4, work)}) == 4
