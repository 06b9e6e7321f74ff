"""What people compile, from eight threads at once, own and shared: each gets what eager code gives one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphsafe
from tests.helpers import plain_torch, run_threads

NUM_THREADS = 8
Make = Callable[[Callable[..., Any]], Callable[[Tensor], Tensor]]  # compiler -> a function to be called


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(5, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).tanh()

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def function(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return compiler(lambda x: (x.sin() * 2 + x.cos()).relu())


def module(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return compiler(Net())


def method(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return compiler(Net().twice)


def autograd_function(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return compiler(lambda x: Cube.apply(x) + x)


def graph_break(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y * x

    return compiler(broken)


def checkpointed(use_reentrant: bool) -> Make:
    def make(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        compiled = compiler(Net())
        return lambda x: checkpoint(compiled, x, use_reentrant=use_reentrant)

    return make


def hooked(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    compiled = compiler(Net())

    def call(x: Tensor) -> Tensor:
        y = compiled(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y

    return call


def inside_vmap_and_grad(compiler: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return compiler(lambda x: torch.vmap(torch.func.grad(lambda row: row.sin().prod()))(x) * x)


KINDS: dict[str, Make] = {
    "function": function,
    "module": module,
    "method": method,
    "autograd function": autograd_function,
    "graph break": graph_break,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "hook": hooked,
    "vmap and grad": inside_vmap_and_grad,
}


def results(step: Callable[[Tensor], Tensor], index: int) -> list[Tensor]:
    found = []
    for number in range(4):
        generator = torch.Generator().manual_seed(100 * index + number)
        x = torch.randn(2 + number % 2, 5, generator=generator, requires_grad=True)  # two shapes, in turn
        y = step(x)
        y.square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("contexts", [True, False], ids=["contexts", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_what_eager_code_gives(kind: str, contexts: bool, shared: bool) -> None:
    def compiler(fn: Callable[..., Any]) -> Callable[..., Any]:
        options = {"dynamic": True} if kind == "function" else {}
        return graphsafe.compile(fn, backend="aot_eager", fullgraph=kind in ("module", "vmap and grad"), **options)

    one = KINDS[kind](compiler)

    def body(index: int) -> list[Tensor]:
        step = one if shared else KINDS[kind](compiler)
        if not contexts:
            return results(step, index)
        with graphsafe.thread_context("cpu", seed=index):
            return results(step, index)

    eager = KINDS[kind](lambda fn: fn)
    num_threads = NUM_THREADS if shared else 4
    for index, found in enumerate(run_threads(num_threads, body, 100)):
        for got, want in zip(found, results(eager, index), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_threads_step_compiled_optimizers_of_their_own() -> None:
    def train(index: int, compiler: Callable[..., Any]) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = compiler(optimizer.step)
        for number in range(3):
            x = torch.full((2, 5), float(index + number))
            model(x).square().sum().backward()
            step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    compiled = run_threads(4, lambda index: train(index, lambda fn: graphsafe.compile(fn, backend="eager")), 100)
    for index, found in enumerate(compiled):
        for got, want in zip(found, train(index, lambda fn: fn), strict=True):
            torch.testing.assert_close(got, want)
