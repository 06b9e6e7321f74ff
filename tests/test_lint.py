"""lint: what breaks a capture, on which line, by the rules of the CPU's capture pass, and nothing left changed."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe import gate, watch
from graphsafe.recording import Checks
from graphsafe.repairs import private

from .helpers import run_threads

DEADLINE_S = 60.0
np = pytest.importorskip("numpy")
padding = gs.padding
HERE = __file__


def values() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0, -1.0, 0.5, 4.0])


INDEX = torch.tensor([0, 2])
WEIGHT = torch.randn(5, 3)
SQUARE = torch.randn(3, 3) + 3 * torch.eye(3)
ARRAY = np.ones(6, dtype=np.float32)
OTHER_GENERATOR = torch.Generator()

# (name, function of a tensor, what the finding's op has in it, what its fix has in it). The capture pass refuses each.
OPERATORS: list[tuple[str, Callable[[torch.Tensor], Any], str, str]] = [
    ("item", lambda x: x.sum().item(), "Tensor.item", "after the step"),
    ("bool", lambda x: 1 if x.sum() > 0 else 0, "Tensor.__bool__", "torch.where"),
    ("int", lambda x: int(x[0]), "Tensor.__int__", "after the step"),
    ("float", lambda x: float(x[0]), "Tensor.__float__", "after the step"),
    ("tensor as index of a list", lambda x: [1, 2, 3][x.long()[0]], "Tensor.__index__", "after the step"),
    ("slice by a tensor", lambda x: x[: INDEX[1]], "_local_scalar_dense", "after the step"),
    ("contains", lambda x: 3.0 in x, "Tensor.__contains__", "after the step"),
    ("tolist", lambda x: x.tolist(), "Tensor.tolist", "after the step"),
    ("numpy", lambda x: x.numpy(), "Tensor.numpy", "after the step"),
    ("numpy.asarray", lambda x: np.asarray(x), "Tensor.__array__", "after the step"),
    ("repr", lambda x: repr(x), "Tensor.__repr__", "after the step"),
    ("format", lambda x: f"{x.sum():.3f}", "Tensor.__format__", "after the step"),
    ("logging", lambda x: logging.LogRecord("", 0, "", 0, "%s", (x,), None).getMessage(), "__repr__", "after the step"),
    ("cpu", lambda x: x.cpu(), "Tensor.cpu", "after the step"),
    ("equal", lambda x: torch.equal(x, x + 1), "torch.equal", "after the step"),
    ("allclose", lambda x: torch.allclose(x, x + 1), "torch.allclose", "after the step"),
    ("tensor of tensors", lambda x: torch.tensor([x[0], x[1]]), "torch.tensor", "torch.stack"),
    ("one_hot without classes", lambda x: F.one_hot(x.abs().long()), "one_hot", "after the step"),
    ("checked distribution", lambda x: Normal(x, x.abs(), validate_args=True), "__bool__", "validate_args=False"),
    ("clip that raises", lambda x: clip(x, error_if_nonfinite=True), "__bool__", "error_if_nonfinite=False"),
    ("inverse", lambda x: torch.linalg.inv(SQUARE), "torch.linalg.inv", "_ex"),
    ("cholesky", lambda x: torch.linalg.cholesky(SQUARE @ SQUARE.T), "cholesky", "cholesky_ex"),
    ("svd", lambda x: torch.linalg.svd(SQUARE), "svd", "outside the step"),
    ("histc", lambda x: torch.histc(x, 4), "torch.histc", "min and max"),
    ("cond", lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond", "torch.where"),
    ("random numbers read", lambda x: torch.rand(3).tolist(), "Tensor.tolist", "after the step"),
    ("nonzero", lambda x: x.nonzero(), "nonzero", "padding.fixed_nonzero"),
    ("argwhere", lambda x: torch.argwhere(x > 0), "nonzero", "nonzero_static"),
    ("where of one argument", lambda x: torch.where(x > 0), "torch.where", "padding.fixed_nonzero"),
    ("boolean index", lambda x: x[x > 0], "aten.index", "masked_fill"),
    ("mean of a boolean index", lambda x: x[x > 0].mean(), "aten.index", "padding.masked_mean"),
    ("random choice of nonzero", lambda x: x.nonzero()[torch.randperm(3)[:2]], "nonzero", "padding.random_topk"),
    ("masked_select", lambda x: x.masked_select(x > 0), "masked_select", "torch.where"),
    ("unique", lambda x: x.unique(), "_unique2", "torch.sort"),
    ("unique_consecutive", lambda x: x.unique_consecutive(), "unique_consecutive", "torch.sort"),
    ("repeat_interleave", lambda x: x[:2].repeat_interleave(INDEX), "repeat_interleave", "output_size"),
    ("bincount", lambda x: torch.bincount(INDEX), "bincount", "scatter_add_"),
    ("many masked values", lambda x: x.index_put_((x > 0,), x[:5] * 2), "index_put_", "torch.where"),
    ("a tensor at masked places", lambda x: x.__setitem__(x > 0, x.sum()), "__setitem__", "masked_fill_"),
    ("generator made inside", lambda x: torch.rand(2, generator=torch.Generator()), "rand", "default generator"),
    ("another generator", lambda x: x.normal_(generator=OTHER_GENERATOR), "normal_", "default generator"),
]
# What only lint can know: which tensors are the host's. The CPU's capture pass takes its own device for the device.
PLACES: list[tuple[str, Callable[[torch.Tensor], Any], str, str]] = [
    ("to the device", lambda x: torch.arange(6).to(x.device) * x, "Tensor.to", "device=x.device"),
    ("to a tensor's device", lambda x: torch.arange(6).to(x) * x, "Tensor.to", "device=x.device"),
    ("cuda", lambda x: torch.zeros(6).cuda() + x, "Tensor.cuda", "device=x.device"),
    ("to cuda", lambda x: torch.zeros(6).to("cuda") + x, "Tensor.to", "device=x.device"),
    ("scalar to the device", lambda x: torch.tensor(2.0).to(x.device) * x, "Tensor.to", "torch.full"),
    ("computed on the host", lambda x: (torch.arange(6) * 2 + 1).view(2, 3).to(x.device), "Tensor.to", "torch.arange"),
    ("from_numpy to the device", lambda x: torch.from_numpy(ARRAY).to(x.device), "Tensor.to", "inputs"),
    ("from_numpy meets", lambda x: torch.from_numpy(ARRAY) * x, "Tensor.mul", "inputs"),
    ("frombuffer meets", lambda x: torch.frombuffer(bytearray(24), dtype=torch.float32) * x, "Tensor.mul", "inputs"),
    ("zeros meets", lambda x: x + torch.zeros(6), "Tensor.add", "x.new_zeros"),
    ("cat", lambda x: torch.cat([x, torch.zeros(2)]), "torch.cat", "x.new_zeros"),
    ("embedding of a literal", lambda x: F.embedding(torch.tensor([1, 2]), WEIGHT), "embedding", "device=x.device"),
    ("noise", lambda x: x + torch.randn(6), "Tensor.add", "device=x.device"),
    ("host index", lambda x: x[torch.tensor([0, 2])], "aten.index", "device=x.device"),
    ("copy_", lambda x: x.copy_(torch.ones(6)), "Tensor.copy_", "device=x.device"),
    ("copy_ back", lambda x: torch.empty(6).copy_(x), "Tensor.copy_", "after the step"),
    ("to cpu", lambda x: x.to("cpu"), "Tensor.to", "after the step"),
    ("to torch.device of cpu", lambda x: x.to(torch.device("cpu")), "Tensor.to", "after the step"),
    ("named cpu", lambda x: x + torch.zeros(6, device="cpu"), "Tensor.add", "device=x.device"),
    ("values on the device", lambda x: torch.tensor([1.0, 2.0], device=x.device), "torch.tensor", "torch.full"),
    ("as_tensor", lambda x: torch.as_tensor(ARRAY, device=x.device), "torch.as_tensor", "inputs"),
    ("new_tensor", lambda x: x.new_tensor([1.0, 2.0]), "Tensor.new_tensor", "torch.full"),
    ("list index", lambda x: x[[0, 2]], "Tensor.__getitem__", "slices"),
    ("array index", lambda x: x[np.array([0, 2])], "Tensor.__getitem__", "slices"),
    ("module made inside", lambda x: nn.Linear(6, 2)(x), "linear", "device=x.device"),
]
CALLS: list[tuple[str, Callable[[torch.Tensor], Any], str, str]] = [
    ("manual_seed", lambda x: torch.manual_seed(0), "torch.manual_seed", "Seed before"),
    ("seed", lambda x: torch.seed(), "torch.seed", "Seed before"),
    ("cuda seed", lambda x: torch.cuda.manual_seed_all(0), "torch.cuda.manual_seed_all", "Seed before"),
    ("empty_cache", lambda x: torch.cuda.empty_cache(), "torch.cuda.empty_cache", "pool of its own"),
    ("SGD", lambda x: stepped(torch.optim.SGD, x), "SGD.step", "fused=True"),
    ("Adagrad", lambda x: stepped(torch.optim.Adagrad, x), "Adagrad.step", "can be captured"),
    ("RMSprop without foreach", lambda x: stepped(torch.optim.RMSprop, x, foreach=False), "RMSprop.step", "foreach"),
    ("Adam not capturable", lambda x: stepped(torch.optim.Adam, x), "Adam.step", "capturable=True"),
    ("reentrant checkpoint", lambda x: recomputed(x, use_reentrant=True), "checkpoint", "use_reentrant=False"),
]
GOOD: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("arithmetic", lambda x: (x * 2 + 1).relu().sum()),
    ("where", lambda x: torch.where(x > 0, x, 0.0)),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 0.0)),
    ("one value at masked places", lambda x: x.__setitem__(x > 0, 0.0)),
    ("the host's scalar at masked places", lambda x: x.__setitem__(x > 0, torch.tensor(1.0))),
    ("integer index", lambda x: x[INDEX] + x[1] + x[1:3]),
    ("fixed_nonzero", lambda x: padding.fixed_nonzero(x > 0, 3)),
    ("random_topk", lambda x: padding.random_topk(x > 0, 2)),
    ("masked_mean", lambda x: padding.masked_mean(x, x > 0)),
    ("nonzero_static", lambda x: torch.nonzero_static(x > 0, size=3)),
    ("repeat_interleave with a size", lambda x: x[:2].repeat_interleave(INDEX, output_size=2)),
    ("repeat_interleave by a number", lambda x: x.repeat_interleave(2)),
    ("one_hot with classes", lambda x: F.one_hot(x.abs().long(), 5)),
    ("quantile", lambda x: torch.quantile(x, 0.5) + torch.quantile(x, INDEX / 4.0).sum()),
    ("histc with a range", lambda x: torch.histc(x, 4, -1, 4)),
    ("inv_ex", lambda x: torch.linalg.inv_ex(SQUARE).inverse),
    ("unchecked distribution", lambda x: Normal(x, x.abs(), validate_args=False).rsample()),
    ("shapes", lambda x: x.view(x.shape[0] // 2, -1).sum() * len(x)),
    ("dropout", lambda x: F.dropout(x, 0.5)),
    ("default generator by name", lambda x: torch.rand(2, generator=torch.default_generator)),
    ("factories of the device", lambda x: x + torch.zeros(6, device=x.device) + torch.arange(6, device=x.device)),
    ("factories of a cuda device", lambda x: x + torch.full((6,), 2.0, device="cuda")),
    ("moved where it is", lambda x: x.cuda() + x.to("cuda", torch.float32) + x.to(torch.device("cuda"))),
    ("no values", lambda x: torch.cat([torch.tensor([], device=x.device), x])),
    ("new and like", lambda x: x + x.new_zeros(6) + torch.randn_like(x)),
    ("scalars of the host", lambda x: x * torch.tensor(2.0) + torch.ones(())),
    ("constants read", lambda x: x * sum(torch.linspace(0, 1, 3).tolist()) * torch.tensor([1, 2]).prod().item()),
    ("the host alone", lambda x: torch.arange(6) + torch.zeros(6)),
    ("packed sequence", lambda x: nn.utils.rnn.pack_padded_sequence(x.view(6, 1, 1), [6])),
    ("clip", lambda x: clip(x)),
    ("checkpoint", lambda x: recomputed(x, use_reentrant=False)),
    ("capturable Adam", lambda x: stepped(torch.optim.Adam, x, capturable=True, foreach=False)),
]


def clip(x: torch.Tensor, **options: Any) -> torch.Tensor:
    weight = nn.Parameter(x.clone())
    (weight * 2).sum().backward()
    return nn.utils.clip_grad_norm_([weight], 1.0, **options)


def stepped(kind: Any, x: torch.Tensor, **options: Any) -> None:
    capturable, options = options.pop("capturable", False), options
    weight = nn.Parameter(x.clone())
    optimizer = kind([weight], **options)
    if capturable:  # torch's CPU step does not run so
        optimizer.param_groups[0]["capturable"] = True
        weight.grad = None
    else:
        (weight * 2).sum().backward()
    optimizer.step()


def recomputed(x: torch.Tensor, use_reentrant: bool) -> None:
    x = x.clone().requires_grad_()
    checkpoint(lambda t: F.dropout(t * 2, 0.5), x, use_reentrant=use_reentrant).sum().backward()


def names(table: list[Any]) -> list[str]:
    return [row[0] for row in table]


def found(fn: Callable[..., Any], *args: Any) -> list[tuple[str, int]]:
    return [(finding.op, finding.line - fn.__code__.co_firstlineno) for finding in gs.lint(fn, *args)]


# what is found


@pytest.mark.parametrize(("name", "fn", "op", "fix"), OPERATORS + PLACES, ids=names(OPERATORS + PLACES))
def test_lint_finds_the_operation_and_names_line_and_cure(name: str, fn: Any, op: str, fix: str) -> None:
    findings = gs.lint(fn, values())
    assert findings, name
    first = next(finding for finding in findings if op in finding.op)
    here = (HERE, fn.__code__.co_firstlineno)
    assert (first.file, first.line) == here or name == "clip that raises"
    assert fix in first.fix, first.fix
    others = {finding.op for finding in findings} - {first.op}
    assert len(others) <= (name in ("random choice of nonzero", "many masked values")), findings


@pytest.mark.parametrize(("name", "fn", "op", "fix"), CALLS, ids=names(CALLS))
def test_lint_finds_calls_that_no_operator_shows(name: str, fn: Any, op: str, fix: str) -> None:
    findings = gs.lint(fn, values())
    assert len(findings) == 1, findings
    assert op in findings[0].op and fix in findings[0].fix and findings[0].file == HERE


@pytest.mark.parametrize(("name", "fn"), GOOD, ids=names(GOOD))
def test_lint_finds_nothing_in_what_can_be_captured(name: str, fn: Any) -> None:
    assert gs.lint(fn, values()) == []


@pytest.mark.parametrize(("name", "fn", "op", "fix"), OPERATORS, ids=names(OPERATORS))
def test_the_capture_pass_refuses_what_lint_finds_with_the_same_line_and_cure(
    name: str, fn: Any, op: str, fix: str
) -> None:
    first = gs.lint(fn, values())[0]
    x = values()
    with gs.thread_context("cpu"), pytest.raises(gs.CaptureError) as caught, gs.capture():
        fn(x)
    assert caught.value.location == f"{first.file}:{first.line}" and caught.value.cure == first.fix
    operation = str(caught.value.operation).split(" in `")[0].removesuffix(".default").rsplit(".", 1)[-1]
    assert operation in first.op or operation in ("Tensor", "Tensor_", "generator", "_local_scalar_dense"), first.op


LEGAL_ON_CPU = [row for row in PLACES if "cuda" not in row[0]]


@pytest.mark.parametrize(("name", "fn"), [row[:2] for row in LEGAL_ON_CPU], ids=names(LEGAL_ON_CPU))
def test_the_capture_pass_takes_its_own_device_for_the_device(name: str, fn: Any) -> None:
    x = values()
    with gs.thread_context("cpu"), gs.capture():
        fn(x)


GOOD_ON_CPU = [row for row in GOOD if row[0] not in ("factories of a cuda device", "moved where it is")]


@pytest.mark.parametrize(("name", "fn"), GOOD_ON_CPU, ids=names(GOOD_ON_CPU))
def test_the_capture_pass_refuses_nothing_that_lint_lets_pass(name: str, fn: Any) -> None:
    x = values()
    with gs.thread_context("cpu"), gs.capture():
        fn(x)


@pytest.mark.parametrize("name", ["item", "tolist", "nonzero", "boolean index", "inverse", "another generator"])
def test_a_train_step_on_the_cpu_refuses_what_lint_finds_in_its_loss(name: str) -> None:
    bad = next(row[1] for row in OPERATORS if row[0] == name)
    weight = nn.Parameter(values())

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        bad((x * weight.detach()).clone())
        return (x * weight).sum()

    first = gs.lint(loss_fn, values())[0]
    step = gs.TrainStep(loss_fn, torch.optim.Adam([weight]), num_warmup_iters=1)
    with gs.thread_context("cpu"):
        step(values())
        with pytest.raises(gs.CaptureError) as caught:
            step(values())
    assert caught.value.location == f"{first.file}:{first.line}" and caught.value.cure == first.fix


def test_a_synchronize_is_named_even_where_there_is_no_device_to_wait_for() -> None:
    def fn(x: torch.Tensor) -> None:
        x.sum().item()
        torch.cuda.synchronize()

    try:
        texts = [str(finding) for finding in gs.lint(fn, values())]
    except (AssertionError, RuntimeError) as exc:  # torch's own, without CUDA
        texts = exc.__notes__
    start = fn.__code__.co_firstlineno
    assert len(texts) == 2 and f"{HERE}:{start + 2}: torch.cuda.synchronize: " in texts[1]


def test_lint_reports_everything_in_one_run_and_each_operator_and_line_once() -> None:
    calls = []

    def fn(x: torch.Tensor) -> None:
        calls.append(1)
        for _ in range(3):
            x.sum().item()
            x.nonzero()
        x.tolist()

    start = fn.__code__.co_firstlineno
    lines = [finding.line - start for finding in gs.lint(fn, values())]
    assert lines == [3, 4, 5] and len(calls) == 1


def test_lint_of_a_torch_function_names_the_line_of_the_call() -> None:
    (finding,) = gs.lint(torch.nonzero, values())
    assert finding.file == HERE and "nonzero" in finding.op


def test_a_finding_reads_as_a_line_and_pickles() -> None:
    (finding,) = gs.lint(lambda x: x.sum().item(), values())
    assert str(finding).startswith(f"{HERE}:{finding.line}: Tensor.item") and finding.fix in str(finding)
    assert pickle.loads(pickle.dumps(finding)) == finding


# backward, checkpoints, optimizers


def test_an_operator_of_a_backward_has_the_forwards_line() -> None:
    def fn(x: torch.Tensor) -> None:
        y = x * 2
        z = y[y > 0]
        w = (z * 3).sum()
        w.backward()

    ops = dict(found(fn, values().requires_grad_()))
    assert {op: line for op, line in ops.items() if "Backward" in op} == {"aten.index_put in IndexBackward0": 2}


def test_code_of_ones_own_in_a_backward_has_its_own_line() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient.tolist()
            gradient.sum().item()
            return gradient * 2

    start = Reads.backward.__code__.co_firstlineno

    def by_method(x: torch.Tensor) -> None:
        Reads.apply(x).sum().backward()

    def by_function(x: torch.Tensor) -> None:
        torch.autograd.grad(Reads.apply(x).sum(), x)

    for fn in (by_method, by_function):
        findings = gs.lint(fn, values().requires_grad_())
        assert [(f.op.split(" ")[0], f.line - start) for f in findings] == [("Tensor.tolist", 2), ("Tensor.item", 3)]


def test_a_recompute_is_judged_like_its_forward() -> None:
    def fn(x: torch.Tensor) -> None:
        def body(t: torch.Tensor) -> torch.Tensor:
            return t * F.one_hot((t > 0).long(), 2).sum(-1) + torch.zeros(6)

        checkpoint(body, x, use_reentrant=False).sum().backward()

    assert [line for _, line in found(fn, values().requires_grad_())] == [2]


@pytest.mark.parametrize("depth", [20, 70])
def test_a_backward_nested_too_deep_is_found(depth: int) -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, left: int) -> torch.Tensor:
            ctx.left = left
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.left:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.left - 1).sum().backward()
            return gradient, None

    findings = gs.lint(lambda x: Nested.apply(x, depth).sum().backward(), values().requires_grad_())
    assert [finding.op for finding in findings] == ["torch.autograd.backward"] * (depth > 60)


def test_a_scaler_that_asks_the_host_is_found_with_its_cure() -> None:
    weight = nn.Parameter(values())
    optimizer = torch.optim.AdamW([weight])
    optimizer.param_groups[0]["capturable"] = False
    scaler = torch.amp.GradScaler("cpu")

    def fn(x: torch.Tensor) -> None:
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    findings = gs.lint(fn, values())
    assert [finding.line - fn.__code__.co_firstlineno for finding in findings] == [2, 2]
    assert all("fused" in finding.fix or "GradScaler" in finding.why for finding in findings)
    assert findings[-1].op == "AdamW.step"
    assert scaler.state_dict()["_growth_tracker"] == 0 and scaler._scale is None  # as before the first step


def test_what_has_a_lint_call_is_linted_through_it_and_prepares_its_optimizer() -> None:
    weight = nn.Parameter(values())
    optimizer = torch.optim.Adam([weight])

    class Managed:
        def _lint_call(self) -> Callable[..., Any]:
            def call(x: torch.Tensor) -> None:
                (weight * x).sum().backward()
                optimizer.step()
                weight.sum().item()

            return call

    assert [finding.op.split(" ")[0] for finding in gs.lint(Managed(), values())] == ["Tensor.item"]
    assert weight.grad is None and not optimizer.state and torch.equal(weight, values())


# nothing is left changed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ema", torch.zeros(4))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count += 1
        self.ema = self.ema * 0.9 + x.mean(0) * 0.1
        self.last = x
        return F.dropout(self.norm(self.layer(x)), 0.1)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_lint_leaves_a_training_step_as_it_was() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()  # some state is there, more comes
    net.norm.weight.grad = None
    x = torch.randn(8, 4)
    batch = {"x": x, "parts": [1, 2]}
    ema, grads = net.ema, [p.grad for p in net.parameters()]

    def fn(batch: dict[str, Any]) -> None:
        batch["parts"].clear()
        (net(batch.pop("x")) + random.random() + np.random.rand()).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["betas"] = (0.5, 0.5)
        net.layer.weight = nn.Parameter(torch.ones(4, 4, device="cuda"))
        net.layer.bias.data.mul_(2)  # no version counter tells
        net.norm.bias.data = net.norm.bias.data.double()
        net.layer.bias.requires_grad_(False)
        x.detach().numpy()[:] = 0
        x.t_()

    def state() -> Any:
        generators = (torch.get_rng_state(), random.getstate()[1], np.random.get_state()[1].tolist())
        parts = (net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), net.num_calls, sorted(vars(net)))
        return copy.deepcopy((parts, generators, x, [p.requires_grad for p in net.parameters()]))

    before = state()
    assert gs.lint(fn, batch)
    assert same(before, state())
    assert net.ema is ema and batch["x"] is x and batch["parts"] == [1, 2]
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))


def test_lint_writes_nothing_where_nothing_changed() -> None:
    weight = values().requires_grad_()
    loss = (weight * weight).sum()  # saved for a backward that comes after
    x = values()
    gs.lint(lambda: (weight * x).sum().backward())
    assert (weight._version, x._version, weight.grad) == (0, 0, None)
    loss.backward()
    assert torch.equal(weight.grad, 2 * weight)


def test_lint_makes_an_argument_a_leaf_again() -> None:
    weight, x = nn.Parameter(values()), values()
    gs.lint(lambda x: x.mul_(weight).sum().backward(), x)
    assert x.is_leaf and not x.requires_grad and torch.equal(x, values())


def test_an_error_of_the_functions_comes_through_after_the_restore_with_what_was_found() -> None:
    weight = nn.Parameter(values())

    def fn(x: torch.Tensor) -> None:
        x.zero_()
        weight.sum().backward()
        x.sum().item()
        raise KeyError("mine")

    x, generator = values(), torch.get_rng_state()
    with pytest.raises(KeyError, match="mine") as caught:
        gs.lint(fn, x)
    assert torch.equal(x, values()) and weight.grad is None and torch.equal(torch.get_rng_state(), generator)
    assert any("Tensor.item" in note for note in caught.value.__notes__)
    assert sys.getprofile() is None and torch.overrides._get_current_function_mode_stack() == []
    assert gs.lint(lambda x: x + 1, x) == []


@pytest.mark.parametrize("where", ["backward", "watch", "checks", "seat", "stack"])
def test_lint_leaves_the_thread_as_it_was_when_it_is_interrupted(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``where``: in the profile callback as a backward ends, or at the entry of a function that would put back."""
    layer, times = nn.Linear(4, 1), iter([True])

    def backward(x: torch.Tensor) -> None:
        layer(x + torch.rand(2, 4)).sum().backward()

    def instead(*args: Any) -> Any:
        comes = sys._getframe(1).f_code.co_name == "lint" if where == "stack" else True
        if where == "backward":
            comes = args[2] == "return" and args[1].f_code is args[0]._backward
        if comes and next(times, False):
            raise KeyboardInterrupt
        return real(*args)

    owner, name = {
        "backward": (watch.CallWatch, "_see"),
        "watch": (watch.CallWatch, "__exit__"),
        "checks": (Checks, "__exit__"),
        "seat": (gate.Scope, "__exit__"),
        "stack": (contextlib.ExitStack, "__exit__"),
    }[where]
    real = getattr(owner, name)
    before, state, modes = layer.weight.detach().clone(), torch.get_rng_state(), private.open_modes()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, instead)
        with pytest.raises(KeyboardInterrupt):
            gs.lint(backward, torch.ones(2, 4))
    assert next(times, None) is None  # the interrupt did come
    assert private.open_modes() == modes and sys.getprofile() is None
    assert private.multithreading_enabled()
    assert not gate.gate_for(torch.device("cpu"))._holders
    assert layer.weight.grad is None and torch.equal(layer.weight, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_lint_gives_the_generators_that_the_function_reaches_their_states_back() -> None:
    numpy_random = pytest.importorskip("numpy").random
    own, python = torch.Generator().manual_seed(1), random.Random(1)
    numpy, old, system = numpy_random.default_rng(1), numpy_random.RandomState(1), random.SystemRandom()
    given = numpy_random.Generator(numpy_random.PCG64(5))

    def draws(x: torch.Tensor, options: dict[str, Any]) -> list[Any]:
        numbers = [torch.rand((), generator=own).item(), python.gauss(0, 1), numpy.standard_normal(3).tolist()]
        return [*numbers, old.randn(), system.random() < 2, options["generator"].random()]

    gs.lint(draws, torch.ones(2), {"generator": given})
    first = draws(torch.ones(2), {"generator": given})
    own.manual_seed(1)
    python.seed(1)
    numpy, old = numpy_random.default_rng(1), numpy_random.RandomState(1)
    given = numpy_random.Generator(numpy_random.PCG64(5))
    assert first == draws(torch.ones(2), {"generator": given})


def test_lint_of_what_cannot_be_called_or_inside_a_capture_is_an_error() -> None:
    with pytest.raises(gs.GraphsafeError, match="int"):
        gs.lint(3)  # type: ignore[arg-type]
    with gs.thread_context("cpu"), gs.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        gs.lint(lambda: None)


def test_lint_in_a_context_takes_its_generator_and_gives_it_back() -> None:
    def drawn(lint: bool) -> torch.Tensor:
        with gs.thread_context("cpu", seed=3) as context, context.eager():
            torch.rand(2)
            if lint:
                assert gs.lint(lambda: torch.rand(5, device="cuda").sum().item())
            return torch.rand(3)

    assert torch.equal(drawn(True), drawn(False))


# threads, compiled functions, profilers


def test_threads_lint_at_once_and_each_finds_its_own() -> None:
    shared = Net()
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.5)
    before, generator = copy.deepcopy(shared.state_dict()), torch.get_rng_state()
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    bad = [lambda y: y.item(), lambda y: y.view(1).nonzero(), lambda y: y.view(1).unique(), lambda y: y.tolist()]

    def work(i: int) -> None:
        def fn(x: torch.Tensor) -> None:
            loss = shared(x).sum()
            loss.backward()
            optimizer.step()
            torch.rand(3, device="cuda")
            bad[i](loss.detach())

        lines = {finding.line for finding in gs.lint(fn, inputs[i])}
        for _ in range(5):
            assert {finding.line for finding in gs.lint(fn, inputs[i])} == lines
        assert bad[i].__code__.co_firstlineno in lines and len(lines) == 2

    run_threads(4, work, DEADLINE_S)
    assert same(before, shared.state_dict()) and torch.equal(torch.get_rng_state(), generator)


def test_another_thread_is_not_looked_at() -> None:
    linted, done = threading.Event(), threading.Event()

    def other() -> None:
        assert linted.wait(DEADLINE_S)
        values().sum().item()
        torch.cuda.empty_cache()
        torch.optim.SGD([nn.Parameter(values())], 0.1).step()
        done.set()

    def fn() -> None:
        linted.set()
        assert done.wait(DEADLINE_S)

    def work(i: int) -> None:
        if i == 0:
            assert gs.lint(fn) == []
        else:
            other()

    run_threads(2, work, DEADLINE_S)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
def test_a_compiled_function_is_looked_into(fullgraph: bool, called_before: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + torch.zeros(6)
        return y if fullgraph else y * y.sum().item()

    compiled = torch.compile(body, backend="eager", fullgraph=fullgraph)
    if called_before:
        compiled(values())
    lines = [finding.line - body.__code__.co_firstlineno for finding in gs.lint(compiled, values())]
    assert lines == ([1] if fullgraph else [1, 2])
    compiled(values())  # and compiles on


def test_the_capture_pass_takes_a_compiled_function_that_has_fullgraph() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    x = values()
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            y = compiled(x)
        x.fill_(2.0)
        graph.replay()
    assert torch.equal(y, x.sin() + 1)


def test_flex_attention_is_looked_into() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    query = torch.randn(1, 2, 128, 16)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    assert gs.lint(lambda: flex.flex_attention(query, query, query, block_mask=mask)) == []


def test_a_profiler_that_is_on_stays_on_and_only_calls_are_missed() -> None:
    seen = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        findings = gs.lint(lambda x: (torch.manual_seed(0), x.sum().item()), values())
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert [finding.op.split(" ")[0] for finding in findings] == ["Tensor.item"] and seen


def test_checks_leave_no_mode_behind_when_they_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checks.__mro__[1], "__enter__", fail)
    with pytest.raises(KeyboardInterrupt):
        gs.lint(lambda: None)
    monkeypatch.undo()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert gs.lint(lambda x: x.sum().item(), values())
