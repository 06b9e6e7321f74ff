"""A15: one compile for all threads that make a first call together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from graphsafe.compile import install
from graphsafe.errors import GraphsafeWarning
from graphsafe.repairs import one_flight
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, plain_torch, run_threads, threads_in_dynamo

NUM_THREADS = 8


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        counters.clear()
        yield


class Backend:
    """Compiles nothing. Its first compile, or each, goes on once every thread has come to Dynamo: all saw a miss."""

    def __init__(self, num_threads: int = NUM_THREADS, each: bool = False) -> None:
        self.num_threads, self.each, self.compiles = num_threads, each, 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiles += 1
        deadline = time.monotonic() + DEADLINE_S
        while (self.each or self.compiles == 1) and threads_in_dynamo() < self.num_threads:
            assert time.monotonic() < deadline, "not all threads came to Dynamo"
            time.sleep(0.001)
        return gm.forward


def whole(x: Tensor) -> Tensor:
    return x.sin().cos()


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def compiles_of(function: Callable[[Tensor], Tensor]) -> int:
    backend = Backend()
    compiled = torch.compile(function, backend=backend, fullgraph=function is whole)
    x = torch.arange(3.0)
    for result in run_threads(NUM_THREADS, lambda _: compiled(x)):
        assert torch.equal(result, x.sin().cos())
    return backend.compiles


def test_eight_first_calls_compile_once_and_eight_times_on_plain_torch() -> None:
    plain = compiles_of(whole)
    if SHOWS_FAULTS:
        assert plain == NUM_THREADS, "the pinned torch no longer shows the fault: the test is no proof any more"
    torch._dynamo.reset()
    install()
    assert compiles_of(whole) == 1


def test_eight_first_calls_compile_each_part_of_a_broken_graph_once() -> None:
    install()
    assert compiles_of(broken) == 2


def test_what_stood_in_for_an_artefact_costs_no_recompile_limit_and_no_later_compile() -> None:
    install()
    backend = Backend()
    compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False, fullgraph=True)
    run_threads(NUM_THREADS, lambda _: compiled(torch.ones(3)))
    assert backend.compiles == 1
    limit = torch._dynamo.config.recompile_limit
    for size in range(4, 3 + limit):  # with the first one as many as the limit allows
        assert compiled(torch.ones(size)).shape == (size,)
    assert backend.compiles == limit
    for _ in range(2):
        compiled(torch.ones(3))
    assert backend.compiles == limit


def test_what_stood_in_for_artefacts_costs_nothing_of_the_limit_of_all_artefacts_together() -> None:
    install()
    backend = Backend(each=True)
    compiled = torch.compile(lambda x: x * 3, backend=backend, dynamic=False, fullgraph=True)

    def call(size: int) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=100, accumulated_recompile_limit=6):  # type: ignore[no-untyped-call, unused-ignore]
            return compiled(torch.ones(size))

    for size in range(3, 9):  # as many artefacts as the limit allows, with seven that stand in for each
        for result in run_threads(NUM_THREADS, lambda _, size=size: call(size)):  # type: ignore[misc]
            assert torch.equal(result, torch.full((size,), 3.0))
    assert backend.compiles == 6
    backend.num_threads = 1
    with pytest.warns(GraphsafeWarning, match="recompile limit"), pytest.raises(Exception, match=r"limit|fullgraph"):
        call(9)


def test_an_artefact_that_goes_out_of_use_as_it_is_found_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    never, found = one_flight._never, []

    def goes_out_of_use(guards: Any, like: Any) -> Any:
        """Between an artefact's guards, which the call has passed, and its use."""
        made = never(guards, like)
        if getattr(like, "cache_entry", None) is not None:
            found.append(like)
            like.extra_state.invalidate(like.cache_entry, guards.DeletedGuardManagerWrapper("for this test"))
        return made

    monkeypatch.setattr(one_flight, "_never", goes_out_of_use)
    compiles_of(whole)  # checks the results
    assert found


def test_threads_with_other_shapes_compile_their_own() -> None:
    install()
    backend = Backend()
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=False, fullgraph=True)
    for index, result in enumerate(run_threads(NUM_THREADS, lambda i: compiled(torch.ones(3 + i % 2)))):
        assert torch.equal(result, torch.full((3 + index % 2,), 2.0))
    assert backend.compiles == 2


def test_functions_compiled_with_other_settings_do_not_take_each_others_artefacts() -> None:
    install()
    backends = [Backend(1), Backend(1)]

    def function(x: Tensor) -> Tensor:
        return x - 1

    for backend in backends:
        torch.compile(function, backend=backend)(torch.ones(2))
    assert [backend.compiles for backend in backends] == [1, 1]


def test_a_first_call_that_fails_to_compile_fails_in_each_thread_with_its_own_error() -> None:
    install()

    def refuses(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        raise ZeroDivisionError("planted")

    compiled = torch.compile(lambda x: x + 1, backend=refuses)
    failures = []

    def body(_: int) -> None:
        try:
            compiled(torch.ones(2))
        except Exception as error:
            failures.append(str(error))

    run_threads(4, body)
    assert len(failures) == 4 and all("planted" in text for text in failures)


def test_eight_first_backwards_compile_one_backward() -> None:
    install()
    backwards: list[int] = []

    def forward_compiler(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        return gm.forward

    def backward_compiler(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        backwards.append(threading.get_ident())
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler)
    compiled = torch.compile(lambda x: x.sin().sum(), backend=backend, dynamic=False)
    together = threading.Barrier(NUM_THREADS)

    def body(index: int) -> Tensor:
        x = torch.full((3,), float(index), requires_grad=True)
        loss = compiled(x)
        together.wait(DEADLINE_S)  # all forwards have run, none of the backwards
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    for index, gradient in enumerate(run_threads(NUM_THREADS, body)):
        assert torch.allclose(gradient, torch.full((3,), float(index)).cos())
    assert len(backwards) <= 1  # none, where this torch compiles backwards with their forwards and lazily not at all


def test_a_file_that_is_imported_twice_keeps_its_functions_apart() -> None:
    """Their code is equal, and their globals are not."""
    install()
    source = "import torch\ndef f(x):\n    return x.sin() + K\n"
    first, second = {"K": 1}, {"K": 2}
    for names in (first, second):
        exec(compile(source, "twice.py", "exec"), names)
    x = torch.zeros(2)
    for names in (first, second, first):
        assert torch.compile(names["f"], backend="eager")(x).tolist() == [names["K"]] * 2  # type: ignore[operator]


def test_an_artefact_is_gone_after_a_reset() -> None:
    install()

    def call(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    compiled = torch.compile(call, backend="eager")
    for number in range(30):  # each closure may lie where the one before it lay
        function = _adding(number)
        assert compiled(torch.zeros(1), function).item() == number
        torch._dynamo.reset()
        del function


def _adding(number: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x + number
