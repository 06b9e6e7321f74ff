"""What a call of a graphed function, or of a TrainStep, costs the host over the bare replay.

The bare call is one ``torch._foreach_copy_`` of the inputs and ``CUDAGraph.replay()`` of the same work, captured by
hand. A few calls at a time, so that the queue of the device never fills and only the host is seen. The promise is at
most 5 us over it with positional tensors and ``outputs="alias"``, and at most 25 us with pytrees, keywords and copies.
Without a GPU there is no replay, and calls run the function: there it is the cost over the plain call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare, same_numbers

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.cuda] if CUDA else []
OTHER = "copies and replay() by hand" if CUDA else "the plain call"
MAX_CALLS = 64  # two launches a call: far from the queue's 1024
SHAPE = (32, 64)
NUM_CHECKED_STEPS = 12


def by_hand(body: Callable[[], Any], num_warmup_iters: int = 3) -> tuple[Callable[[], Any], Any]:
    """A replay of ``body`` as torch alone captures it, and its outputs."""
    for _ in range(num_warmup_iters):
        body()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        outputs = body()
    return graph.replay, outputs


def bare_call(
    function: Callable[[list[torch.Tensor]], Any], first: list[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Any]:
    """The other side: copies and a replay on a GPU; else the function."""
    if not CUDA:
        return function
    static = [x.clone() for x in first]
    replay, outputs = by_hand(lambda: function(static))

    def bare(batch: list[torch.Tensor]) -> Any:
        torch._foreach_copy_(static, batch)
        replay()
        return outputs

    return bare


def settled(call: Callable[[Any], Any], batch: Any) -> Callable[[Any], Any]:
    """``call`` once its warm-up and capture are behind it."""
    for _ in range(8):
        call(batch)
    return call


def compare_calls(
    benchmark: Any,
    name: str,
    ours: Callable[[Any], Any],
    bare: Callable[[Any], Any],
    batches: Sequence[Any],
    config: Mapping[str, Any],
    check: Callable[[], str] | None = None,
) -> None:
    """Time both over the batches, each in turn."""
    for_ours, for_bare = itertools.cycle(batches), itertools.cycle(batches)
    compare(
        benchmark,
        {name: lambda: ours(next(for_ours)), OTHER: lambda: bare(next(for_bare))},
        config={"device": DEVICE, "float32": SHAPE, **config},
        check=check,
        after=gs.current_context().synchronize,
        max_calls=MAX_CALLS,
    )


def tensors(number: int) -> list[torch.Tensor]:
    return [torch.randn(SHAPE).to(DEVICE) for _ in range(number)]


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


@pytest.mark.parametrize("inputs", ["the same", "fresh"])
def test_call_with_positional_tensors_and_aliases(benchmark: Any, inputs: str) -> None:
    with gs.thread_context(DEVICE, seed=0), torch.no_grad():
        batches = [tensors(2) for _ in range(1 if inputs == "the same" else MAX_CALLS)]
        graphed = gs.graphed(add, outputs="alias")
        ours = settled(lambda batch: graphed(*batch), batches[0])
        bare = bare_call(lambda batch: add(*batch), batches[0])
        config = {"function": "x * 2 + y", "inputs": f"2 tensors, {inputs}"}
        compare_calls(benchmark, "graphed(outputs='alias')", ours, bare, batches, config)


def combine(tree: dict[str, Any], *, scale: torch.Tensor, negative: bool) -> dict[str, Any]:
    x = tree["x"] * scale + tree["rest"][0]
    return {"sum": -x if negative else x, "rest": (x + tree["rest"][1], tree["x"] + 1)}


def test_call_with_pytrees_keywords_and_copies(benchmark: Any) -> None:
    with gs.thread_context(DEVICE, seed=0), torch.no_grad():
        batches = [tensors(4) for _ in range(MAX_CALLS)]
        graphed = gs.graphed(combine)

        def call(function: Callable[..., Any], batch: list[torch.Tensor]) -> Any:
            x, y, z, scale = batch
            return function({"x": x, "rest": [y, z]}, scale=scale, negative=True)

        ours = settled(lambda batch: call(graphed, batch), batches[0])
        bare = bare_call(lambda batch: call(combine, batch), batches[0])
        config = {"function": "5 operations", "inputs": "4 tensors in a pytree and a keyword, 3 outputs"}
        compare_calls(benchmark, "graphed()", ours, bare, batches, config)


def make_training(num_layers: int) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """A loss and its optimizer; the same weights each time."""
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(SHAPE[1], SHAPE[1]), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=CUDA)
    return lambda x, y: (model(x) - y).square().mean(), optimizer


def plain_step(loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.Tensor]:
    def step(batch: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = loss_fn(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("num_layers", [2, 24])
@pytest.mark.parametrize("outputs", ["alias", "copy"])
def test_train_step_over_replay(benchmark: Any, outputs: Any, num_layers: int) -> None:
    with gs.thread_context(DEVICE, seed=0):
        batches = [tensors(2) for _ in range(MAX_CALLS)]

        def check() -> str:
            """From the same weights, over the warm-up, the capture and replays."""
            step, plain = gs.TrainStep(*make_training(num_layers)), plain_step(*make_training(num_layers))
            losses = [(step(*batch).item(), plain(batch).item()) for batch in batches[:NUM_CHECKED_STEPS]]
            same_numbers(*zip(*losses, strict=True))
            return f"the losses of {NUM_CHECKED_STEPS} steps equal bit for bit"

        step = gs.TrainStep(*make_training(num_layers), outputs=outputs)
        ours = settled(lambda batch: step(*batch), batches[0])
        bare = bare_call(plain_step(*make_training(num_layers)), batches[0])
        config = {"layers": num_layers, "optimizer": "AdamW, fused"}
        compare_calls(benchmark, f"TrainStep(outputs='{outputs}')", ours, bare, batches, config, check)
