"""What a call of a graphed function, or of a TrainStep, costs the host over the bare replay.

The bare call is one ``torch._foreach_copy_`` of the inputs and ``CUDAGraph.replay()`` of the same work, captured by
hand. Both are timed in turn in one process, a few calls at a time, so that the queue of the device never fills and only
the host is seen. The promise is at most 5 us over it with positional tensors and ``outputs="alias"``, and at most 25 us
with pytrees, keywords and copies. Without a GPU there is no replay: there it shows the cost over calling the function.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphsafe as gs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NUM_CALLS, NUM_ROUNDS = (64, 300) if CUDA else (16, 60)  # two launches a call: far from the queue's 1024
SHAPE = (32, 64)

needs_graphed = pytest.mark.skipif(not hasattr(gs, "graphed"), reason="this graphsafe has no graphed()")


def us_a_call(call: Callable[[Any], Any], batches: Sequence[Any]) -> float:
    """Host time of one call, each batch in turn; the device is idle before and after."""
    start = time.perf_counter()
    for batch in batches:
        call(batch)
    elapsed_s = time.perf_counter() - start
    if CUDA:
        gs.current_context().synchronize()
    return elapsed_s / len(batches) * 1e6


def compare(benchmark: Any, ours: Callable[[Any], Any], bare: Callable[[Any], Any], batches: Sequence[Any]) -> None:
    """Time both in turn; the medians and their difference are the benchmark's extra_info."""
    pairs = []
    for _ in range(NUM_ROUNDS):
        pairs.append((us_a_call(bare, batches), us_a_call(ours, batches)))
    bare_us, ours_us = (statistics.median(column) for column in zip(*pairs, strict=True))
    over = "over_bare_us" if CUDA else "over_function_us"
    benchmark.extra_info.update(device=DEVICE, bare_us=bare_us, call_us=ours_us)
    benchmark.extra_info[over] = ours_us - bare_us
    print(json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in benchmark.extra_info.items()}))
    benchmark.pedantic(us_a_call, args=(ours, batches), rounds=20)


def by_hand(body: Callable[[], Any], num_warmup_iters: int = 3) -> Callable[[], Any]:
    """A replay of ``body`` as torch alone captures it; on the CPU ``body`` itself."""
    for _ in range(num_warmup_iters):
        body()
    if not CUDA:
        return body
    stream = torch.cuda.current_stream()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph.replay


def settled(call: Callable[[Any], Any], batch: Any) -> Callable[[Any], Any]:
    """``call`` once its warm-up and capture are behind it."""
    for _ in range(8):
        call(batch)
    return call


@contextmanager
def context() -> Iterator[None]:
    with gs.thread_context(DEVICE, seed=0):
        yield


def tensors(number: int) -> list[torch.Tensor]:
    return [torch.randn(SHAPE).to(DEVICE) for _ in range(number)]


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


@needs_graphed
@pytest.mark.parametrize("inputs", ["the same", "fresh"])
def test_call_with_positional_tensors_and_aliases(benchmark: Any, inputs: str) -> None:
    with context(), torch.no_grad():
        first = tensors(2)
        batches = [first] * NUM_CALLS if inputs == "the same" else [tensors(2) for _ in range(NUM_CALLS)]
        graphed = gs.graphed(add, outputs="alias")
        ours = settled(lambda batch: graphed(*batch), first)
        static = tensors(2)
        replay = by_hand(lambda: add(*static))

        def bare(batch: list[torch.Tensor]) -> None:
            torch._foreach_copy_(static, batch)
            replay()

        compare(benchmark, ours, bare if CUDA else lambda batch: add(*batch), batches)


def combine(tree: dict[str, Any], *, scale: torch.Tensor, negative: bool) -> dict[str, Any]:
    x = tree["x"] * scale + tree["rest"][0]
    return {"sum": -x if negative else x, "rest": (x + tree["rest"][1], tree["x"] + 1)}


@needs_graphed
def test_call_with_pytrees_keywords_and_copies(benchmark: Any) -> None:
    with context(), torch.no_grad():
        batches = [tensors(4) for _ in range(NUM_CALLS)]
        graphed = gs.graphed(combine)

        def ours(batch: list[torch.Tensor]) -> Any:
            x, y, z, scale = batch
            return graphed({"x": x, "rest": [y, z]}, scale=scale, negative=True)

        def plain(batch: list[torch.Tensor]) -> Any:
            x, y, z, scale = batch
            return combine({"x": x, "rest": [y, z]}, scale=scale, negative=True)

        static = tensors(4)
        replay = by_hand(lambda: plain(static))

        def bare(batch: list[torch.Tensor]) -> None:
            torch._foreach_copy_(static, batch)
            replay()

        compare(benchmark, settled(ours, batches[0]), bare if CUDA else plain, batches)


def make_training(num_layers: int) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(SHAPE[1], SHAPE[1]), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=CUDA)
    return lambda x, y: (model(x) - y).square().mean(), optimizer


@pytest.mark.parametrize("num_layers", [2, 24])
@pytest.mark.parametrize("outputs", ["alias", "copy"])
def test_train_step_over_replay(benchmark: Any, outputs: Any, num_layers: int) -> None:
    with context():
        batches = [tensors(2) for _ in range(NUM_CALLS)]
        step = gs.TrainStep(*make_training(num_layers), outputs=outputs)
        ours = settled(lambda batch: step(*batch), batches[0])
        loss_fn, optimizer = make_training(num_layers)
        static = tensors(2)

        def body() -> None:
            loss_fn(*static).backward()
            optimizer.step()
            optimizer.zero_grad()

        replay = by_hand(body)

        def bare(batch: list[torch.Tensor]) -> None:
            torch._foreach_copy_(static, batch)
            replay()

        benchmark.extra_info.update(num_layers=num_layers, outputs=outputs)
        compare(benchmark, ours, bare, batches)
