"""``reduce-overhead`` and the other modes of torch.compile from many threads, on GPUs."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import graphsafe
from graphsafe.repairs import tree_threads

from ..helpers import run_threads

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
NUM_THREADS = 8
STEPS = 200
SEGMENT_BYTES = 2 << 20
MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
FIRST = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    was_installed = bool(graphsafe.installed())
    graphsafe.install()
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    if not was_installed:
        graphsafe.uninstall()


def own_function(index: int) -> Callable[[Tensor], Tensor]:
    scale = 1.0 + index

    def function(x: Tensor) -> Tensor:
        return torch.sin(x) * scale + x.sum()

    own_code = function.__code__.replace(co_firstlineno=1000 + index)  # Dynamo keeps artefacts by the code object
    return types.FunctionType(own_code, globals(), function.__name__, None, function.__closure__)


def inputs(index: int, step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + step)
    return torch.randn(64, 64, generator=generator).to(device)


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(device)


def train(model: Any, parameters: list[Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """Forward and backward of a module that threads share, so that gradients are returned and not accumulated."""

    def step(x: Tensor) -> list[Tensor]:
        x = x.requires_grad_()
        return list(torch.autograd.grad(model(x).square().mean(), [x, *parameters]))

    return step


def results(step: Callable[[Tensor], Any], index: int, device: torch.device, steps: int = STEPS) -> list[list[Tensor]]:
    found = []
    for number in range(steps):
        graphsafe.mark_step_begin()
        out = step(inputs(index, number, device))
        found.append([t.clone() for t in (out if isinstance(out, list) else [out])])
    torch.cuda.current_stream(device).synchronize()
    return found


@pytest.mark.parametrize("contexts", [True, False], ids=["contexts", "plain"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["own", "shared", "module"])
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.two_gpus)])
def test_threads_get_one_threads_results_in_every_mode(kind: str, mode: str, num_devices: int, contexts: bool) -> None:
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    models = [network(device) for device in devices]
    shared = graphsafe.compile(own_function(0), mode=mode, dynamic=False)
    compiled = [graphsafe.compile(model, mode=mode, dynamic=False) for model in models]
    own = [graphsafe.compile(own_function(index), mode=mode, dynamic=False) for index in range(NUM_THREADS)]

    def step_of(index: int) -> Callable[[Tensor], Any]:
        if kind == "module":
            where = index % num_devices
            return train(compiled[where], list(models[where].parameters()))
        return shared if kind == "shared" else own[index]

    def body(index: int) -> list[list[Tensor]]:
        device = devices[index % num_devices]
        with graphsafe.thread_context(device) if contexts else torch.cuda.device(device):
            return results(step_of(index), index, device)

    threaded = run_threads(NUM_THREADS, body, DEADLINE_S)
    compiles = counters["stats"]["unique_graphs"]
    assert compiles == (NUM_THREADS if kind == "own" else num_devices)
    for index in range(NUM_THREADS):
        device = devices[index % num_devices]
        with torch.cuda.device(device):
            alone = results(step_of(index), index, device)
        for number, (got, want) in enumerate(zip(threaded[index], alone, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"thread {index}, step {number}"
    assert counters["stats"]["unique_graphs"] == compiles


@pytest.mark.parametrize("contexts", [True, False], ids=["contexts", "plain"])
def test_memory_of_a_threads_trees_is_back_after_it_ended(contexts: bool) -> None:
    step = graphsafe.compile(lambda x: (x @ x).relu() @ x, mode="reduce-overhead", dynamic=False)

    def body(_: int) -> None:
        with graphsafe.thread_context(FIRST) if contexts else nullcontext():
            for _step in range(6):
                graphsafe.mark_step_begin()
                step(torch.ones(2048, 2048, device=FIRST))
            torch.cuda.current_stream().synchronize()

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    body(0) if contexts else run_threads(1, body, DEADLINE_S)
    before = reserved()
    for _ in range(3):
        run_threads(4, body, DEADLINE_S)
    assert reserved() <= before + SEGMENT_BYTES


def test_a_returned_output_outlives_the_thread_that_recorded_it() -> None:
    step = graphsafe.compile(lambda x: x * 3 + 1, mode="reduce-overhead", dynamic=False)

    def body() -> Tensor:
        for _ in range(5):
            graphsafe.mark_step_begin()
            out = step(torch.full((1 << 20,), 5.0, device=FIRST))
        return out

    out = graphsafe.spawn(body, device=FIRST).result(DEADLINE_S)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 20, device=FIRST) for _ in range(64)]
    torch.cuda.synchronize()
    assert bool((out == 16).all()) and len(others) == 64


def test_dropout_masks_of_threads_are_those_of_their_solo_runs() -> None:
    step = graphsafe.compile(lambda x: torch.nn.functional.dropout(x, 0.5), mode="reduce-overhead", dynamic=False)
    ones = torch.ones(4096, device=FIRST)
    step(ones)

    def body(index: int) -> list[Tensor]:
        with graphsafe.thread_context(FIRST, seed=index):
            found = []
            for _ in range(30):
                graphsafe.mark_step_begin()
                found.append(step(ones).clone())
            torch.cuda.current_stream().synchronize()
            return found

    together = run_threads(4, body, DEADLINE_S)
    for index in range(4):
        (alone,) = run_threads(1, lambda _, index=index: body(index), DEADLINE_S)
        assert all(torch.equal(a, b) for a, b in zip(together[index], alone, strict=True))
        assert len({tuple(mask[:64].tolist()) for mask in alone}) == 30


def test_a_reduce_overhead_function_becomes_part_of_the_threads_own_capture() -> None:
    step = graphsafe.compile(lambda x: torch.sin(x) * 2, mode="reduce-overhead", dynamic=False)
    x = torch.zeros(128, device=FIRST)
    with graphsafe.thread_context(FIRST):
        for _ in range(4):
            graphsafe.mark_step_begin()
            step(x)
        with graphsafe.capture() as graph:
            out = step(x)
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            torch.testing.assert_close(out, torch.sin(x) * 2)
        graphsafe.current_context().synchronize()


def test_recordings_and_captures_of_threads_do_not_break_each_other() -> None:
    def body(index: int) -> None:
        step = graphsafe.compile(own_function(index), mode="reduce-overhead", dynamic=False)
        with graphsafe.thread_context(FIRST, seed=index):
            for size in range(1, 7):
                x = torch.ones(64 * size, device=FIRST)
                expected = torch.sin(x) * (1.0 + index) + x.sum()
                for _ in range(4):
                    graphsafe.mark_step_begin()
                    torch.testing.assert_close(step(x), expected)
                with graphsafe.capture() as graph:
                    y = torch.sin(x) * (1.0 + index) + x.sum()
                graph.replay()
                torch.testing.assert_close(y, expected)
                graph.reset()

    run_threads(4, body, DEADLINE_S)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_backward_may_be_called_from_another_thread_than_forward(mode: str) -> None:
    model = network(FIRST)
    compiled = graphsafe.compile(model, mode=mode, dynamic=False)
    parameters = list(model.parameters())

    def forward(step: int) -> tuple[Tensor, Tensor]:
        graphsafe.mark_step_begin()
        x = inputs(0, step, FIRST).requires_grad_()
        return x, compiled(x).square().mean()

    with graphsafe.Executor(1, device=FIRST) as pool:
        for step in range(20):
            x, loss = pool.submit(forward, step).result(DEADLINE_S)
            got = [t.clone() for t in torch.autograd.grad(loss, [x, *parameters])]
            again = inputs(0, step, FIRST).requires_grad_()
            want = torch.autograd.grad(model(again).square().mean(), [again, *parameters])
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


SHARED = """
import faulthandler, json, sys, threading
faulthandler.dump_traceback_later(150, exit=True)
import torch
if sys.argv[1] == "graphsafe":
    import graphsafe
    graphsafe.install()
f = torch.compile(lambda x: torch.sin(x) * 2 + x.sum(), mode="reduce-overhead", dynamic=False)
bad, errors = [], []
if sys.argv[2] == "shared":  # recorded here before any other thread calls
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        f(torch.zeros(64, 64, device="cuda"))
barrier = threading.Barrier(2)
def body(index):
    try:
        for step in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.full((64, 64), float(100 * index + step), device="cuda")
            y = f(x)
            torch.cuda.current_stream().synchronize()
            barrier.wait(60)   # 1. both have called
            if not torch.allclose(y, torch.sin(x) * 2 + x.sum()):
                bad.append((index, step))
            barrier.wait(60)   # 2. both have looked
    except threading.BrokenBarrierError:
        pass
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")
        barrier.abort()
threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(2)]
for t in threads: t.start()
for t in threads: t.join(120)
print(json.dumps([bad, errors]), flush=True)
import os; os._exit(0)
"""


@pytest.mark.parametrize("case", ["shared", "first"])
def test_plain_torch_shows_the_fault_that_shared_recordings_have_and_graphsafe_does_not(case: str) -> None:
    """A4 (``first``: the first call is a worker's) and A5 (``shared``), each in a process of its own."""
    outcome = {}
    for who in ("plain", "graphsafe"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SHARED, who, case],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        outcome[who] = done.stdout.strip()
        assert who == "plain" or done.returncode == 0, done.stderr[-4000:]
    assert outcome["graphsafe"] == "[[], []]"
    graphsafe.uninstall()
    shows = tree_threads.raises_in_a_worker(importlib.import_module("torch._inductor.cudagraph_trees"))
    graphsafe.install()
    if shows:
        assert outcome["plain"] != "[[], []]", "plain torch has the fault, and this program did not see it"
