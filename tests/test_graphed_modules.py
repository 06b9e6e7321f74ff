"""make_graphed_callables on the CPU: torch's arguments and meaning, without its faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphsafe as gs

from .helpers import run_threads


@pytest.fixture
def context() -> Iterator[gs.ThreadContext]:
    with gs.thread_context("cpu", seed=5) as context:
        yield context


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_make_graphed_callables_of_a_module_trains_as_the_module_does(context: gs.ThreadContext) -> None:
    def run(module: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            for _ in range(2):  # gradients accumulate
                module(torch.randn(6, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(module.state_dict().values())

    module = make()
    graphed = gs.make_graphed_callables(module, (torch.zeros(6, 4),))
    assert graphed is module
    assert all(torch.equal(a, b) for a, b in zip(run(module), run(make()), strict=True))
    assert context.counters.captures == 2 and context.counters.replays == 16 - 3 - 1  # forward and backward
    module.eval()
    x = torch.ones(3, 4)  # another mode is the module itself, of any shape
    assert torch.equal(module(x), make_like(module)(x))
    module.train()
    with pytest.raises(gs.ShapeMismatchError, match=r"\[6, 4\].*\[3, 4\]"):
        module(x)


def make_like(module: nn.Module) -> nn.Module:
    other = make()
    other.load_state_dict(module.state_dict())
    return other.eval()


def test_make_graphed_callables_of_a_tuple_returns_as_many(context: gs.ThreadContext) -> None:
    f, g = gs.make_graphed_callables((lambda x: x + 1, lambda x, y: x * y), ((torch.ones(2),), (torch.ones(2),) * 2))
    for i in range(6):
        x = torch.full((2,), float(i))
        assert torch.equal(f(x), x + 1) and torch.equal(g(x, x), x * x)
    assert f.stats().captures == g.stats().captures == 1


def test_make_graphed_callables_unused_inputs_raise_unless_allowed(context: gs.ThreadContext) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    strict = gs.make_graphed_callables(lambda x, y: x * 2, (x, y))
    with pytest.raises(gs.GraphsafeError, match=r"input 1.*allow_unused_input"):
        strict(x, y)
    module = make()
    module.extra = nn.Linear(1, 1)
    module.forward = lambda x: module[0](x)  # type: ignore[method-assign]
    with pytest.raises(gs.GraphsafeError, match="parameter of shape"):
        gs.make_graphed_callables(module, (torch.ones(2, 4),))(torch.ones(2, 4))
    loose = gs.make_graphed_callables(lambda x, y: x * 2, (x, y), allow_unused_input=True)
    for _ in range(5):
        x.grad = None
        loose(x, y).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0)) and y.grad is None


def test_make_graphed_callables_threads_share_a_module_for_inference() -> None:
    module = make().eval()
    expected = [module(torch.full((2, 4), float(i))).detach() for i in range(4)]
    gs.make_graphed_callables(module, (torch.zeros(2, 4),))

    def work(i: int) -> None:
        with gs.thread_context("cpu") as context, torch.no_grad():
            for _ in range(8):
                assert torch.equal(module(torch.full((2, 4), float(i))), expected[i])
            assert context.counters.captures == 1

    run_threads(4, work, 60.0)


def test_make_graphed_callables_arguments_are_checked() -> None:
    with pytest.raises(gs.GraphsafeError, match="tensors alone"):
        gs.make_graphed_callables(lambda x: x, (3,))
    with pytest.raises(gs.GraphsafeError, match="sample_args"):
        gs.make_graphed_callables((lambda x: x,), (torch.ones(1),))
    with pytest.raises(gs.GraphsafeError, match="callables"):
        gs.make_graphed_callables(3, (torch.ones(1),))
    with pytest.raises(gs.GraphsafeError, match="thread_local"):
        gs.make_graphed_callables(lambda x: x, (torch.ones(1),), capture_error_mode="global")
    module = nn.BatchNorm1d(2)
    module.running_mean.requires_grad_()
    with pytest.raises(gs.GraphsafeError, match="running_mean"):
        gs.make_graphed_callables(module, (torch.ones(1, 2),))
    f = gs.make_graphed_callables(lambda x: x, (torch.ones(1),))
    with pytest.raises(gs.NoContextError):
        f(torch.ones(1))
