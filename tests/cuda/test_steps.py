"""Step markers where backward runs on autograd's device threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsafe as gs
from tests.helpers import run_threads

pytestmark = pytest.mark.cuda


def test_backward_on_a_device_thread_sees_the_counters_of_the_thread_that_called_it() -> None:
    import torch._inductor.cudagraph_trees as trees

    def work(index: int) -> list[tuple[int, int]]:
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
    assert len({str(counters) for counters in run_threads(4, work)}) == 4
