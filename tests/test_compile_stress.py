"""A11: many threads compile many small functions for the first time at once, their own and shared ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphsafe.compile import install, installed, uninstall
from tests.helpers import run_threads

NUM_THREADS = 8
NUM_SHARED = 3
NUM_OWN = 2
NUM_INPUTS = 3  # each needs an entry of its own
TIMEOUT_S = 100.0

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    """The repairs are in, and nothing is compiled yet."""
    import torch._dynamo

    was_installed = bool(installed())
    torch._dynamo.reset()  # never beside a compile
    install()
    yield
    torch._dynamo.reset()
    if not was_installed:
        uninstall()


def make_function(index: int) -> Function:
    """A function with a code object of its own, so that it shares no compiled entry with another one.

    It says that it comes from this file: Dynamo compiles a function without a file inside a frame that all of them
    share, and gives up at the recompile limit.
    """
    namespace: dict[str, Any] = {"torch": torch}
    body = f"def f(x):\n    y = torch.sin(x) * {index}\n    return y + x.shape[0] if x.dim() > 1 else y - {index}\n"
    exec(compile(body, __file__, "exec"), namespace)
    return namespace["f"]


def inputs(seed: int) -> list[torch.Tensor]:
    """A vector, a matrix, and a vector with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.rand(3, generator=generator)
    return [vector, torch.rand(2, 3, generator=generator), vector.clone().requires_grad_()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_eight_threads_compile_their_own_and_shared_functions_first_at_once(backend: str) -> None:
    num_graphs = itertools.count()

    def counted(graph_module: Any, example_inputs: Any) -> Any:
        next(num_graphs)
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    shared = [make_function(index) for index in range(NUM_SHARED)]
    compiled_shared = [torch.compile(fn, backend=counted) for fn in shared]

    def body(thread: int) -> int:
        own = [make_function(NUM_SHARED + thread * NUM_OWN + index) for index in range(NUM_OWN)]
        # Each thread makes its own torch.compile of one shared function too: one code object, many callables.
        pairs = list(zip(shared, compiled_shared, strict=True))
        pairs += [(fn, torch.compile(fn, backend=counted)) for fn in (*own, shared[thread % NUM_SHARED])]
        random.Random(thread).shuffle(pairs)
        num_calls = 0
        for plain, compiled in pairs:
            for x in inputs(thread):
                result = compiled(x)
                assert torch.equal(result, plain(x)), f"thread {thread}"
                if x.requires_grad:
                    (gradient,) = torch.autograd.grad(result.sum(), x)
                    (expected,) = torch.autograd.grad(plain(x).sum(), x)
                    assert torch.equal(gradient, expected), f"thread {thread}"
                num_calls += 1
        return num_calls

    num_calls = NUM_THREADS * (NUM_SHARED + NUM_OWN + 1) * NUM_INPUTS
    assert sum(run_threads(NUM_THREADS, body, TIMEOUT_S)) == num_calls
    assert next(num_graphs) >= (NUM_SHARED + NUM_THREADS * NUM_OWN) * NUM_INPUTS, "some ran without being compiled"


def test_eight_threads_compile_one_module_and_train_copies_of_it_first_at_once() -> None:
    shared = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    compiled = torch.compile(shared, backend="aot_eager")
    x = torch.rand(5, 3)
    expected = shared(x)

    def body(thread: int) -> None:
        own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        own.load_state_dict(shared.state_dict())
        own_compiled = torch.compile(own, backend="aot_eager")
        assert torch.allclose(compiled(x), expected)
        for module in (own_compiled, own):
            own.zero_grad()
            module(x).sum().backward()
            gradients = [parameter.grad.clone() for parameter in own.parameters() if parameter.grad is not None]
            assert len(gradients) == 4
            if module is own_compiled:
                compiled_gradients = gradients
        assert all(torch.allclose(*pair) for pair in zip(compiled_gradients, gradients, strict=True))

    run_threads(NUM_THREADS, body, TIMEOUT_S)
