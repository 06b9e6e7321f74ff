"""Step markers: each thread's own, loading nothing of the compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import graphsafe as gs
from graphsafe.repairs import step_markers
from graphsafe.repairs._patches import RepairError
from tests.helpers import run_threads


@pytest.fixture
def trees() -> Iterator[ModuleType]:
    import torch._inductor.cudagraph_trees as module

    step_markers.undo()
    yield module
    step_markers.undo()


def marks_seen_by_main(module: ModuleType, mark: object) -> int:
    """How many steps this thread has begun after four others have begun five each."""
    before = module.MarkStepBox.mark_step_counter

    def five(index: int) -> None:
        for _ in range(5):
            mark()  # type: ignore[operator]

    run_threads(4, five)
    return before - module.MarkStepBox.mark_step_counter


def test_a_mark_ends_other_threads_steps_in_plain_torch(trees: ModuleType) -> None:
    assert marks_seen_by_main(trees, torch.compiler.cudagraph_mark_step_begin) == 20
    assert step_markers.probe(trees)


def test_mark_step_begin_is_this_threads_alone(trees: ModuleType) -> None:
    gs.mark_step_begin()  # repairs
    assert marks_seen_by_main(trees, gs.mark_step_begin) == 0
    assert marks_seen_by_main(trees, torch.compiler.cudagraph_mark_step_begin) == 0
    assert step_markers.probe(trees)  # torch's own code has the fault still


def test_each_thread_counts_its_own_marks(trees: ModuleType) -> None:
    gs.mark_step_begin()
    base = trees.MarkStepBox.__bases__[0].mark_step_counter

    def mark(index: int) -> int:
        for _ in range(index):
            gs.mark_step_begin()
        return base - trees.MarkStepBox.mark_step_counter

    assert run_threads(4, mark) == [0, 1, 2, 3]


def test_trees_see_the_threads_own_step(trees: ModuleType) -> None:
    generation = trees.CUDAGraphTreeManager.get_curr_generation
    gs.mark_step_begin()
    mine = generation()
    run_threads(2, lambda _: gs.mark_step_begin())
    assert generation() == mine
    gs.mark_step_begin()
    assert generation() != mine


def test_generations_are_per_thread_and_never_shared(trees: ModuleType) -> None:
    import torch._dynamo.mutation_guard as guard

    step_markers.repair(guard)
    guard.GenerationTracker.generation += 1
    mine = guard.GenerationTracker.generation

    def begin(index: int) -> list[int]:
        seen = []
        for _ in range(5):
            guard.GenerationTracker.generation += 1
            seen.append(guard.GenerationTracker.generation)
        return seen

    seen = run_threads(4, begin)
    assert guard.GenerationTracker.generation == mine
    everything = [generation for thread in seen for generation in thread]
    assert len(set(everything)) == len(everything) and mine not in everything
    assert trees.GenerationTracker is guard.GenerationTracker


def test_backward_in_autograd_sees_the_threads_own_counters(trees: ModuleType) -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(trees.MarkStepBox.mark_step_counter)
            return grad

    gs.mark_step_begin()
    Look.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [trees.MarkStepBox.mark_step_counter]


def test_undo_gives_torch_its_own_classes_back(trees: ModuleType) -> None:
    import torch._dynamo.mutation_guard as guard

    box, tracker = trees.MarkStepBox, guard.GenerationTracker
    gs.mark_step_begin()
    assert trees.MarkStepBox is not box and guard.GenerationTracker is not tracker
    count = trees.MarkStepBox.mark_step_counter
    step_markers.undo()
    assert trees.MarkStepBox is box and guard.GenerationTracker is tracker
    assert box.mark_step_counter == count


def test_counters_stay_per_thread_when_dynamo_is_reset(trees: ModuleType) -> None:
    import torch._dynamo

    gs.mark_step_begin()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert marks_seen_by_main(trees, torch.compiler.cudagraph_mark_step_begin) == 0


def test_step_marks_on_entry_alone(trees: ModuleType) -> None:
    gs.mark_step_begin()
    before = trees.MarkStepBox.mark_step_counter
    with gs.step():
        assert trees.MarkStepBox.mark_step_counter == before - 1
    assert trees.MarkStepBox.mark_step_counter == before - 1


def test_steps_marks_after_each_item_arrives_and_before_the_body(trees: ModuleType) -> None:
    gs.mark_step_begin()
    before = trees.MarkStepBox.mark_step_counter
    at_arrival = []

    def items() -> Iterator[int]:
        for i in range(3):
            at_arrival.append(before - trees.MarkStepBox.mark_step_counter)
            yield i

    in_body = [before - trees.MarkStepBox.mark_step_counter for _ in gs.steps(items())]
    assert at_arrival == [0, 1, 2] and in_body == [1, 2, 3]


def test_marking_loads_no_compiler_and_counts_once_it_is_loaded() -> None:
    program = """
import sys, torch
from graphsafe.steps import mark_step_begin
mark_step_begin(); mark_step_begin()
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
import torch._inductor.cudagraph_trees as trees
assert trees.MarkStepBox.mark_step_counter == -2
mark_step_begin()
assert trees.MarkStepBox.mark_step_counter == -3
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_mark_step_begin_is_a_no_op_where_torch_lacks_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ModuleType(step_markers.TREES)
    monkeypatch.setitem(sys.modules, step_markers.TREES, bare)
    monkeypatch.setattr(step_markers, "_originals", {})
    gs.mark_step_begin()
    with pytest.raises(RepairError, match="MarkStepBox"):
        step_markers.repair(bare)
