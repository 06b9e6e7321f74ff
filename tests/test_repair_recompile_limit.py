"""A13: a function that reaches the recompile limit is named."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import graphsafe
from graphsafe.errors import GraphsafeWarning
from tests.helpers import plain_torch, run_threads


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield


def too_many_shapes(x: Tensor) -> Tensor:
    return x * 2


def call_with_many_shapes(fullgraph: bool = False) -> list[warnings.WarningMessage]:
    compiled = torch.compile(too_many_shapes, backend="eager", dynamic=False, fullgraph=fullgraph)
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=3):
        warnings.simplefilter("always")
        for size in range(2, 9):
            try:
                assert compiled(torch.ones(size)).sum() == 2 * size
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                assert fullgraph
    return [warning for warning in caught if issubclass(warning.category, GraphsafeWarning)]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_function_that_reaches_the_limit_is_named_once_and_not_by_plain_torch(fullgraph: bool) -> None:
    assert call_with_many_shapes(fullgraph) == []
    torch._dynamo.reset()
    graphsafe.install()
    (warning,) = call_with_many_shapes(fullgraph)
    assert "too_many_shapes (" in str(warning.message) and __file__ in str(warning.message)
    assert call_with_many_shapes(fullgraph) == []


def test_stats_tell_how_often_a_function_was_compiled() -> None:
    graphsafe.install()
    call_with_many_shapes()
    what = next(what for what in graphsafe.stats().compiles if what.startswith("too_many_shapes ("))
    before = graphsafe.stats().compiles[what]
    assert before >= 3
    assert f"compiled {before} times: {what}" in str(graphsafe.stats())


def test_stats_count_what_threads_compile_together_once_and_name_modules() -> None:
    graphsafe.install()

    class Doubling(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def alone(x: Tensor) -> Tensor:
        return x + 3

    before = graphsafe.stats().compiles
    compiled = [torch.compile(one, backend="eager") for one in (Doubling(), alone, torch.nn.Sequential(Doubling()))]
    for one in compiled:
        run_threads(4, lambda _, one=one: one(torch.ones(2)))
    names = ("Doubling.forward (", "alone (", "Sequential")
    found = {name: 0 for name in names}
    for what, times in graphsafe.stats().compiles.items():
        for name in names:
            found[name] += (times - before.get(what, 0)) if name in what else 0
    assert found == dict.fromkeys(names, 1)
