"""compile(): torch.compile's arguments and results, from one thread and from many."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphsafe.compile import compile, install, installed, uninstall
from tests.helpers import DEADLINE_S, run_threads


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Each test starts on plain torch, and leaves it as it was."""
    was_installed = bool(installed())
    uninstall()
    yield
    uninstall()
    if was_installed:
        install()


def test_compile_installs_the_repairs() -> None:
    assert not installed()
    compile(lambda x: x, backend="eager")
    assert installed()["A2"] == "repaired"


def test_compile_has_torchs_arguments_and_defaults() -> None:
    ours, torchs = inspect.signature(compile).parameters, inspect.signature(torch.compile).parameters
    for name, parameter in ours.items():
        if name == "backend":  # newer torch writes None for it
            assert parameter.default == "inductor"
        elif name != "kwargs":
            assert (parameter.kind, parameter.default) == (torchs[name].kind, torchs[name].default)


def test_compile_passes_every_argument_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(
        model: Any = None, *, fullgraph: Any, dynamic: Any, backend: Any, mode: Any, options: Any, newer: Any
    ) -> Any:
        seen.update(locals())
        return model

    monkeypatch.setattr(torch, "compile", spy)

    def model(x: torch.Tensor) -> torch.Tensor:
        return x

    options = {"a": 1}
    given = {"fullgraph": True, "dynamic": False, "backend": "eager", "mode": None, "options": options, "newer": 3}
    assert compile(model, **given) is model  # type: ignore[call-overload]
    assert {name: seen[name] for name in given} == given
    assert seen["model"] is model


def test_compile_is_a_decorator_with_and_without_arguments() -> None:
    @compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x * 2

    @compile(backend="eager")
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice x.")
    module = compile(torch.nn.Linear(2, 2), backend="eager")
    assert isinstance(module, torch.nn.Module)
    assert module(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("model", [3, "f", torch.ones(2)])
def test_compile_refuses_what_is_no_function(model: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(model).__name__}"):
        compile(model)
    assert not installed()


def test_compile_names_an_argument_that_this_torch_does_not_know() -> None:
    with pytest.raises(TypeError, match=r"'fulgraph'.*knows fullgraph"):
        compile(lambda x: x, fulgraph=True)


def test_compile_raises_torchs_errors_for_an_unknown_backend_and_mode() -> None:
    with pytest.raises(Exception, match="nowhere"):
        compile(lambda x: x, backend="nowhere")
    with pytest.raises(RuntimeError, match="neverest"):
        compile(lambda x: x, mode="neverest")
    with pytest.raises(RuntimeError, match="mode"):
        compile(lambda x: x, mode="default", options={})


def test_compile_raises_what_the_function_raises() -> None:
    @compile(backend="eager")
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the function")

    with pytest.raises(ValueError, match="in the function"):
        refuses(torch.ones(2))


def _loss(x: torch.Tensor) -> torch.Tensor:
    """Its compile runs autograd, as flex_attention's does."""
    return (x.tanh() * torch.func.grad(lambda y: y.sin().sum())(x)).sum()


def _gradient(loss: Any, seed: int) -> torch.Tensor:
    x = torch.randn(8, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    loss(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("shared", [True, False])
def test_threads_compile_and_train_at_once_with_the_gradients_of_one_thread(shared: bool) -> None:
    torch._dynamo.reset()
    one = compile(_loss, backend="aot_eager")

    def own() -> Any:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return _loss(x)

        return compile(loss, backend="aot_eager")

    def body(index: int) -> list[torch.Tensor]:
        loss = one if shared else own()
        return [_gradient(loss, 10 * index + step) for step in range(3)]

    gradients = run_threads(4, body)
    for index, steps in enumerate(gradients):
        for step, gradient in enumerate(steps):
            assert torch.allclose(gradient, _gradient(_loss, 10 * index + step), atol=1e-6)


def test_plain_torch_compile_is_repaired_by_install_and_threads_trace_beside_it() -> None:
    install()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    tracing, done = threading.Event(), threading.Event()

    def body(index: int) -> int:
        if index == 0:  # traces for as long as the others call
            traces = 0
            while not done.is_set():
                torch.fx.symbolic_trace(lambda x: x * 2 + 1)
                traces += 1
                tracing.set()
            return traces
        try:
            assert tracing.wait(DEADLINE_S)
            for _ in range(200):
                compiled(torch.ones(2))
        finally:
            if index == 1:
                done.set()
        return 200

    assert min(run_threads(3, body)) > 0
