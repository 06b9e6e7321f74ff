"""Executor and attach() on a GPU: hand-over with long kernels, graphs that stay, memory that comes back."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch

import graphsafe as gs

from ..helpers import join_threads, run_threads

pytestmark = pytest.mark.cuda
DEADLINE_S = 240.0
LONG_CYCLES = 200_000_000  # about a tenth of a second
DEVICE = "cuda:0"
N = 1 << 20


def late_ones() -> torch.Tensor:
    """A tensor that is all ones only after a long kernel on the current stream."""
    x = torch.zeros(N, device=DEVICE)
    torch.cuda._sleep(LONG_CYCLES)
    x.fill_(1.0)
    return x


def together(executor: gs.Executor, n: int, fn: Any) -> list[Any]:
    barrier = threading.Barrier(n)

    def call() -> Any:
        barrier.wait(DEADLINE_S)
        return fn()

    return [future.result(DEADLINE_S) for future in [executor.submit(call) for _ in range(n)]]


@pytest.fixture(autouse=True)
def warm() -> None:
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize(DEVICE)


def test_attach_sets_device_and_stream_and_close_puts_them_back() -> None:
    def work(_: int) -> None:
        before = torch.cuda.current_stream(DEVICE)
        context = gs.attach(DEVICE)
        assert context.stream is not None and torch.cuda.current_stream(DEVICE) == context.stream != before
        assert gs.attach(DEVICE) is context and gs.attach() is context
        context.close()
        assert torch.cuda.current_stream(DEVICE) == before

    run_threads(4, work, DEADLINE_S)


@pytest.mark.two_gpus
def test_attached_contexts_of_two_gpus_become_current_and_close_in_any_order() -> None:
    def work(first_to_close: int) -> None:
        torch.cuda.set_device(1)
        contexts = [gs.attach("cuda:0"), gs.attach("cuda:1")]
        assert torch.cuda.current_device() == 1
        assert gs.attach("cuda:0") is contexts[0] and torch.cuda.current_device() == 0
        for context in contexts:
            assert torch.cuda.current_stream(context.device) == context.stream
        contexts[first_to_close].close()
        assert torch.cuda.current_device() == 1 - first_to_close
        assert torch.cuda.current_stream() == contexts[1 - first_to_close].stream
        contexts[1 - first_to_close].close()
        assert torch.cuda.current_device() == 1
        assert all(torch.cuda.current_stream(i) == torch.cuda.default_stream(i) for i in range(2))

    run_threads(2, work, DEADLINE_S)


def test_attached_context_waits_for_the_threads_own_stream_and_back() -> None:
    def work() -> None:
        x = late_ones()
        context = gs.attach(DEVICE)
        y = x + 1
        torch.cuda._sleep(LONG_CYCLES)
        y.add_(1)
        context.close()
        sums.append((y * 1).sum().item())

    sums: list[float] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    join_threads([thread], DEADLINE_S)
    assert sums == [3.0 * N]


@pytest.mark.parametrize("way", ["thread", "close"])
def test_attached_threads_memory_is_back_when_it_has_ended(way: str) -> None:
    def work() -> None:
        context = gs.attach(DEVICE)
        x = torch.ones(N, device=DEVICE)
        with gs.capture() as graph:
            y = (x + 1) * 2
        graph.replay()
        assert y.sum().item() == 4.0 * N
        if way == "close":
            context.close()

    def run_one() -> int:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        join_threads([thread], DEADLINE_S)
        gc.collect()
        torch.cuda.synchronize(DEVICE)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(DEVICE)

    run_one()
    before = run_one()
    assert [run_one() for _ in range(3)] == [before] * 3


def test_executor_call_waits_for_the_submitters_stream_and_the_asker_for_the_calls() -> None:
    side = torch.cuda.Stream(DEVICE)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.cuda._sleep(LONG_CYCLES)
        return y.mul_(2)

    with gs.Executor(2, DEVICE) as executor:
        for _ in range(3):
            with torch.cuda.stream(side):
                future = executor.submit(call, late_ones())  # nobody else keeps the argument
                junk = torch.full((N,), 7.0, device=DEVICE)  # would take its memory, were it free
            assert future.result(DEADLINE_S).sum().item() == 4.0 * N
            with torch.cuda.stream(side):
                assert future.result(DEADLINE_S).sum().item() == 4.0 * N
            del junk


def test_executor_result_keeps_its_memory_until_the_askers_stream_is_done() -> None:
    def call() -> torch.Tensor:
        return torch.ones(N, device=DEVICE)

    with gs.Executor(1, DEVICE) as executor:
        for _ in range(5):
            x = executor.submit(call).result(DEADLINE_S)
            torch.cuda._sleep(LONG_CYCLES)
            y = x * 3
            del x  # its memory belongs to the pool's stream
            executor.submit(lambda: torch.full((N,), 9.0, device=DEVICE)).result(DEADLINE_S)
            assert y.sum().item() == 3.0 * N


def test_executor_awaited_result_is_safe_on_the_loops_thread() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        found = []
        for _ in range(3):
            x = late_ones()
            y = await loop.run_in_executor(executor, lambda x=x: late_ones() + x)
            found.append((y * 2).sum().item())
        return found

    with gs.Executor(2, DEVICE) as executor:
        assert asyncio.run(main()) == [4.0 * N] * 3


def test_executor_threads_train_by_graphs_over_requests_as_one_thread_does() -> None:
    local = threading.local()

    def request(x: torch.Tensor) -> float:
        if not hasattr(local, "step"):
            generator = torch.Generator(DEVICE).manual_seed(1)
            weight = torch.randn(64, 64, device=DEVICE, generator=generator).requires_grad_()
            optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True, capturable=True)
            loss = lambda x: torch.nn.functional.dropout(x @ weight).square().mean()  # noqa: E731
            local.step, local.weight = gs.TrainStep(loss, optimizer), weight
        return local.step(x).item()

    x = torch.ones(8, 64, device=DEVICE)
    n = 4
    with gs.Executor(n, DEVICE, seed=5) as executor:
        seeds = dict(together(executor, n, lambda: (gs.current_context().name, gs.current_context().seed)))
        found: dict[str, list[float]] = {name: [] for name in seeds}
        for _ in range(10):
            for name, value in together(executor, n, lambda: (gs.current_context().name, request(x))):
                found[name].append(value)
        rows = [row for row in gs.stats().contexts if row.alive and row.name in seeds]
        assert [row.captures for row in rows] == [1] * n and all(row.replays == 7 for row in rows)
    for name, seed in seeds.items():
        local = threading.local()
        with gs.thread_context(DEVICE, seed=seed):
            assert [request(x) for _ in range(10)] == found[name]


def test_executor_threads_memory_is_back_after_shutdown() -> None:
    def request() -> None:
        x = torch.ones(N, device=DEVICE)
        with gs.capture() as graph:
            (x + 1) * 2
        graph.replay()
        kept.append(graph)

    def run_one() -> int:
        with gs.Executor(3, DEVICE) as executor:
            together(executor, 3, request)
        for graph in kept:
            with pytest.raises(gs.GraphsafeError):
                graph.replay()
        kept.clear()
        gc.collect()
        torch.cuda.synchronize(DEVICE)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(DEVICE)

    kept: list[gs.Graph] = []
    run_one()
    before = run_one()
    assert [run_one() for _ in range(3)] == [before] * 3


def test_executor_call_that_fails_in_a_capture_leaves_the_thread_well() -> None:
    def fails() -> None:
        with gs.capture():
            torch.ones(2, device=DEVICE).sum().item()

    def works() -> float:
        x = torch.ones(4, device=DEVICE)
        with gs.capture() as graph:
            y = x + 1
        graph.replay()
        return y.sum().item()

    with gs.Executor(1, DEVICE) as executor:
        for _ in range(3):
            with pytest.raises(gs.CaptureError):
                executor.submit(fails).result(DEADLINE_S)
            assert executor.submit(works).result(DEADLINE_S) == 8


def test_executor_call_is_back_on_the_pools_stream_whatever_the_last_one_left() -> None:
    def leave() -> None:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))

    def state() -> bool:
        return torch.cuda.current_stream() == gs.current_context().stream

    with gs.Executor(1, DEVICE) as executor:
        executor.submit(leave).result(DEADLINE_S)
        assert executor.submit(state).result(DEADLINE_S)
