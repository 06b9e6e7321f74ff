"""lint on real devices: it finds what a capture on the GPU refuses, and the GPU captures what it lets pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsafe as gs

from .. import test_lint as on_cpu

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
# Work of the CPU alone: a capture takes it, and every replay goes on with the old numbers.
SILENT = ("generator made inside", "random numbers read")
# What the capture itself cannot show: it needs an optimizer of ours or a torch that captures recomputed dropout.
NOT_ALONE = ("capturable Adam", "checkpoint")


@pytest.fixture(autouse=True)
def tables_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INDEX", "WEIGHT", "SQUARE"):
        monkeypatch.setattr(on_cpu, name, getattr(on_cpu, name).to(DEVICE))
    monkeypatch.setattr(on_cpu, "OTHER_GENERATOR", torch.Generator(DEVICE))


def values() -> torch.Tensor:
    return on_cpu.values().to(DEVICE)


@pytest.mark.parametrize(("name", "fn", "op", "fix"), on_cpu.OPERATORS, ids=on_cpu.names(on_cpu.OPERATORS))
def test_lint_finds_on_a_gpu_what_it_finds_on_the_cpu_and_a_capture_refuses_it(
    name: str, fn: Any, op: str, fix: str
) -> None:
    if name in ("numpy", "numpy.asarray"):
        pytest.skip("torch raises for tensors of a GPU")
    findings = gs.lint(fn, values())
    assert any(op in finding.op and fix in finding.fix for finding in findings), findings
    if name in SILENT:
        return
    with gs.thread_context(DEVICE):
        x = values()
        with pytest.raises(RuntimeError), gs.capture():
            fn(x)
        with gs.capture() as graph:
            y = x * 2
        graph.replay()
        assert torch.equal(y, x * 2)


@pytest.mark.parametrize(("name", "fn"), on_cpu.GOOD, ids=on_cpu.names(on_cpu.GOOD))
def test_a_gpu_captures_what_lint_lets_pass(name: str, fn: Any) -> None:
    if name == "packed sequence":
        pytest.skip("its lengths are copied from the CPU")
    assert gs.lint(fn, values()) == []
    if name in NOT_ALONE:
        return
    with gs.thread_context(DEVICE) as context:
        x = values()
        with context.eager():
            fn(x)  # libraries are loaded outside
        with gs.capture() as graph:
            fn(x)
        graph.replay()


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("host to device", lambda x: torch.arange(6).to(x.device) * x),
        ("values on the device", lambda x: torch.tensor([1.0, 2.0], device=x.device)),
        ("new_tensor", lambda x: x.new_tensor([1.0, 2.0])),
        ("list index", lambda x: x[[0, 2]]),
        ("copy_ back", lambda x: torch.empty(6).copy_(x)),
        ("to cpu", lambda x: x.to("cpu")),
        ("a tensor at masked places", lambda x: x.__setitem__(x > 0, x.sum())),
    ],
)
def test_a_capture_refuses_copies_that_lint_finds(name: str, fn: Any) -> None:
    assert gs.lint(fn, values()), name
    with gs.thread_context(DEVICE):
        x = values()
        with pytest.raises(RuntimeError), gs.capture():
            fn(x)


def test_lint_leaves_the_devices_generator_and_tensors_as_they_were() -> None:
    weight = torch.nn.Parameter(values())
    state = torch.cuda.get_rng_state(DEVICE)

    def fn(x: torch.Tensor) -> None:
        x.add_(torch.rand_like(x))
        (weight * x).sum().backward()

    x = values()
    assert gs.lint(fn, x) == []
    assert torch.equal(x, values()) and weight.grad is None
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)
