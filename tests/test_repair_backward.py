"""A3: a backward stays in the thread that calls it. (That it leaves it on plain torch only a GPU shows.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphsafe.compile import install, installed, uninstall
from graphsafe.repairs import backward_confinement
from tests.helpers import plain_torch


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield


class Look(torch.autograd.Function):
    """Notes in which thread backward runs, and whether autograd may use others."""

    seen: ClassVar[list[tuple[int, bool]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Look.seen.append((threading.get_ident(), torch._C._is_multithreading_enabled()))
        return gradient * 2


def look(call: str) -> list[bool]:
    """Whether autograd's threads were on, in each backward of one call."""
    Look.seen.clear()
    x = torch.ones(3, requires_grad=True)
    match call:
        case "backward":
            Look.apply(x).sum().backward()
        case "autograd.backward":
            torch.autograd.backward([Look.apply(x).sum()])
        case "grad":
            torch.autograd.grad(Look.apply(x).sum(), x)
        case "checkpoint":
            checkpoint(lambda y: Look.apply(y), x, use_reentrant=False).sum().backward()
        case "reentrant":
            checkpoint(lambda y: Look.apply(y), x, use_reentrant=True).sum().backward()
    assert [ident for ident, _ in Look.seen] == [threading.get_ident()]
    return [on for _, on in Look.seen]


CALLS = ["backward", "autograd.backward", "grad", "checkpoint", "reentrant"]


@pytest.mark.parametrize("call", CALLS)
def test_every_way_into_a_backward_is_confined_under_install_and_is_not_on_plain_torch(call: str) -> None:
    assert look(call) == [True]
    install()
    assert installed()["A3"] == "repaired"
    assert look(call) == [False]
    assert torch._C._is_multithreading_enabled()
    uninstall()
    assert look(call) == [True]


def test_confinement_ends_after_a_backward_that_fails() -> None:
    install()

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("planted")

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert torch._C._is_multithreading_enabled()


def test_a_backward_inside_a_confined_thread_leaves_it_confined() -> None:
    install()
    with torch.autograd.set_multithreading_enabled(False):
        assert look("backward") == [False]
        assert not torch._C._is_multithreading_enabled()


def test_second_derivatives_and_graph_retention_work_as_before() -> None:
    install()
    x = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad(x**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, retain_graph=True)
    assert (first.item(), second.item()) == (12.0, 12.0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()


def test_a_function_with_a_backward_inside_compiles_under_install() -> None:
    install()

    def step(x: Tensor) -> Tensor:
        loss = (x * x).sum()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    x = torch.ones(3, requires_grad=True)
    assert compiled(x).item() == 3
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


def test_undo_puts_the_very_code_back() -> None:
    entry = torch.autograd.graph._engine_run_backward
    code = entry.__code__
    backward_confinement.repair(torch.autograd.graph)
    assert entry.__code__ is not code
    backward_confinement.undo()
    assert torch.autograd.graph._engine_run_backward is entry and entry.__code__ is code
