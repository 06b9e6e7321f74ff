"""TrainStep in real training on the CPU: optimizers, schedules, hooks, process groups, and what cuts a run short."""

from __future__ import annotations

import copy
import datetime
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe import gate, step_plans
from graphsafe.leaf_owners import AnothersStream

from .helpers import run_threads

DEADLINE_S = 60.0
Batch = tuple[torch.Tensor, ...]


def filled(*layers: nn.Module) -> nn.Sequential:
    """A net of layers on "meta", with weights of its own generator: the default one is other threads' too."""
    net, generator = nn.Sequential(*layers).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, device="meta")


def model(dropout: float = 0.0) -> nn.Sequential:
    norm = nn.LayerNorm(16, device="meta")
    return filled(linear(8, 16), norm, nn.Tanh(), nn.Dropout(dropout), linear(16, 1))


def batches(n: int, size: int = 4, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(n)]


def error(net: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, y: ((net(x) - y) ** 2).mean()


def adamw(net: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **kwargs)


@dataclass
class Task:
    """What is trained, and how."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Any] | None = None
    after: Callable[[], object] = lambda: None  # after each step of the optimizer
    watched: Sequence[torch.Tensor] = ()  # compared beside the weights
    data: Callable[[int], list[Batch]] = batches
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, mode: str) -> gs.TrainStep:
        loss_fn = error(self.net) if self.loss_fn is None else self.loss_fn
        return gs.TrainStep(loss_fn, self.optimizer, model=self.net, mode=mode, **self.options)  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in [*self.net.state_dict().values(), *self.watched]]


def train(make: Callable[[], Task], mode: str, n: int = 20) -> tuple[list[float], list[torch.Tensor]]:
    task = make()
    step, every = task.step(mode), task.options.get("accumulate", 1)
    losses = []
    with gs.thread_context("cpu", seed=3) as context:
        for i, batch in enumerate(task.data(n)):
            losses.append(step(*batch).item())
            if (i + 1) % every == 0:
                task.after()
        if mode == "graph":
            assert context.counters.captures >= 1 and context.counters.replays > 0
    return losses, task.tensors()


def assert_same(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], list[torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# what is trained


def plain(dropout: float = 0.0, optimizer: dict[str, Any] | None = None, **options: Any) -> Callable[[], Task]:
    def make() -> Task:
        net = model(dropout)
        return Task(net, adamw(net, **(optimizer or {"foreach": True})), options=options)

    return make


def momentum() -> Task:
    net = model()
    return Task(net, torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nesterov=True, fused=True))


def overflowing() -> Task:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def data(n: int) -> list[Batch]:
        return [(x, y * 1e38 if i == n // 2 else y) for i, (x, y) in enumerate(batches(n))]

    seen = torch.zeros(n_scales := 20, dtype=torch.float64)
    at = iter(range(n_scales))

    def after() -> None:
        seen[next(at)] = scaler.get_scale()

    options = {"scaler": scaler, "max_grad_norm": 1.0}
    return Task(net, adamw(net, fused=True), data=data, after=after, watched=[seen], options=options)


def checkpointed(dropout: float) -> Callable[[], Task]:
    def make() -> Task:
        net = model(dropout)
        return Task(net, adamw(net), error(lambda x: checkpoint(net, x, use_reentrant=False)))

    return make


def scheduled(schedule: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], Task]:
    """Two groups with settings of their own."""

    def make() -> Task:
        net = model(0.2)
        groups = [
            {"params": net[0].parameters(), "weight_decay": 0.3},
            {"params": [*net[1].parameters(), *net[4].parameters()], "lr": 3e-2},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return Task(net, optimizer, after=schedule(optimizer).step)

    return make


def compiled() -> Task:
    net = model()
    return Task(net, adamw(net), error(gs.compile(net, backend="aot_eager")))


def tied() -> Task:
    net = filled(linear(8, 8), nn.Tanh(), linear(8, 8))
    net[2].weight = net[0].weight
    return Task(net, adamw(net), options={"accumulate": 2})


def partly_frozen() -> Task:
    net = model()
    net[0].requires_grad_(False)
    return Task(net, adamw(net, weight_decay=0.5), options={"max_grad_norm": 0.5})


def partly_unused() -> Task:
    net, other = model(), filled(linear(8, 1))

    def loss_fn(x: torch.Tensor, y: torch.Tensor, both: bool) -> torch.Tensor:
        return ((net(x) + (other(x) if both else 0) - y) ** 2).mean()

    def data(n: int) -> list[Any]:
        return [(*batch, i % 3 == 0) for i, batch in enumerate(batches(n))]

    optimizer = torch.optim.AdamW([*net.parameters(), *other.parameters()], weight_decay=0.5)
    return Task(net, optimizer, loss_fn, data=data, watched=list(other.parameters()))


def hooked() -> Task:
    """An average of the weights, a pull towards zero and scaled gradients, all in hooks inside the step."""
    net = model(0.2)
    optimizer = adamw(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        torch._foreach_mul_([p.grad for p in net.parameters()], 0.5)

    @torch.no_grad()
    def follow(*_: Any) -> None:
        torch._foreach_lerp_(own, list(net.parameters()), 0.25)
        average.update_parameters(net)

    def double(p: torch.Tensor) -> None:
        p.grad.mul_(2.0)

    optimizer.register_step_pre_hook(shrink)
    optimizer.register_step_post_hook(follow)
    net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    net[4].weight.register_post_accumulate_grad_hook(double)
    return Task(net, optimizer, watched=[*average.parameters(), *average.buffers(), *own], options={"accumulate": 2})


class Lion(torch.optim.Optimizer):
    """Everything it keeps lies in tensors that it writes in place."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["average"] = torch.zeros_like(p)
                average = self.state[p]["average"]
                p.sub_(torch.sign(average * first + p.grad * (1 - first)) * group["lr"])
                average.mul_(second).add_(p.grad * (1 - second))


def foreign() -> Task:
    net = model(0.2)
    optimizer = Lion(net.parameters())
    return Task(net, optimizer, after=ExponentialLR(optimizer, 0.9).step)


TASKS: dict[str, Callable[[], Task]] = {
    "AdamW foreach": plain(),
    "AdamW fused, dropout": plain(0.3, {"fused": True}),
    "accumulate 4, clipping": plain(0.3, accumulate=4, max_grad_norm=0.3),
    "SGD momentum": momentum,
    "GradScaler overflow": overflowing,
    "checkpoint": checkpointed(0.0),
    "checkpoint, dropout": checkpointed(0.3),
    "cosine": scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 20)),
    "lambda": scheduled(lambda optimizer: LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])),
    "one cycle": scheduled(lambda o: OneCycleLR(o, [1e-2, 3e-2], total_steps=30, cycle_momentum=False)),
    "compiled": compiled,
    "tied": tied,
    "frozen": partly_frozen,
    "unused": partly_unused,
    "hooks": hooked,
    "foreign optimizer": foreign,
}


@pytest.mark.parametrize("name", TASKS)
def test_train_step_of_a_real_run_equals_the_eager_loop(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", gs.GraphsafeWarning)  # a GPU takes it too
        graph = train(TASKS[name], "graph")
    assert_same(train(TASKS[name], "eager"), graph)
    if name == "GradScaler overflow":
        scales = graph[1][-1]
        assert scales[10] == scales[9] / 2  # the overflow was seen


def test_train_step_of_real_runs_in_threads_equals_each_alone() -> None:
    names = ["accumulate 4, clipping", "checkpoint, dropout", "hooks", "cosine"]
    alone = [train(TASKS[name], "eager") for name in names]
    together = run_threads(4, lambda i: train(TASKS[names[i]], "graph"), DEADLINE_S)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


# optimizers

KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
)
CAPTURED = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "RMSprop", "Adadelta", "SGD"}
VARIANTS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def is_captured(name: str, variant: dict[str, Any]) -> bool:
    if name in ("RMSprop", "Adadelta"):
        return variant.get("foreach") is not False
    return name in CAPTURED and (name != "SGD" or variant.get("fused", False))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Optimizer", "LBFGS", "SparseAdam")])
def test_train_step_each_optimizer_of_torch_is_captured_or_named_as_refused(name: str) -> None:
    kind = getattr(torch.optim, name)

    def run(mode: str, variant: dict[str, Any]) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 8).reshape(8, 1))
        step = gs.TrainStep(error(lambda x: x @ weight), kind([weight], lr=1e-2, **variant), mode=mode)  # type: ignore
        with gs.thread_context("cpu"):
            return [*(step(*batch) for batch in batches(8)), weight.detach()]

    for variant in VARIANTS:
        if not set(variant) <= set(inspect.signature(kind).parameters):
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph = run("graph", variant)
        told = [str(w.message) for w in caught if issubclass(w.category, gs.GraphsafeWarning)]
        assert [name in message for message in told] == ([] if is_captured(name, variant) else [True])
        assert all(torch.equal(a, b) for a, b in zip(graph, run("eager", variant), strict=True))


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_train_step_optimizer_that_evaluates_the_loss_itself_is_refused_by_name(mode: str) -> None:
    class Twice(Lion):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure(), closure()

    for kind in (torch.optim.LBFGS, Twice):
        with pytest.raises(gs.GraphsafeError, match=rf"{kind.__name__}.*closure"):
            gs.TrainStep(lambda: None, kind(model().parameters()), mode=mode)  # type: ignore[arg-type]


def test_train_step_sparse_adam_warns_by_name_and_trains() -> None:
    def run(mode: str) -> torch.Tensor:
        table = nn.Embedding.from_pretrained(torch.ones(10, 4), freeze=False, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        step = gs.TrainStep(lambda i: table(i).square().mean(), optimizer, mode=mode)  # type: ignore[arg-type]
        with gs.thread_context("cpu"):
            for i in range(8):
                step(torch.tensor([i, 3]))
        return table.weight.detach()

    eager = run("eager")
    with pytest.warns(gs.GraphsafeWarning, match="SparseAdam"):
        assert torch.equal(run("graph"), eager)


class Counting(Lion):
    """Keeps its step count in Python, as many do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.sub_(p.grad * (group["lr"] / (1 - 0.9**count)))


class Rebinding(Lion):
    """Replaces the tensors of its state, in place of writing into them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].get("average", torch.zeros_like(p)) * 0.9 + p.grad
                self.state[p]["average"] = average
                p.sub_(average * group["lr"])


class Swapping(Lion):
    """Gives each parameter new memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - p.grad * group["lr"]


class Moving(Lion):
    """Moves a setting of its own on with every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / group["k"]))


@pytest.mark.parametrize(
    ("kind", "what"), [(Counting, "'step'"), (Rebinding, "'average'"), (Swapping, "addresses"), (Moving, "'k'")]
)
def test_train_step_optimizer_that_a_replay_would_not_move_on_is_named(kind: type[Lion], what: str) -> None:
    net = model()
    optimizer = kind(net.parameters())
    step = gs.TrainStep(error(net), optimizer)
    with gs.thread_context("cpu"):
        with pytest.warns(gs.GraphsafeWarning, match=f"{kind.__name__}.*{what}") as caught:
            for batch in batches(5):
                step(*batch)
        assert len([w for w in caught if issubclass(w.category, gs.GraphsafeWarning)]) == 1
        inline = gs.TrainStep(error(net), optimizer, mode="eager")  # part of the outer capture
        batch = batches(1)[0]
        with pytest.raises(gs.CaptureError, match=f"{kind.__name__}.*{what}"), gs.capture():
            inline(*batch)


def test_train_step_subclass_with_torchs_own_step_is_judged_as_its_base() -> None:
    class Mine(torch.optim.SGD):
        pass

    class Good(torch.optim.AdamW):
        pass

    with pytest.warns(gs.GraphsafeWarning, match=r"Mine cannot be captured: unless fused=True"):
        gs.TrainStep(lambda: None, Mine(model().parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.TrainStep(lambda: None, Mine(model().parameters(), lr=0.1, fused=True))
        scaler = torch.amp.GradScaler("cpu")
        gs.TrainStep(lambda: None, Good(model().parameters(), fused=True), scaler=scaler)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_train_step_optimizer_without_a_learning_rate_works(defaults: dict[str, Any]) -> None:
    class Bare(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(0.01 * p.grad)

    def make() -> Task:
        net = model()
        return Task(net, Bare(net.parameters(), dict(defaults)))

    assert_same(train(make, "eager"), train(make, "graph"))


# what a graph has baked in


@pytest.mark.parametrize(
    ("optimizer", "name"), [(adamw, "betas"), (lambda net: torch.optim.SGD(net.parameters(), momentum=0.9), "momentum")]
)
@pytest.mark.filterwarnings("ignore::graphsafe.GraphsafeWarning")
def test_train_step_cycled_momentum_raises_with_its_name(optimizer: Callable[..., Any], name: str) -> None:
    net = model()
    opt = optimizer(net)
    scheduler = OneCycleLR(opt, 1e-2, total_steps=30, cycle_momentum=True)
    step = gs.TrainStep(error(net), opt)
    with gs.thread_context("cpu"), pytest.raises(gs.GraphsafeError, match=rf"'{name}'.*cycle_momentum=False"):
        for batch in batches(6):
            step(*batch)
            scheduler.step()


def change_weight_decay(task: Task) -> None:
    task.optimizer.param_groups[1]["weight_decay"] = 0.7


def change_hooks(task: Task) -> None:
    task.optimizer.register_step_post_hook(lambda *_: None)


def change_scaler(task: Task) -> None:
    task.options["scaler"].set_growth_factor(4.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_weight_decay, "'weight_decay' of parameter group 1"),
        (change_hooks, "'step hooks' of the step"),
        (change_scaler, "'growth_factor' of the step"),
    ],
)
def test_train_step_change_that_a_replay_would_not_see_raises_with_its_name(
    change: Callable[[Task], None], said: str
) -> None:
    net = model()
    groups = [{"params": net[0].parameters()}, {"params": net[4].parameters(), "lr": 1e-3}]
    options = {"scaler": torch.amp.GradScaler("cpu"), "num_warmup_iters": 1}
    task = Task(net, torch.optim.AdamW(groups, fused=True), options=options)
    step = task.step("graph")
    with gs.thread_context("cpu"):
        for batch in batches(4):
            step(*batch)
        change(task)
        before = task.tensors()
        try:
            with pytest.raises(gs.GraphsafeError, match=said):
                step(*batches(1)[0])
        finally:
            assert all(torch.equal(a, b) for a, b in zip(before, task.tensors(), strict=True))
        step.reset()  # what is known of the old settings goes
        step(*batches(1)[0])


def test_train_step_group_that_is_added_after_the_capture_is_trained_as_in_the_eager_loop() -> None:
    def make() -> Task:
        net, late, calls = model(), filled(linear(8, 1)), iter(range(1000))
        optimizer = adamw(net)

        def after() -> None:
            if next(calls) == 8:
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.1})

        return Task(net, optimizer, error(lambda x: net(x) + late(x)), after, list(late.parameters()))

    assert_same(train(make, "eager"), train(make, "graph"))


def test_train_step_scheduler_in_a_hook_of_a_captured_step_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5)
    inline = gs.TrainStep(error(net), optimizer, mode="eager")
    batch = batches(1)[0]
    with gs.thread_context("cpu"):
        inline(*batch)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        with pytest.raises(gs.CaptureError, match="after the TrainStep"), gs.capture():
            inline(*batch)


# resumed runs


def resumable(mode: str) -> tuple[Task, gs.TrainStep, Any]:
    net = model(0.3)
    groups = [{"params": net[0].parameters(), "lr": 3e-2}, {"params": [*net[1].parameters(), *net[4].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    options = {"scaler": scaler, "accumulate": 3, "max_grad_norm": 0.5}
    task = Task(net, optimizer, options=options)
    return task, task.step(mode), LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])


def advance(task: Task, step: gs.TrainStep, scheduler: Any, first: int, last: int) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(batches(last)):
        if i >= first:
            losses.append(step(x, y * 1e38 if i == 16 else y).item())  # one of the steps overflows
            if i % 3 == 2:
                scheduler.step()
    return losses


@pytest.mark.parametrize("first_mode", ["eager", "graph"])
@pytest.mark.parametrize("second_mode", ["eager", "graph"])
@pytest.mark.parametrize("cut", [13, 24])  # the one within an accumulation
def test_train_step_resumes_in_another_one_bit_for_bit(first_mode: str, second_mode: str, cut: int) -> None:
    run = resumable("eager")
    with gs.thread_context("cpu", seed=1):
        whole = advance(*run, 0, 36)
    half = resumable(first_mode)
    with gs.thread_context("cpu", seed=1):
        first = advance(*half, 0, cut)
        saved = pickle.dumps([half[0].net.state_dict(), half[1].state_dict(), None])
        schedule = half[2].last_epoch, half[2]._last_lr
    other = resumable(second_mode)
    weights, state, _ = pickle.loads(saved)
    other[0].net.load_state_dict(weights)
    other[1].load_state_dict(state)
    other[2].last_epoch, other[2]._last_lr = schedule
    with gs.thread_context("cpu", seed=99):
        second = advance(*other, cut, 36)
    assert first + second == whole
    assert all(torch.equal(a, b) for a, b in zip(run[0].tensors(), other[0].tensors(), strict=True))
    assert run[0].options["scaler"].get_scale() == other[0].options["scaler"].get_scale()


def test_train_step_goes_back_to_an_earlier_state_in_place() -> None:
    task, step, scheduler = resumable("graph")
    with gs.thread_context("cpu", seed=1) as context:
        advance(task, step, scheduler, 0, 13)
        saved = copy.deepcopy([task.net.state_dict(), step.state_dict()])
        schedule = scheduler.last_epoch, scheduler._last_lr
        once = advance(task, step, scheduler, 13, 30)
        task.net.load_state_dict(saved[0])
        step.load_state_dict(saved[1])
        scheduler.last_epoch, scheduler._last_lr = schedule
        again = advance(task, step, scheduler, 13, 30)
        assert context.counters.replays > 0
    assert once == again


def test_train_step_state_of_a_disabled_scaler_is_that_of_none() -> None:
    def make(**options: Any) -> gs.TrainStep:
        net = model()
        return gs.TrainStep(error(net), adamw(net, fused=True), **options)

    off = make(scaler=torch.amp.GradScaler("cpu", enabled=False))
    with gs.thread_context("cpu"):
        off(*batches(1)[0])
    make().load_state_dict(off.state_dict())
    off.load_state_dict(make().state_dict())
    scaled = make(scaler=torch.amp.GradScaler("cpu"))
    before = copy.deepcopy(scaled.state_dict())
    with pytest.raises(gs.GraphsafeError, match="GradScaler"):
        scaled.load_state_dict(off.state_dict())
    assert scaled.state_dict() == before  # nothing was loaded


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_train_step_state_without_gradients_clears_what_has_accumulated(mode: str, set_to_none: bool) -> None:
    net = model()
    step = gs.TrainStep(error(net), adamw(net), mode=mode, accumulate=2, set_to_none=set_to_none)  # type: ignore[arg-type]
    data = batches(16)
    with gs.thread_context("cpu", seed=1):
        for batch in data[:12]:
            step(*batch)
        saved = copy.deepcopy([net.state_dict(), step.state_dict()])
        for batch in data[12:14]:
            step(*batch)
        expected = copy.deepcopy(net.state_dict())
        step(*data[14])  # half a step, which the state knows nothing of
        net.load_state_dict(saved[0])
        step.load_state_dict(saved[1])
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in net.parameters())
        for batch in data[12:14]:
            step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), expected.values(), strict=True))


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("max_grad_norm", ["a", 0, True, torch.ones(1)], "a positive number, or None"),
        ("num_warmup_iters", [None, 1.5, -1, True], "an int of at least 0"),
        ("max_graphs", ["x", 0, True], "an int of at least 1"),
        ("accumulate", [True, 1.5, 0], "an int of at least 1"),
        ("scaler", [5, torch.amp.GradScaler], "a torch.amp.GradScaler, or None"),
        ("set_to_none", ["no", None], "True or False"),
        ("mode", [None, ["graph"]], "'graph' or 'eager'"),
        ("outputs", [0], "'copy' or 'alias'"),
    ],
)
def test_train_step_argument_of_the_wrong_type_is_refused_with_the_rule(
    name: str, values: list[Any], rule: str
) -> None:
    net = model()
    for value in values:
        with pytest.raises(gs.GraphsafeError, match=f"{name} is .*; it is {rule}"):
            step_plans.check_arguments(error(net), adamw(net), **{name: value})


STATE_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "position": (lambda state: state.update(position=1.0), "position"),
    "num_steps": (lambda state: state.update(num_steps=-1), "num_steps"),
    "gradients": (lambda state: state.update(gradients=5), "gradients"),
    "no gradients": (lambda state: state.update(gradients=None), "without gradients"),
    "a gradient's dtype": (lambda state: state["gradients"].insert(0, state["gradients"].pop(0).double()), "dtypes"),
    "optimizer": (lambda state: state.update(optimizer=[]), "optimizer"),
    "another optimizer": (
        lambda state: [own.pop("step") for own in state["optimizer"]["state"].values()],
        "does not fit",
    ),
    "scaler": (lambda state: state["scaler"].pop("growth_interval"), "growth_interval"),
    "a scaler's scale": (lambda state: state["scaler"].update(scale="big"), "scale"),
    "generator": (lambda state: state.update(generator="mine"), "generator"),
    "a generator's dtype": (lambda state: state.update(generator=state["generator"].long()), "generator"),
    "a generator's size": (lambda state: state.update(generator=state["generator"][:16]), "generator"),
}


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_train_step_loads_nothing_of_a_state_with_a_fault(fault: str) -> None:
    def make() -> tuple[nn.Module, gs.TrainStep]:
        net = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        return net, gs.TrainStep(error(net), adamw(net, fused=True), scaler=scaler, accumulate=2)

    def flat(value: Any) -> Any:
        leaves, _ = torch.utils._pytree.tree_flatten(value)
        return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    first, second = make(), make()
    for (_, step), number, seed in ((first, 5, 1), (second, 3, 2)):
        with gs.thread_context("cpu", seed=seed):
            for batch in batches(number, seed=seed):
                step(*batch)
    state = copy.deepcopy(first[1].state_dict())
    assert state["position"] == 1
    before = flat(second[1].state_dict())
    spoil, text = STATE_FAULTS[fault]
    spoil(state)
    with pytest.raises(gs.GraphsafeError, match=text):
        second[1].load_state_dict(state)
    assert flat(second[1].state_dict()) == before


# what cuts a run short


def test_train_step_keeps_what_it_trains_alive() -> None:
    task = plain()()
    net, step = weakref.ref(task.net), task.step("graph")
    with gs.thread_context("cpu"):
        for batch in batches(5):
            step(*batch)
        del task
        gc.collect()
        assert net() is not None
        first = step(*batches(1)[0])
        assert step(*batches(1)[0]) < first
        del step
    gc.collect()
    assert net() is None


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stop, torch.OutOfMemoryError])
def test_train_step_interrupted_capture_trains_nothing_and_the_next_one_works(kind: type[BaseException]) -> None:
    def run(mode: str) -> tuple[list[float], list[torch.Tensor]]:
        net = model(0.3)
        net.register_buffer("seen", torch.zeros(()))
        broken: list[int] = []

        def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = error(net)(x, y)
            net.seen.add_(1)
            if gate.capturing() is not None and not broken:
                broken.append(len(x))
                net.seen = torch.full((), torch.nan)  # other memory, which a failed capture must not leave behind
                net[0].weight.data = net[0].weight.data * torch.nan
                raise kind("planted")
            return loss

        step = gs.TrainStep(loss_fn, adamw(net), mode=mode, accumulate=2)  # type: ignore[arg-type]
        losses = []
        with gs.thread_context("cpu", seed=1) as context:
            for size in (4, 3):
                for batch in batches(12, size):
                    before, held = [*map(torch.clone, net.state_dict().values())], net.seen
                    try:
                        losses.append(step(*batch).item())
                    except kind:
                        assert net.seen is held
                        assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
                        losses.append(step(*batch).item())
            if mode == "graph":
                assert broken == [4] and context.counters.failed_captures == 1 and context.counters.captures == 4
        return losses, [*net.parameters(), net.seen]

    assert_same(run("eager"), run("graph"))


def test_train_step_worker_that_dies_in_its_capture_leaves_the_others_as_they_are() -> None:
    inside, asked = threading.Event(), threading.Event()
    alone = train(plain(0.3), "eager")

    def dies() -> None:
        net = model()

        def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if gate.capturing() is not None:
                inside.set()  # 1. captures
                assert asked.wait(DEADLINE_S)
                raise Stop  # 3. dies while the other wants the device
            return error(net)(x, y)

        step = gs.TrainStep(loss_fn, adamw(net), num_warmup_iters=1)
        for batch in batches(4):
            step(*batch)

    def lives(_: int) -> tuple[list[float], list[torch.Tensor]]:
        assert inside.wait(DEADLINE_S)
        asked.set()  # 2. asks for the device
        return train(plain(0.3), "graph")

    worker = gs.spawn(dies, device="cpu")
    assert_same(run_threads(1, lives, DEADLINE_S)[0], alone)
    with pytest.raises(Stop):
        worker.result(DEADLINE_S)


# process groups of one rank a thread


def ranks(n: int, rank: Callable[[int, Any], Any]) -> list[Any]:
    """Run ``rank(number, backend)`` in threads of one process that are the ranks of a group."""
    store, limit = dist.HashStore(), datetime.timedelta(seconds=DEADLINE_S)

    def work(number: int) -> Any:
        with gs.thread_context("cpu", seed=0):
            return rank(number, dist.ProcessGroupGloo(store, number, n, limit))

    return run_threads(n, work, DEADLINE_S)


def average_over(backend: Any, n: int, tensor: torch.Tensor) -> torch.Tensor:
    work = backend.allreduce([tensor])
    with gs.current_context().released():  # the other rank wants the device
        work.wait()
    return tensor.div_(n)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_step_with_gradients_averaged_over_ranks_equals_the_eager_loop(accumulate: int) -> None:
    def run(mode: str) -> list[Any]:
        def rank(number: int, backend: Any) -> tuple[list[float], list[torch.Tensor]]:
            net = model(0.2)

            def averaged(p: torch.Tensor) -> None:
                average_over(backend, 2, p.grad)

            for p in net.parameters():
                p.register_post_accumulate_grad_hook(averaged)
            step = gs.TrainStep(error(net), adamw(net), mode=mode, accumulate=accumulate)  # type: ignore[arg-type]
            losses = [step(*batch).item() for batch in batches(14, seed=number + 1)]
            return losses, list(net.parameters())

        return ranks(2, rank)

    eager, graph = run("eager"), run("graph")
    for one, other in zip(eager, graph, strict=True):
        assert_same(one, other)
    assert all(torch.equal(a, b) for a, b in zip(graph[0][1], graph[1][1], strict=True))


def test_train_step_of_distributed_data_parallel_whose_ranks_are_threads_equals_the_eager_loop() -> None:
    def run(mode: str) -> list[Any]:
        def rank(number: int, backend: Any) -> tuple[list[float], list[torch.Tensor]]:
            group = dist.ProcessGroup(dist.HashStore(), number, 2)  # torch takes a group, not a backend; no world
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            net = model()
            parallel = nn.parallel.DistributedDataParallel(net, process_group=group)

            def hook(_: None, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
                done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                done.set_result(average_over(backend, 2, bucket.buffer()))
                return done

            parallel.register_comm_hook(None, hook)
            for _ in range(
                2
            ):  # the second forward makes torch wait for the other rank, with a seat it would be for ever
                parallel(batches(1)[0][0]).sum().backward()
            net.zero_grad()
            step = gs.TrainStep(error(parallel), adamw(net), mode=mode, num_warmup_iters=11)  # type: ignore[arg-type]
            losses = [step(*batch).item() for batch in batches(18, seed=number + 1)]
            if mode == "graph":
                counters = gs.current_context().counters
                assert counters.captures == 1 and counters.replays == 6
            return losses, list(net.parameters())

        return ranks(2, rank)

    eager, graph = run("eager"), run("graph")
    for one, other in zip(eager, graph, strict=True):
        assert_same(one, other)
    assert all(torch.equal(a, b) for a, b in zip(graph[0][1], graph[1][1], strict=True))


def test_train_step_of_distributed_data_parallel_with_too_few_warm_ups_is_refused_by_name() -> None:
    group = dist.ProcessGroup(store := dist.HashStore(), 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=DEADLINE_S))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    parallel = nn.parallel.DistributedDataParallel(model(), process_group=group)
    gs.TrainStep(error(parallel), adamw(parallel), num_warmup_iters=11)
    gs.TrainStep(error(parallel), adamw(parallel), mode="eager")
    with pytest.raises(gs.GraphsafeError, match=r"num_warmup_iters.*DistributedDataParallel"):
        gs.TrainStep(error(parallel), adamw(parallel))


def test_train_step_that_begins_to_draw_draws_from_its_contexts_generator() -> None:
    p = 0.0

    def losses(mode: Any) -> list[float]:
        nonlocal p
        net = model()
        found = []
        with gs.thread_context("cpu", seed=3):
            step = gs.TrainStep(
                lambda x: (nn.functional.dropout(net(x), p) if p else net(x)).square().mean(),
                torch.optim.AdamW(net.parameters(), lr=0.1),
                mode=mode,
            )
            for i in range(12):
                p = 0.0 if i < 5 else 0.5
                found.append(float(step(torch.full((32, 8), float(i)))))
        return found

    found = losses("eager")
    torch.rand(5)  # the default generator is another one now
    assert losses("eager") == found and losses("graph") == found


def test_train_step_whose_backward_would_meet_another_stream_goes_on_eagerly_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses(mode: Any) -> list[float]:
        net = model()
        with gs.thread_context("cpu", seed=3):
            step = gs.TrainStep(
                lambda x: net(x).square().mean(), torch.optim.AdamW(net.parameters(), lr=0.1), mode=mode
            )
            return [float(step(torch.full((4, 8), float(i)))) for i in range(8)]

    def refused(*args: Any) -> Any:
        raise AnothersStream("a node of another stream")

    monkeypatch.setattr(gs.TrainStep, "_capture", refused)
    with pytest.warns(gs.GraphsafeWarning, match="while another thread's graph") as warned:
        found = losses("graph")
    assert len(warned) == 1 and found == losses("eager")
