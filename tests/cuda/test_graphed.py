"""graphed on a GPU: replays that run no Python, equal to eager bit for bit, from several threads at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsafe as gs

from ..helpers import run_threads
from .test_core import DEVICE, SEGMENT_BYTES, data, net

DEADLINE_S = 240.0
LONG_CYCLES = 100_000_000


class Counted:
    """A function or module that counts how often Python ran it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn(*args, **kwargs)


def with_statistics(seed: int) -> nn.Module:
    return nn.Sequential(net(seed), nn.BatchNorm1d(128, device=DEVICE))


def train(
    how: str, seed: int, n: int = 24, *, in_flight: int = 1, checkpointed: bool = False, autocast: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients, inputs' gradients and final state; and how often Python ran the module."""
    module = with_statistics(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    batches = [x for x, _ in data(seed, n * in_flight)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)

    counted = Counted(forward)
    found: list[torch.Tensor] = []
    with gs.thread_context(DEVICE, seed=seed) as context:
        f = gs.graphed(counted) if how == "graph" else counted
        for i in range(n):
            given = [x.clone().requires_grad_() for x in batches[i * in_flight : (i + 1) * in_flight]]

            def step(given: list[torch.Tensor] = given) -> list[torch.Tensor]:
                outs = [f(x) for x in given]
                losses = [out.float().square().mean() for out in outs]
                for loss in losses:
                    loss.backward()
                return losses

            if how == "graph":
                losses = step()
            else:
                with context.eager():
                    losses = step()
            found += [loss.detach() for loss in losses] + [x.grad for x in given]
            if i % 3 == 2:  # gradients accumulate over three
                found += [p.grad.clone() for p in module.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        context.synchronize()
        if how == "graph":
            assert context.counters.replays >= (n - 6) * in_flight
    return [*found, *(t.clone() for t in module.state_dict().values())], counted.calls


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_graphed_training_in_four_threads_equals_eager_bit_for_bit(in_flight: int, autocast: bool) -> None:
    kwargs: dict[str, Any] = {"in_flight": in_flight, "autocast": autocast}
    eager = [train("eager", seed, **kwargs)[0] for seed in range(4)]
    graphs = run_threads(4, lambda i: train("graph", i, **kwargs), DEADLINE_S)
    for one, (other, calls) in zip(eager, graphs, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert calls == 3 + in_flight  # warm-up, and a capture for each call in flight; replays ran no Python


def test_graphed_checkpoint_with_dropout_equals_eager_bit_for_bit() -> None:
    eager = [train("eager", seed, checkpointed=True)[0] for seed in range(4)]
    graphs = run_threads(4, lambda i: train("graph", i, checkpointed=True)[0], DEADLINE_S)
    for one, other in zip(eager, graphs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_graphed_inference_in_threads_of_several_shapes_runs_no_python_and_is_right() -> None:
    module = net(0, dropout=0.0).eval()
    counted = Counted(module)
    f = gs.graphed(counted, num_warmup_iters=2)
    sizes = (64, 16, 48)
    batches = [data(i, 10)[0][0] for i in range(4)]
    with torch.inference_mode():
        expected = {(i, size): module(batches[i][:size]).clone() for i in range(4) for size in sizes}
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with gs.thread_context(DEVICE) as context, torch.inference_mode():
            found = [(size, f(batches[i][:size])) for _ in range(20) for size in sizes]
            context.synchronize()
            for size, out in found:
                assert torch.allclose(out, expected[i, size], atol=1e-5)

    run_threads(4, work, DEADLINE_S)
    stats = f.stats()
    assert stats.captures == 12 and stats.eager_calls == 24 and stats.replays == 4 * 60 - 24
    assert counted.calls == 36


def test_graphed_takes_pytrees_keywords_and_changed_inputs() -> None:
    def fn(batch: dict[str, torch.Tensor], *, cache: torch.Tensor, scale: float) -> dict[str, Any]:
        cache.add_(batch["x"].sum(0))
        return {"y": [batch["x"] * scale, cache * 1], "n": 3}

    counted = Counted(fn)
    f = gs.graphed(counted, num_warmup_iters=1)
    with gs.thread_context(DEVICE), torch.no_grad():
        cache, expected = torch.zeros(128, device=DEVICE), torch.zeros(128, device=DEVICE)
        for x, _ in data(1, 8):
            out, want = f({"x": x}, cache=cache, scale=2.0), fn({"x": x}, cache=expected, scale=2.0)
            assert torch.equal(cache, expected) and out["n"] == 3
            assert all(torch.equal(a, b) for a, b in zip(out["y"], want["y"], strict=True))
    assert counted.calls == 2


def test_graphed_aliases_are_overwritten_and_autograd_knows() -> None:
    f = gs.graphed(lambda x: x * 2, num_warmup_iters=1, outputs="alias")
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    with gs.thread_context(DEVICE):
        with torch.no_grad():
            f(torch.ones(3, device=DEVICE))
            first = f(torch.ones(3, device=DEVICE))
        loss = (weight * first).sum()
        with torch.no_grad():
            second = f(torch.full((3,), 5.0, device=DEVICE))
        assert first.data_ptr() == second.data_ptr() and torch.equal(first, torch.full_like(first, 10.0))
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


def test_graphed_reads_static_buffers_in_place_and_pads_to_buckets() -> None:
    counted = Counted(lambda x, mask=None: x.sum(0) if mask is None else (x * mask[:, None]).sum(0))
    slots = [gs.StaticBuffers({"x": gs.Spec((4, 8))}, device=DEVICE) for _ in range(2)]
    with gs.thread_context(DEVICE), torch.no_grad():
        f = gs.graphed(counted, num_warmup_iters=0, max_graphs=1)
        for i in range(8):
            slots[i % 2].load({"x": torch.full((4, 8), float(i), device=DEVICE)})
            assert torch.equal(f(slots[i % 2]["x"]), torch.full((8,), 4.0 * i, device=DEVICE))
        assert counted.calls == 2
        g = gs.graphed(counted, num_warmup_iters=0, pad=gs.padding.Buckets((4, 8), value=float(7)))
        for n in (1, 2, 4, 5, 8, 3, 7):
            x = torch.arange(8.0 * n, device=DEVICE).view(n, 8)
            assert torch.equal(g(x), x.sum(0))
        assert counted.calls == 4


def test_graphed_compiled_function_launches_its_kernels_in_the_graph() -> None:
    gs.install()
    weight = torch.randn(128, device=DEVICE, requires_grad=True)
    runs: list[int] = []

    @gs.compile
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sin().sum(1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return compiled(x)

    def series(call: Callable[..., Any], i: int) -> list[torch.Tensor]:
        found = []
        for x, _ in data(i, 12):
            out = call(x)
            (gradient,) = torch.autograd.grad(out.sum(), weight)
            found += [out.detach(), gradient]
        torch.cuda.current_stream().synchronize()
        return found

    def work(i: int, graph: bool) -> list[torch.Tensor]:
        with gs.thread_context(DEVICE) as context:
            if graph:
                return series(f, i)
            with context.eager():
                return series(compiled, i)

    f = gs.graphed(fn)
    alone = [work(i, False) for i in range(4)]
    together = run_threads(4, lambda i: work(i, True), DEADLINE_S)
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(runs) == 4 * 4


def test_graphed_called_on_another_stream_is_in_order_with_it() -> None:
    f = gs.graphed(lambda x: x * 2, num_warmup_iters=1)
    other = torch.cuda.Stream(DEVICE)
    with gs.thread_context(DEVICE), torch.no_grad():
        x = torch.zeros(1 << 20, device=DEVICE)
        for i in range(4):
            with torch.cuda.stream(other):
                torch.cuda._sleep(LONG_CYCLES)
                x.fill_(float(i))  # late
                y = f(x)
                assert torch.equal(y, torch.full_like(y, 2.0 * i))
            torch.cuda.current_stream().wait_stream(other)


def test_graphed_sees_what_was_replaced_on_the_gpu() -> None:
    module = net(0, dropout=0.0).eval()
    f = gs.graphed(module, num_warmup_iters=1)
    x = data(0, 1)[0][0]
    with gs.thread_context(DEVICE) as context, context.eager(rng=False), torch.no_grad():
        for change in (
            lambda: None,
            lambda: module[1].weight.data.copy_(module[1].weight * 2),
            lambda: setattr(module[1], "weight", nn.Parameter(torch.ones_like(module[1].weight))),
            lambda: module.to(torch.float64).to(torch.float32),
            lambda: module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}),
        ):
            change()
            gc.collect()
            for _ in range(4):
                assert torch.equal(f(x), module(x))


def test_graphed_outputs_and_gradients_are_the_callers_own() -> None:
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).view(2, 4), num_warmup_iters=1)
    with gs.thread_context(DEVICE):
        outs, gradients, inputs = [], [], []
        for i in range(8):
            x = torch.full((8,), float(i), device=DEVICE, requires_grad=True)
            out = f(x)
            out.backward(torch.full((2, 4), 1.0 + i, device=DEVICE))
            outs.append(out)
            inputs.append(x)
            gradients.append(weight.grad)
            weight.grad = None
        for i in range(8):
            assert torch.equal(outs[i], torch.full_like(outs[i], float(i)))
            assert torch.equal(gradients[i], torch.full_like(gradients[i], i * (1.0 + i)))
            assert torch.equal(inputs[i].grad, torch.full_like(inputs[i], 1.0 + i))


def test_graphed_memory_is_back_after_its_thread_and_bytes_are_told() -> None:
    def work() -> None:
        module = net(0, width=512)
        f = gs.graphed(module, num_warmup_iters=1)
        for x, _ in data(0, 6, width=512):
            f(x).sum().backward()
        assert f.stats().num_graphs == 2 and f.stats().num_bytes > 0

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    gs.spawn(work, device=DEVICE).result(DEADLINE_S)
    before = reserved()
    for _ in range(3):
        gs.spawn(work, device=DEVICE).result(DEADLINE_S)
    assert reserved() <= before + SEGMENT_BYTES


def test_graphed_that_cannot_be_captured_leaves_earlier_graphs_right() -> None:
    f = gs.graphed(lambda x: nn.functional.dropout(x, 0.5), num_warmup_iters=0)
    bad = gs.graphed(lambda x: x * x.sum().item(), num_warmup_iters=0)

    def series(disturb: bool) -> list[torch.Tensor]:
        f.reset()
        found = []
        with gs.thread_context(DEVICE, seed=3):
            for _ in range(6):
                found.append(f(torch.ones(256, device=DEVICE)))
                if disturb:
                    with pytest.raises(gs.CaptureError, match="item"):
                        bad(torch.ones(4, device=DEVICE))
        return found

    assert all(torch.equal(a, b) for a, b in zip(series(False), series(True), strict=True))


def test_make_graphed_callables_trains_on_the_gpu_as_eager_does() -> None:
    def run(graph: bool) -> list[torch.Tensor]:
        module = with_statistics(0)
        if graph:
            gs.make_graphed_callables(module, (torch.zeros(64, 128, device=DEVICE),))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        with gs.thread_context(DEVICE, seed=1) as context:
            for x, y in data(0, 12):

                def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                    (module(x) - y).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

                if graph:
                    step()
                else:
                    with context.eager():
                        step()
        return [t.clone() for t in module.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_threads_that_share_trained_weights_accumulate_into_one_gradient() -> None:
    """Each adds to .grad on the stream of the weight's one node, also while another thread captures."""
    weight = torch.randn(128, device=DEVICE, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).sin().sum(1))
    weight.grad = torch.zeros_like(weight)
    batches = [[x for x, _ in data(i, 40)] for i in range(4)]
    with gs.thread_context(DEVICE) as context, context.eager(rng=False):
        gradients = [torch.autograd.grad((x * weight).sin().sum(), weight)[0] for batch in batches for x in batch]
        expected = torch.stack(gradients).double().sum(0)
        torch.cuda.current_stream().synchronize()

    def work(i: int) -> None:
        with gs.thread_context(DEVICE):
            for n, x in enumerate(batches[i]):
                if n == 10 * i + 5:
                    f.reset()  # captures come anew while the others accumulate
                f(x).sum().backward()
            torch.cuda.current_stream().synchronize()

    run_threads(4, work, DEADLINE_S)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-3, atol=1e-3)


def test_what_another_threads_graph_reads_for_gradients_is_trained_eagerly_and_refused_in_a_capture() -> None:
    layer = nn.Linear(128, 1, device=DEVICE)
    x, ready, done = data(0, 1)[0][0], threading.Event(), threading.Event()

    def evaluate() -> None:
        f = gs.graphed(layer, num_warmup_iters=1)
        kept = [f(x) for _ in range(3)]  # their graphs keep the parameters' nodes
        ready.set()
        assert done.wait(DEADLINE_S) and kept

    worker = gs.spawn(evaluate, device=DEVICE)
    assert ready.wait(DEADLINE_S)
    try:
        with gs.thread_context(DEVICE):
            with pytest.raises(gs.CaptureError, match="arrive on another stream"), gs.capture():
                layer(x).square().mean().backward()
            layer.zero_grad()
            step = gs.TrainStep(
                lambda x: layer(x).square().mean(), torch.optim.SGD(layer.parameters(), lr=0.01, fused=True)
            )
            with pytest.warns(gs.GraphsafeWarning, match="runs eagerly while another thread's graph"):
                losses = [float(step(x)) for _ in range(6)]
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    finally:
        done.set()
        worker.result(DEADLINE_S)
