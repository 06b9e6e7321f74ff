"""A23: forwards of DistributedDataParallel beside compiles of other threads."""

from __future__ import annotations

import datetime
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphsafe
from graphsafe.repairs import active_ddp
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, join_threads, plain_torch

DDP: Any = nn.parallel.DistributedDataParallel
WIDTH = 600  # so that a layer fills a bucket of a mebibyte


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield
        DDP._active_ddp_module = None


def group() -> Any:
    """A group of this process alone, that is not the world."""
    made = dist.ProcessGroup(store := dist.HashStore(), 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=DEADLINE_S))
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


class Waits(nn.Module):
    """Two layers, of which the forward waits before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not torch.compiler.is_compiling():
            self.inside.set()
            assert self.go_on.wait(DEADLINE_S)
        return self.second(y)


def wrapped(module: nn.Module) -> Any:
    return DDP(module, process_group=group(), bucket_cap_mb=1)


def replicated(module: nn.Module) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=group(), bucket_cap_mb=1)


def pieces(compiled_in: Callable[[Callable[[], None]], None]) -> int:
    """How many graphs the backend gets of one function, compiled as ``compiled_in`` says."""
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(net, backend=backend)
    compiled_in(lambda: compiled(torch.ones(2, WIDTH)))
    return len(graphs)


def beside(make: Callable[[nn.Module], Any]) -> Callable[[Callable[[], None]], None]:
    def run(compiles: Callable[[], None]) -> None:
        module = Waits()
        model = make(module)
        thread = threading.Thread(target=model, args=(torch.ones(2, WIDTH),))
        thread.start()
        try:
            assert module.inside.wait(DEADLINE_S)
            compiles()
        finally:
            module.go_on.set()
            join_threads([thread])

    return run


@pytest.mark.parametrize("make", [wrapped, replicated])
def test_a_compile_beside_another_threads_forward_is_whole_and_in_pieces_on_plain_torch(make: Any) -> None:
    if SHOWS_FAULTS:
        assert pieces(beside(make)) > 1, "the pinned torch no longer shows the fault: the test is no proof any more"
        DDP._active_ddp_module = None
    torch._dynamo.reset()
    graphsafe.install()
    assert pieces(beside(make)) == 1
    assert DDP._get_active_ddp_module() is None and DDP._active_ddp_module is None


@pytest.mark.parametrize("make", [wrapped, replicated])
def test_a_models_own_forward_is_still_compiled_in_its_buckets(make: Any) -> None:
    if not active_ddp.probe(importlib.import_module(active_ddp.MODULES[make is replicated])):
        pytest.skip("this torch notes no such forward")
    graphsafe.install()
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    model = make(Waits())
    torch.compile(model, backend=backend)(torch.ones(2, WIDTH)).sum().backward()
    assert len(graphs) > 1
    assert DDP._get_active_ddp_module() is None


def overlap() -> None:
    """The forwards of two threads, of which the one that began first ends first."""
    modules = [Waits(), Waits()]
    threads = []
    for module in modules:
        threads.append(threading.Thread(target=wrapped(module), args=(torch.ones(2, WIDTH),)))
        threads[-1].start()
        assert module.inside.wait(DEADLINE_S)
    for module, thread in zip(modules, threads, strict=True):
        module.go_on.set()
        join_threads([thread])


def test_overlapping_forwards_leave_nothing_behind_and_a_model_for_good_on_plain_torch() -> None:
    if SHOWS_FAULTS:
        overlap()
        assert DDP._get_active_ddp_module() is not None
        assert pieces(lambda compiles: compiles()) > 1
        DDP._active_ddp_module = None
    torch._dynamo.reset()
    graphsafe.install()
    overlap()
    assert DDP._get_active_ddp_module() is None
    assert pieces(lambda compiles: compiles()) == 1


def test_forwards_inside_a_forward_note_the_inner_model_and_then_the_outer_one() -> None:
    graphsafe.install()
    seen = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(DDP._get_active_ddp_module())
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped(Inner(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            seen.append(DDP._get_active_ddp_module())
            return y

    model = wrapped(Outer())
    model(torch.ones(2, WIDTH))
    assert seen == [model.module.inner, model]


def test_probe_and_undo() -> None:
    originals = {name: vars(DDP)[name] for name in ("_inside_ddp_forward", "_get_active_ddp_module")}
    assert active_ddp.probe(torch.nn.parallel.distributed)
    graphsafe.install()
    assert graphsafe.installed()["A23"] in ("repaired", "pending")
    assert all(vars(DDP)[name] is not original for name, original in originals.items())
    graphsafe.uninstall()
    assert all(vars(DDP)[name] is original for name, original in originals.items())
