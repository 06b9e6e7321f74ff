"""Captures that fail on a GPU: what is blamed, what is shown of other threads, and that nothing is left."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe import cuda_errors, gate
from graphsafe.repairs import nested_backward

from ..test_capture_errors import Interrupts

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
DEADLINE_S = 60.0
STRIDE = 5  # between the places that are interrupted


@pytest.fixture(autouse=True)
def no_notes_of_other_tests() -> None:
    cuda_errors._notes.clear()


def synchronize_anyway() -> None:
    """What torch.cuda.synchronize does; install() does not know of it."""
    torch._C._cuda_synchronize()


def check_all_is_well(context: Any, earlier: gs.Graph, y: torch.Tensor) -> None:
    """The default generator is out of capture, the streams are as they were, and graphs old and new replay."""
    assert torch.cuda.current_stream() == context.stream and not torch.cuda.is_current_stream_capturing()
    assert gate.capturing() is None and gc.isenabled() and gate._held() == []
    torch.rand(2, device=DEVICE)  # fails where the generator is left in capture
    y.zero_()
    earlier.replay()
    with gs.capture() as graph:
        z = torch.nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5)
    graph.replay()
    assert set(z.tolist()) <= {0.0, 2.0} and y.tolist() == [2.0] * 8
    graph.reset()


def an_earlier_graph() -> tuple[gs.Graph, torch.Tensor]:
    x = torch.ones(8, device=DEVICE)
    with gs.capture() as graph:
        y = x * 2
    return graph, y


def test_capture_that_a_worker_broke_shows_its_error() -> None:
    gs.uninstall()
    inside, broke = threading.Event(), threading.Event()

    def synchronises() -> None:
        assert inside.wait(DEADLINE_S)
        try:
            torch.cuda.synchronize()
        finally:
            broke.set()

    worker = gs.spawn(synchronises, device=DEVICE, name="synchroniser")
    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            x = torch.ones(8, device=DEVICE)
            inside.set()
            assert broke.wait(DEADLINE_S)
            x * 2
        error = caught.value
        assert error.foreign and error.thread == threading.current_thread().name
        assert len(error.others) == 1 and "'synchroniser'" in error.others[0] and "captur" in error.others[0]
        check_all_is_well(context, earlier, y)
    with pytest.raises(RuntimeError, match="captur"):
        worker.result(DEADLINE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_capture_that_a_plain_thread_broke_shows_its_error_under_install() -> None:
    gs.install()
    inside, broke = threading.Event(), threading.Event()

    def synchronises() -> None:
        assert inside.wait(DEADLINE_S)
        try:
            synchronize_anyway()
        finally:
            broke.set()

    thread = threading.Thread(target=synchronises, name="plain")
    thread.start()
    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            torch.ones(8, device=DEVICE)
            inside.set()
            assert broke.wait(DEADLINE_S)
        assert caught.value.foreign and "'plain'" in caught.value.others[0]
        thread.join(DEADLINE_S)
        check_all_is_well(context, earlier, y)


def test_capture_with_unjoined_work_says_so_and_is_not_tried_again() -> None:
    side = torch.cuda.Stream(DEVICE)
    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        x = torch.ones(8, device=DEVICE)
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x * 2
        assert not caught.value.foreign and "wait_stream" in str(caught.value.cure)
        check_all_is_well(context, earlier, y)


def test_capture_that_swallowed_its_own_error_leaves_nothing() -> None:
    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        x = torch.ones(8, device=DEVICE)
        with pytest.raises(gs.CaptureError), gs.capture():
            try:
                x.sum().item()
            except RuntimeError:
                x * 3
        check_all_is_well(context, earlier, y)


def test_out_of_memory_inside_a_capture_passes_and_leaves_nothing() -> None:
    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError), gs.capture():
                kept = torch.ones(1 << 20, device=DEVICE)
                torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)
            kept = None
            check_all_is_well(context, earlier, y)
        assert kept is None and torch.cuda.memory_allocated() <= before + (1 << 20)


def test_interrupt_at_many_places_of_a_capture_leaves_nothing() -> None:
    x = torch.ones(64, device=DEVICE)

    def once() -> None:
        with gs.capture():
            torch.nn.functional.dropout(x, 0.5)

    with gs.thread_context(DEVICE, seed=1) as context:
        earlier, y = an_earlier_graph()
        once()
        with Interrupts() as counted:
            once()
        assert counted.count > 100
        for n in range(1, counted.count + 1, STRIDE):
            offset = context.generator.get_offset()
            interrupts = Interrupts(n)
            try:
                with interrupts:
                    once()
                    raise AssertionError(f"the interrupt at {interrupts.where} was lost")
            except KeyboardInterrupt:
                pass
            assert context.generator.get_offset() == offset, interrupts.where
            check_all_is_well(context, earlier, y)


def test_backward_nested_too_deep_inside_a_capture_is_refused() -> None:
    def nested(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return x * 1
        return checkpoint(nested, x, depth - 1, use_reentrant=True, preserve_rng_state=False)

    with gs.thread_context(DEVICE) as context:
        earlier, y = an_earlier_graph()
        x = torch.ones(8, device=DEVICE, requires_grad=True)
        nested(x, 3).sum().backward()
        with pytest.raises(gs.CaptureError, match="nested too deep"), gs.capture():
            nested(x, nested_backward.MAX_DEPTH + 1).sum().backward()
        x.grad = None
        check_all_is_well(context, earlier, y)
        with gs.capture() as graph:
            nested(x, 2).sum().backward()
        graph.replay()
        assert x.grad is not None and x.grad.tolist() == [1.0] * 8


def test_capture_in_inference_mode_replays_outside_of_it() -> None:
    x = torch.ones(1 << 10, device=DEVICE)
    with gs.thread_context(DEVICE, seed=5) as context:
        with torch.inference_mode(), gs.capture() as graph:
            y = torch.nn.functional.dropout(x, 0.5)
        found = []
        for _ in range(3):
            graph.replay()
            found.append(y.clone())
        context.generator.manual_seed(5)
        graph.replay()
        assert torch.equal(y, found[0]) and not torch.equal(found[0], found[1])
        with torch.inference_mode():
            graph.replay()
        assert torch.equal(y, found[1])
        torch.rand(2, device=DEVICE)


def test_graph_knows_the_bytes_that_its_capture_added() -> None:
    x = torch.ones(1 << 20, device=DEVICE)
    with gs.thread_context(DEVICE, name="bytes") as context:
        with gs.capture() as graph:
            y = x * 2
        graph.replay()
        row = next(c for c in gs.stats().contexts if c.alive and c.name == "bytes")
        assert y.numel() * 4 <= graph.num_bytes == row.graph_bytes == row.graphs[0].num_bytes
        assert (row.graphs[0].replays, row.graphs[0].pool_shared) == (1, False) and __file__ in row.graphs[0].name
        with gs.capture() as nothing:
            x.add_(1)
        assert nothing.num_bytes == 0
        assert context.counters.captures == 2


def test_graphs_of_a_shared_pool_add_up_to_its_bytes() -> None:
    module = torch.nn.Linear(512, 512).to(DEVICE)
    step = gs.TrainStep(lambda x: module(x).square().mean(), torch.optim.AdamW(module.parameters(), fused=True))
    with gs.thread_context(DEVICE, name="shared"):
        for num_rows in (64, 512):
            for _ in range(6):
                step(torch.ones(num_rows, 512, device=DEVICE))
        row = next(c for c in gs.stats().contexts if c.alive and c.name == "shared")
        assert len(row.graphs) == 2 and all(graph.pool_shared and graph.replays >= 1 for graph in row.graphs)
        assert sum(graph.num_bytes for graph in row.graphs) == row.graph_bytes > 0
