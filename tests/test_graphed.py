"""graphed on the CPU: the function's own numbers, signatures, autograd, and what is seen before a replay."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe.memory import Memory

from .helpers import run_threads


@pytest.fixture
def context() -> Iterator[gs.ThreadContext]:
    with gs.thread_context("cpu", seed=5) as context:
        yield context


class Pair(NamedTuple):
    total: torch.Tensor
    label: str


class Seen:
    """Counts the calls of a function and the addresses of its first argument."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.addresses = fn, []

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.addresses.append(x.data_ptr())
        return self.fn(x, *args, **kwargs)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def inputs(n: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 6, generator=generator) for _ in range(n)]


def test_graphed_warms_up_captures_and_replays_on_static_inputs_alone(context: gs.ThreadContext) -> None:
    seen = Seen(lambda x: x * 2 + 1)
    f = gs.graphed(seen, num_warmup_iters=2)
    batches = inputs(7)
    kept = [x.clone() for x in batches]
    with torch.no_grad():
        results = [f(x) for x in batches]
    assert all(torch.equal(r, x * 2 + 1) for r, x in zip(results, batches, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, batches, strict=True))
    # Two eager calls read the caller's tensors; the capturing call and the replays read one static input.
    assert seen.addresses[:2] == [batches[0].data_ptr(), batches[1].data_ptr()]
    assert len(set(seen.addresses[2:])) == 1 and seen.addresses[2] not in {x.data_ptr() for x in batches}
    stats = f.stats()
    assert (stats.captures, stats.eager_calls, stats.replays, stats.mismatches) == (1, 2, 5, 0)
    assert context.counters.captures == 1 and context.counters.eager_steps == 2


def test_graphed_takes_and_returns_pytrees_and_keywords(context: gs.ThreadContext) -> None:
    @gs.graphed(num_warmup_iters=1)
    def f(batch: dict[str, Any], *, scale: float, name: str = "a") -> dict[str, Any]:
        return {"out": [batch["x"] * scale, (batch["y"] + 1,)], "pair": Pair(batch["x"].sum(), name), "n": 3}

    for i in range(4):
        x, y = torch.full((2,), float(i)), torch.full((3,), 2.0 * i)
        out = f({"x": x, "y": y}, scale=3.0)
        assert torch.equal(out["out"][0], x * 3) and torch.equal(out["out"][1][0], y + 1)
        assert isinstance(out["pair"], Pair) and out["pair"].label == "a" and out["n"] == 3
        assert out["pair"].total == x.sum()
    assert f.stats().captures == 1
    assert f.__name__ == "f"
    f({"x": x, "y": y}, scale=-3.0)
    f({"x": x, "y": y}, scale=3.0, name="b")
    assert f.stats().mismatches == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x[:2],), {}),
        lambda x: ((x.double(),), {}),
        lambda x: ((x.t().contiguous().t(),), {}),
        lambda x: ((x, 1), {}),
        lambda x: ((x, True), {}),
        lambda x: ((x, -0.0), {}),
        lambda x: ((x.clone().requires_grad_(),), {}),
    ],
    ids=["shape", "dtype", "strides", "argument", "bool", "minus zero", "requires_grad"],
)
def test_graphed_signature_tells_calls_apart(context: gs.ThreadContext, other: Callable[..., Any]) -> None:
    f = gs.graphed(lambda x, k=0: x + k, num_warmup_iters=0)
    x = inputs(1)[0]
    f(x)
    f(x, 0.0)
    before = f.stats().captures
    args, kwargs = other(x)
    f(*args, **kwargs)
    assert f.stats().captures == before + 1
    f(*args, **kwargs)
    assert f.stats().captures == before + 1


def test_graphed_signature_has_modes_and_train_or_eval(context: gs.ThreadContext) -> None:
    module = net()
    f = gs.graphed(module, num_warmup_iters=0)
    x = inputs(1)[0]
    f(x)
    with torch.no_grad():
        f(x)
    with torch.inference_mode():
        out = f(x)
        assert out.is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(x).dtype == torch.bfloat16
    module.eval()
    assert torch.equal(f(x), module(x))
    assert f.stats().captures == 5
    module.train()
    f(x)
    assert f.stats().captures == 5


@pytest.mark.parametrize("outputs", ["copy", "alias"])
def test_graphed_outputs_are_copies_or_really_overwritten_aliases(context: gs.ThreadContext, outputs: Any) -> None:
    f = gs.graphed(lambda x: x * 2, num_warmup_iters=1, outputs=outputs)
    with torch.no_grad():
        results = [f(x) for x in inputs(5)]
    expected = [x * 2 for x in inputs(5)]
    if outputs == "copy":
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    else:
        assert all(torch.equal(a, expected[-1]) for a in results[1:])
        assert torch.equal(results[0], expected[0])


def test_graphed_alias_that_was_overwritten_raises_in_debug_mode(
    context: gs.ThreadContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSAFE_DEBUG", "1")
    f = gs.graphed(lambda x: x * 2, num_warmup_iters=0, outputs="alias")
    with torch.no_grad():
        first = f(torch.ones(3))
        second = f(first)  # what it was given is current
        assert torch.equal(second, torch.full((3,), 4.0))
        with pytest.raises(gs.GraphsafeError, match="overwritten"):
            f(first)
        with pytest.raises(gs.GraphsafeError, match="overwritten"):
            f(first.view(3))


def train(f: Callable[..., Any], module: nn.Module, n: int, in_flight: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = inputs(n * in_flight)
    found = []
    for i in range(n):
        given = [x.clone().requires_grad_() for x in batches[i * in_flight : (i + 1) * in_flight]]
        losses = [f(x).square().mean() for x in given]
        for loss in losses:
            loss.backward()
        found += [loss.detach().clone() for loss in losses] + [x.grad for x in given]
        found += [p.grad.clone() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(t.clone() for t in module.state_dict().values())]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_graphed_gradients_and_buffers_equal_the_eager_functions_bit_for_bit(in_flight: int) -> None:
    def run(graph: bool) -> list[torch.Tensor]:
        module = net()
        with gs.thread_context("cpu", seed=1) as context:
            f = gs.graphed(module, num_warmup_iters=2) if graph else in_eager(context, module)
            found = train(f, module, 8, in_flight)
            if graph:
                assert f.stats().captures == in_flight and f.stats().eager_calls == 2
        return found

    def in_eager(context: gs.ThreadContext, module: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            with context.eager():
                return module(x)

        return call

    eager, graph = run(False), run(True)
    assert len(eager) == len(graph)
    assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_graphed_gradients_accumulate_and_are_the_callers_own(context: gs.ThreadContext) -> None:
    module = nn.Linear(6, 2)
    f = gs.graphed(module, num_warmup_iters=1)
    reference = nn.Linear(6, 2)
    reference.load_state_dict(module.state_dict())
    kept: list[torch.Tensor] = []
    for x in inputs(6):
        f(x).sum().backward()
        reference(x).sum().backward()
        kept.append(module.weight.grad)
    assert torch.equal(module.weight.grad, reference.weight.grad)
    assert all(gradient is kept[0] for gradient in kept)
    found = [torch.autograd.grad(f(x).sum(), module.weight)[0] for x in inputs(4)]
    expected = [torch.autograd.grad(reference(x).sum(), reference.weight)[0] for x in inputs(4)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_graphed_gradients_reach_leaves_of_closures_and_skip_what_no_loss_uses(context: gs.ThreadContext) -> None:
    weight = torch.full((6,), 2.0, requires_grad=True)
    other = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight, x + other), num_warmup_iters=1)
    for x in inputs(5):
        weight.grad = other.grad = None
        first, _ = f(x)
        first.sum().backward()
        assert torch.equal(weight.grad, x.sum(0)) and other.grad is None
    for x in inputs(5):
        weight.grad = other.grad = None
        _, second = f(x)
        second.sum().backward()
        assert weight.grad is None and torch.equal(other.grad, torch.full((6,), 4.0))


def test_graphed_gradient_hooks_run_once(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * 2)
    f = gs.graphed(lambda x: x * weight, num_warmup_iters=1)
    for x in inputs(5):
        weight.grad = None
        f(x).sum().backward()
        assert torch.equal(weight.grad, 2 * x.sum(0))


def test_graphed_second_backward_is_torchs_error_and_retain_graph_works(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).exp(), num_warmup_iters=1)
    for x in inputs(4):
        out = f(x).sum()
        weight.grad = None
        out.backward(retain_graph=True)
        first = weight.grad.clone()
        f(x + 1)  # takes other buffers: the first call may still be differentiated
        out.backward()
        assert torch.equal(weight.grad, 2 * first)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_graphed_create_graph_is_refused(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).exp(), num_warmup_iters=1)
    for x in inputs(4):
        with pytest.raises(gs.GraphsafeError, match="create_graph"):
            torch.autograd.grad(f(x).sum(), weight, create_graph=True)


def test_graphed_function_that_reads_a_tensor_with_a_history_says_so(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    doubled = weight * 2
    f = gs.graphed(lambda x: x * doubled, num_warmup_iters=0)
    with pytest.raises(gs.GraphsafeError, match="neither an argument nor a leaf"):
        f(inputs(1)[0])
    warm = gs.graphed(lambda x: x * doubled, num_warmup_iters=1)
    with pytest.raises(gs.GraphsafeError, match="neither an argument nor a leaf"):
        warm(inputs(1)[0])


def test_graphed_input_changed_in_place_is_changed_for_the_caller(context: gs.ThreadContext) -> None:
    def fill(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x.sum(0))
        return cache * 2

    f = gs.graphed(fill, num_warmup_iters=1)
    cache, expected = torch.zeros(6), torch.zeros(6)
    for x in inputs(5):
        out = f(cache, x)
        assert torch.equal(out, fill(expected, x))
        assert torch.equal(cache, expected)
    assert f.stats().captures == 1
    with torch.inference_mode():
        cache, expected = torch.zeros(6), torch.zeros(6)
        for x in inputs(5):
            f(cache, x)
            fill(expected, x)
            assert torch.equal(cache, expected)


@pytest.mark.parametrize("num_warmup_iters", [0, 1])
def test_graphed_input_changed_in_place_under_autograd_is_refused(
    context: gs.ThreadContext, num_warmup_iters: int
) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: x.mul_(weight), num_warmup_iters=num_warmup_iters)
    with pytest.raises(gs.GraphsafeError, match="in place"):
        f(torch.ones(6))
    g = gs.graphed(lambda x: x.mul_(2), num_warmup_iters=num_warmup_iters)
    with pytest.raises((gs.GraphsafeError, RuntimeError), match=r"in place|in-place"):
        g((torch.ones(6, requires_grad=True) * 1).requires_grad_())


def test_graphed_leaf_changed_between_forward_and_backward_raises(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).exp(), num_warmup_iters=1)
    for x in inputs(4):
        x.requires_grad_()
        out = f(x).sum()
        with torch.no_grad():
            weight.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            out.backward()


def test_graphed_mismatch_can_be_eager_or_an_error(context: gs.ThreadContext) -> None:
    x = inputs(1)[0]
    eager = gs.graphed(lambda x: x + 1, num_warmup_iters=0, on_mismatch="eager")
    eager(x)
    for _ in range(3):
        assert torch.equal(eager(x[:2]), x[:2] + 1)
    assert eager.stats().captures == 1 and eager.stats().eager_calls == 3
    strict = gs.graphed(lambda x: x + 1, on_mismatch="error")
    strict(x)
    with pytest.raises(gs.ShapeMismatchError, match=r"\[4, 6\].*\[2, 6\]"):
        strict(x[:2])


def test_graphed_more_signatures_than_max_graphs_run_eagerly_with_one_warning(context: gs.ThreadContext) -> None:
    f = gs.graphed(lambda x: x + 1, num_warmup_iters=0, max_graphs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (1, 2, 3, 4, 3):
            assert torch.equal(f(torch.zeros(size)), torch.ones(size))
    assert len([w for w in caught if w.category is gs.GraphsafeWarning]) == 1 and "max_graphs=2" in str(
        caught[0].message
    )
    assert f.stats().captures == 2 and f.stats().eager_calls == 3
    f.reset()
    f(torch.zeros(3))
    assert f.stats().captures == 3


def test_graphed_reads_static_buffers_in_place(context: gs.ThreadContext) -> None:
    buffers = [gs.StaticBuffers({"x": gs.Spec((2, 3))}, device="cpu") for _ in range(2)]
    seen = Seen(lambda x: x + 1)
    f = gs.graphed(seen, num_warmup_iters=0, max_graphs=1)
    for i in range(6):
        some = buffers[i % 2]
        some.load({"x": torch.full((2, 3), float(i))})
        assert torch.equal(f(some["x"]), torch.full((2, 3), i + 1.0))
    assert set(seen.addresses) == {some["x"].data_ptr() for some in buffers}
    assert f.stats().captures == 2 and f.stats().mismatches == 0


def test_graphed_buckets_pad_and_hand_over_the_mask(context: gs.ThreadContext) -> None:
    lengths: list[int] = []

    def mean(tokens: torch.Tensor, scale: float, *, mask: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return gs.padding.masked_mean(tokens, mask[None, :], dim=1) * scale

    f = gs.graphed(mean, num_warmup_iters=0, pad=gs.padding.Buckets((4, 8), dim=1, value=float("nan")))
    for n in (1, 3, 4, 5, 8, 2, 7):
        x = torch.arange(2.0 * n).view(2, n)
        assert torch.equal(f(x, 2.0), x.mean(1) * 2)
    assert f.stats().captures == 2 and set(lengths) == {4, 8}
    with pytest.raises(ValueError, match="largest bucket"):
        f(torch.zeros(2, 9), 2.0)
    with pytest.raises(ValueError, match="mask"):
        f(torch.zeros(2, 4), 2.0, mask=torch.ones(4))
    named = gs.graphed(lambda table, *, ids, mask: table[ids] * mask, num_warmup_iters=0,
                       pad=gs.padding.Buckets([4], names=["ids"]))  # fmt: skip
    assert torch.equal(named(torch.arange(9.0), ids=torch.tensor([3, 5])), torch.tensor([3.0, 5.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="keyword"):
        named(torch.arange(9.0), 3)


def test_graphed_draws_from_the_context_in_order(context: gs.ThreadContext) -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) * torch.rand(())

    f = gs.graphed(draw, num_warmup_iters=2)
    found = [f(torch.ones(8)) for _ in range(8)]
    context.reseed(5)
    expected = []
    for _ in range(8):
        with context.eager():
            expected.append(draw(torch.ones(8)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[-1], found[-2])


def test_graphed_that_draws_nothing_takes_shared_seats(context: gs.ThreadContext) -> None:
    f = gs.graphed(lambda x: x + 1, num_warmup_iters=2)
    kinds: list[bool] = []
    seat = context.seat
    context.seat = lambda *, exclusive: kinds.append(exclusive) or seat(exclusive=exclusive)  # type: ignore
    for x in inputs(4):
        f(x)
    assert kinds[0] is True and not any(kinds[2:])


def test_graphed_checkpoint_with_dropout_equals_eager() -> None:
    def run(graph: bool) -> list[torch.Tensor]:
        module = net()
        with gs.thread_context("cpu", seed=3) as context:

            def forward(x: torch.Tensor) -> torch.Tensor:
                return checkpoint(module, x, use_reentrant=False)

            f: Any = gs.graphed(forward, num_warmup_iters=1) if graph else forward
            found = []
            for x in inputs(5):
                if graph:
                    out = f(x)
                    out.sum().backward()
                else:
                    with context.eager():
                        out = f(x)
                        out.sum().backward()
                found += [out.detach().clone(), *(p.grad.clone() for p in module.parameters())]
                module.zero_grad()
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("change", ["parameter", "data", "buffer", "submodule", "closure", "load"])
def test_graphed_sees_what_was_replaced_since_the_capture(context: gs.ThreadContext, change: str) -> None:
    module, offset = net().eval(), torch.zeros(2)

    def run(x: torch.Tensor) -> torch.Tensor:
        return module(x) + offset

    f = gs.graphed(run, num_warmup_iters=0)
    x = inputs(1)[0]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(f(x), run(x))
        if change == "parameter":
            module[0].weight = nn.Parameter(torch.ones(8, 6))
        elif change == "data":
            module[0].weight.data = torch.ones(8, 6)
        elif change == "buffer":
            module[1]._buffers["running_mean"] = torch.full((8,), 3.0)
        elif change == "submodule":
            module[2] = nn.Tanh()
        elif change == "closure":
            offset = torch.ones(2)
        else:
            module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)
        for _ in range(3):
            assert torch.equal(f(x), run(x))
    assert f.stats().captures == 2


def test_graphed_that_reads_another_tensor_every_time_runs_eagerly_and_says_so(context: gs.ThreadContext) -> None:
    state = {"h": torch.zeros(2)}
    f = gs.graphed(lambda x: state["h"] + x, num_warmup_iters=0)
    x = torch.ones(2)
    with pytest.warns(gs.GraphsafeWarning, match="'h'"):
        for i in range(12):
            state["h"] = f(x)
            assert torch.equal(state["h"], torch.full((2,), i + 1.0))


def test_graphed_attributes_that_the_code_does_not_name_may_change(context: gs.ThreadContext) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight, self.last = torch.ones(3), torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x) + 1

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    trainer = Trainer()
    f = gs.graphed(trainer.forward, num_warmup_iters=0)
    for _ in range(5):
        trainer.last = f(torch.ones(3))
    assert f.stats().captures == 1
    trainer.weight = torch.full((3,), 2.0)
    assert torch.equal(f(torch.ones(3)), torch.full((3,), 3.0))


def test_graphed_method_is_bound_and_each_object_is_a_signature(context: gs.ThreadContext) -> None:
    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale = torch.tensor(scale)

        @gs.graphed(num_warmup_iters=0)
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    a, b = Scaled(2.0), Scaled(3.0)
    for _ in range(3):
        assert torch.equal(a.run(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(b.run(torch.ones(2)), torch.full((2,), 3.0))
    assert Scaled.run.stats().captures == 2
    a.scale = torch.tensor(5.0)
    assert torch.equal(a.run(torch.ones(2)), torch.full((2,), 5.0))


def test_graphed_that_cannot_be_captured_names_the_line_and_changes_nothing(context: gs.ThreadContext) -> None:
    module = nn.BatchNorm1d(6)

    def bad(x: torch.Tensor) -> torch.Tensor:
        y = module(x)
        return y * y.sum().item()

    f = gs.graphed(bad, num_warmup_iters=1)
    x = inputs(1)[0]
    f(x)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(gs.CaptureError, match=r"test_graphed\.py.*item|item.*test_graphed\.py"):
        f(x)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_graphed_that_runs_its_own_backward_is_refused(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)

    def bad(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()
        loss.backward()
        return loss.detach()

    f = gs.graphed(bad, num_warmup_iters=0)
    with pytest.raises(gs.CaptureError, match="backward"):
        f(inputs(1)[0])
    assert weight.grad is None
    weight.grad = torch.ones(6)
    with pytest.raises(gs.CaptureError, match="backward"):
        f(inputs(1)[0])
    assert torch.equal(weight.grad, torch.ones(6))


def test_graphed_without_context_or_closed_or_misused_says_so() -> None:
    f = gs.graphed(lambda x: x + 1)
    with pytest.raises(gs.NoContextError):
        f(torch.ones(2))
    with gs.thread_context("cpu"):
        f(torch.ones(2))
        with pytest.raises(gs.GraphsafeError, match="hashed"):
            f([torch.ones(2), {1, 2}])
        f.close()
        f.close()
        with pytest.raises(gs.GraphsafeError, match="closed"):
            f(torch.ones(2))
    for kwargs in ({"max_graphs": 0}, {"on_mismatch": "x"}, {"outputs": "view"}, {"num_warmup_iters": -1}, {"pad": 3}):
        with pytest.raises(gs.GraphsafeError, match=next(iter(kwargs))):
            gs.graphed(lambda x: x, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(gs.GraphsafeError, match="fn"):
        gs.graphed(3)  # type: ignore[call-overload]


def test_graphed_inside_a_capture_runs_inline(context: gs.ThreadContext) -> None:
    inner = gs.graphed(lambda x: x * 2, num_warmup_iters=0)
    outer = gs.graphed(lambda x: inner(x) + 1, num_warmup_iters=0)
    for x in inputs(3):
        assert torch.equal(outer(x), x * 2 + 1)
    x = torch.ones(3)
    with gs.capture() as graph:
        y = inner(x)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(y, torch.full((3,), 6.0))


def test_graphed_threads_share_the_function_and_have_graphs_of_their_own() -> None:
    module = net()
    module[1] = nn.Identity()  # batch statistics would be shared
    f = gs.graphed(module, num_warmup_iters=1)

    def series(i: int, call: Callable[..., Any]) -> list[torch.Tensor]:
        with gs.thread_context("cpu", seed=i), torch.no_grad():
            return [call(x * (i + 1)) for x in inputs(12)]

    alone = [series(i, gs.graphed(module, num_warmup_iters=1)) for i in range(4)]
    together = run_threads(4, lambda i: series(i, f), 60.0)
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    stats = f.stats()
    assert (stats.captures, stats.eager_calls, stats.replays) == (4, 4, 4 * 11)


def test_graphed_reset_by_one_thread_reaches_the_others_at_their_next_call() -> None:
    f = gs.graphed(lambda x: x + 1, num_warmup_iters=0)
    captured, dropped = threading.Event(), threading.Event()

    def other() -> int:
        f(torch.ones(2))
        captured.set()
        assert dropped.wait(30)
        f(torch.ones(2))  # 2. it captures anew
        return f.stats().captures

    worker = gs.spawn(other, device="cpu")
    assert captured.wait(30)
    f.reset()  # 1. from a thread that has no graph at all
    dropped.set()
    assert worker.result(30) == 2


def test_graphed_backward_from_another_thread_is_an_error(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: x * weight, num_warmup_iters=0)
    out = f(torch.ones(6)).sum()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            out.backward()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert isinstance(caught[0], gs.WrongThreadError)


def test_graphed_calls_kept_in_flight_without_end_run_eagerly_with_one_warning(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: (x * weight).exp(), num_warmup_iters=0)
    with pytest.warns(gs.GraphsafeWarning, match="detach") as caught:
        kept = [f(x) for x in inputs(20)]
    assert len([w for w in caught if w.category is gs.GraphsafeWarning]) == 1 and f.stats().captures == 16
    for out, x in zip(kept, inputs(20), strict=True):
        weight.grad = None
        out.sum().backward()
        expected = torch.autograd.grad((x * weight).exp().sum(), weight)[0]
        assert torch.equal(weight.grad, expected)


def test_graphed_frees_its_graphs_with_its_context() -> None:
    f = gs.graphed(lambda x: x + 1, num_warmup_iters=0, outputs="alias")
    for _ in range(3):
        with gs.thread_context("cpu"):
            static = weakref.ref(f(torch.ones(2)))
            f(torch.ones(2))
        gc.collect()
        assert static() is None
    assert f.stats().captures == 3 and f.stats().replays == 6


def net_compiled_by_an_ordinary_backward(backend: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A compiled function whose backward overwrites what its forward saved, and an input."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    compiled = gs.compile(lambda x: net(x).square().mean(), backend=backend)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    compiled(x).backward()
    return compiled, x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphed_function_that_an_ordinary_backward_compiled_has_its_gradients(
    context: gs.ThreadContext, backend: str
) -> None:
    compiled, x = net_compiled_by_an_ordinary_backward(backend)
    f = gs.graphed(lambda x: compiled(x), num_warmup_iters=2)
    want = x.grad
    for _ in range(5):
        x.grad = None
        f(x).backward()
        torch.testing.assert_close(x.grad, want)
    assert f.stats().replays == 3


def test_graphed_backward_that_overwrites_what_was_saved_may_not_be_repeated(context: gs.ThreadContext) -> None:
    compiled, x = net_compiled_by_an_ordinary_backward("aot_eager")
    f = gs.graphed(lambda x: compiled(x), num_warmup_iters=1)
    for _ in range(3):
        y = f(x)
        with pytest.raises(RuntimeError, match="donated buffer"):
            y.backward(retain_graph=True)
        f(x).backward()
    with pytest.raises(RuntimeError, match="donated buffer"):  # another's backward is refused as ever
        compiled(x).backward(retain_graph=True)


def test_graphed_compiled_function_compiles_once_for_all_its_calls(context: gs.ThreadContext) -> None:
    weight = torch.ones(6, requires_grad=True)

    @gs.compile(backend="aot_eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sin()

    f = gs.graphed(compiled, num_warmup_iters=2)
    before = sum(gs.stats().compiles.values())
    for x in inputs(6):
        weight.grad = None
        f(x).sum().backward()
        assert torch.allclose(weight.grad, (x * (x * weight).cos()).sum(0).detach())
    assert sum(gs.stats().compiles.values()) == before + 1


def test_memory_that_held_no_more_never_holds_again() -> None:
    layer = nn.Linear(2, 2)
    memory = Memory(lambda: layer)
    assert memory.holds()
    handle = layer.register_forward_hook(lambda *_: None)
    assert not memory.holds() and not memory.holds()
    handle.remove()
    assert not memory.holds()


def test_graphed_warning_points_at_the_callers_line_and_says_what_differs(context: gs.ThreadContext) -> None:
    f = gs.graphed(lambda x, k: x * k, num_warmup_iters=0, max_graphs=1)
    f(torch.ones(2), 1.0)
    with pytest.warns(gs.GraphsafeWarning, match=r"argument 1 is unlike.*as tensors") as caught:
        f(torch.ones(2), 2.0)
    assert caught[0].filename == __file__


# What a sceptic found


def test_graphed_threads_that_share_a_leaf_with_a_hook_run_it_once_a_backward() -> None:
    layer = nn.Linear(6, 2)
    seen: list[int] = []
    layer.weight.register_hook(lambda gradient: seen.append(1))

    def work(i: int) -> None:
        f = gs.graphed(layer, num_warmup_iters=1)
        with gs.thread_context("cpu"):
            for x in inputs(20):
                f(x).sum().backward()

    run_threads(3, work, 60.0)
    assert len(seen) == 60


def test_graphed_capture_leaves_the_gradient_of_another_threads_backward_alone(context: gs.ThreadContext) -> None:
    layer = nn.Linear(6, 2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if f.stats().eager_calls == 1:  # inside the capturing call
            thread = threading.Thread(target=lambda: layer(torch.ones(1, 6)).sum().backward())
            thread.start()
            thread.join(30)
        return layer(x)

    f = gs.graphed(fn, num_warmup_iters=1)
    for x in inputs(2):
        out = f(x)
    assert torch.equal(layer.weight.grad, torch.ones(2, 6)) and f.stats().captures == 1
    assert torch.equal(out, layer(x))


@pytest.mark.parametrize("op", [torch.relu, torch.tanh, torch.exp, torch.sin])
def test_graphed_aliases_whose_last_operator_saves_its_output_are_differentiated_right(
    context: gs.ThreadContext, op: Callable[..., Any]
) -> None:
    weight = torch.ones(6, requires_grad=True)
    f = gs.graphed(lambda x: op(x * weight), num_warmup_iters=1, outputs="alias")
    for x in inputs(6):
        weight.grad = None
        f(x).sum().backward()
        assert torch.equal(weight.grad, torch.autograd.grad(op(x * weight).sum(), weight)[0])


def test_graphed_inside_a_checkpoint_and_under_saved_tensor_hooks(context: gs.ThreadContext) -> None:
    layer = nn.Linear(6, 6)
    f = gs.graphed(layer, num_warmup_iters=1)
    seen: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: seen.append(1) or t)
    for x in inputs(6):
        layer.zero_grad()
        checkpoint(lambda x: f(x).tanh(), x.requires_grad_(), use_reentrant=False).sum().backward()
        (expected,) = torch.autograd.grad(layer(x).tanh().sum(), layer.weight)
        assert torch.equal(layer.weight.grad, expected)
    with hooks:
        for _ in range(3):
            f(inputs(1)[0])  # whether the last one may still be differentiated is seen without unpacking anything
    assert not seen


def test_graphed_calls_of_one_autocast_block_are_differentiated_each(context: gs.ThreadContext) -> None:
    layer = nn.Linear(6, 2)
    f = gs.graphed(layer, num_warmup_iters=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(inputs(1)[0])
        for x in inputs(6):
            layer.zero_grad()
            f(x).float().sum().backward()
            assert layer.weight.grad is not None
    assert f.stats().captures == 1


def test_graphed_output_in_an_object_that_is_no_pytree_is_refused(context: gs.ThreadContext) -> None:
    class Output:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    with pytest.raises(gs.GraphsafeError, match="Output"):
        gs.graphed(lambda x: Output(x * 2))(torch.ones(2))
    with pytest.raises(gs.GraphsafeError, match="generator"):
        gs.graphed(lambda x: (x * i for i in range(2)))(torch.ones(2))


class Settings:
    scale = torch.ones(2)


FACTOR = 2.0


@pytest.mark.parametrize("what", ["number of a closure", "global number", "attribute", "class attribute", "deque"])
def test_graphed_sees_values_that_the_code_reads_and_that_change(context: gs.ThreadContext, what: str) -> None:
    global FACTOR

    class Head:
        def __init__(self) -> None:
            self.temperature = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.temperature

    number, head, tensors = 2.0, Head(), deque([torch.full((2,), 2.0)])
    fn = {
        "number of a closure": lambda x: x * number,
        "global number": lambda x: x * FACTOR,
        "attribute": head,
        "class attribute": lambda x: x * Settings.scale,
        "deque": lambda x: x * tensors[0],
    }[what]
    f = gs.graphed(fn, num_warmup_iters=0)
    x = torch.ones(2)
    try:
        for _ in range(3):
            f(x)
        assert f.stats().captures == 1
        number, head.temperature, FACTOR, Settings.scale = 3.0, 3.0, 3.0, torch.full((2,), 3.0)
        tensors[0] = torch.full((2,), 3.0)
        for _ in range(3):
            assert torch.equal(f(x), torch.full((2,), 3.0))
        assert f.stats().captures == 2
    finally:
        FACTOR = 2.0


def test_graphed_that_is_refused_for_what_it_binds_anew_leaves_it_as_it_was(context: gs.ThreadContext) -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("count", torch.zeros(()))

    def fn(x: torch.Tensor) -> torch.Tensor:
        layer.count = layer.count + 1
        return layer(x) * layer.count

    f = gs.graphed(fn, num_warmup_iters=1)
    f(torch.ones(2))
    with pytest.raises(gs.CaptureError, match="count"):
        f(torch.ones(2))
    assert layer.count == 1


def test_graphed_changed_inputs_that_share_memory_are_refused(context: gs.ThreadContext) -> None:
    x = torch.zeros(3)
    with pytest.raises(gs.GraphsafeError, match="shares memory"):
        gs.graphed(lambda a, b: a.add_(1) + b, num_warmup_iters=0)(x, x)
    padded = gs.graphed(lambda a, mask: a.add_(1), num_warmup_iters=0, pad=gs.padding.Buckets((4,)))
    with pytest.raises(gs.GraphsafeError, match="pad="):
        padded(torch.zeros(3))


def test_graphed_functions_and_eager_calls_let_go_of_what_nobody_holds(context: gs.ThreadContext) -> None:
    layer = nn.Linear(6, 2)
    f = gs.graphed(layer, num_warmup_iters=1)
    gone = weakref.ref(f)
    kept = [f(x).sum() for x in inputs(1)]
    kept[0].backward()
    f(inputs(1)[0])
    del f
    gc.collect()
    assert gone() is None
    made = gs.make_graphed_callables(nn.Linear(6, 2), (torch.zeros(4, 6),))
    copied = copy.deepcopy(made)
    with torch.no_grad():
        copied.weight.zero_(), copied.bias.zero_()
    assert torch.equal(copied(inputs(1)[0]), torch.zeros(4, 2))
    other = copy.deepcopy(gs.graphed(layer))
    assert torch.equal(other(inputs(1)[0]), layer(inputs(1)[0]))


def test_graphed_tensor_subclasses_are_refused_and_equal_numbers_of_other_types_told_apart(
    context: gs.ThreadContext,
) -> None:
    class Special(torch.Tensor):
        pass

    f = gs.graphed(lambda x, k=0: x * k, num_warmup_iters=0)
    with pytest.raises(gs.GraphsafeError, match="Special"):
        f(torch.ones(2).as_subclass(Special))
    for k in (complex(0, 0.0), complex(0, -0.0), float("nan"), float("nan")):
        f(torch.ones(2), k)
    assert f.stats().captures == 3


def test_graphed_function_that_begins_to_draw_draws_from_its_contexts_generator() -> None:
    p = 0.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, p) if p else x * 1

    def drawn(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        nonlocal p
        p = 0.0
        found = [call(torch.ones(64)) for _ in range(5)]
        p = 0.5
        return found + [call(torch.ones(64)) for _ in range(6)]

    with gs.thread_context("cpu", seed=3) as context, context.eager():
        expected = drawn(fn)
    with gs.thread_context("cpu", seed=3):
        found = drawn(gs.graphed(fn))
    assert len({tuple(x.tolist()) for x in expected}) == 7
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_graphed_custom_function_may_keep_what_it_calls_a_variable(context: gs.ThreadContext) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.variable = x.detach().clone()
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    weight = nn.Parameter(torch.ones(3))
    f = gs.graphed(lambda x: Double.apply(weight * x).sum(), num_warmup_iters=1)
    for _ in range(3):
        weight.grad = None
        f(torch.ones(3)).backward()
        assert torch.equal(weight.grad, torch.full((3,), 2.0))
