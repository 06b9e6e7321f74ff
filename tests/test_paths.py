"""What a graph sees of the numbers that its function reads, wherever they hang, and what it does not mind."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsafe as gs
from graphsafe.memory import Memory
from graphsafe.paths import paths_read

weight = torch.nn.Parameter(torch.ones(2))


class Config:
    factor = 1.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.inner = types.SimpleNamespace(scale=1.0)
        self.sizes = (1, 2)


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * weight * self.scale


class Scaled:
    def __init__(self) -> None:
        self.scale, self.weight = 1.0, weight

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.weight

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.config = weight, Config()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.config.scale


class Blocks(Block):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.blocks = config_of_blocks, torch.nn.ModuleList([Block()])
        self.blocks[0].config = config_of_block

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return super().attend(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.attend(x)
        return self.attend(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.config, self.scales = weight, Config(), [1.0, 2.0]
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        config = self.config
        return sum(x * config.inner.scale * scale for scale in (self.scales[0], config.scale)) * self.weight  # type: ignore[no-any-return]


config_of_blocks, config_of_block = Config(), Config()
blocks = Blocks()
config, slots, table, scaled, model = Config(), Slots(), {"scale": 1.0}, Scaled(), Model()
other = Config()
other.scale = 7.0


def of_a_closure() -> tuple[Callable[..., Any], Config]:
    own = Config()
    return lambda x: [x * own.scale * weight for _ in range(1)], own


in_closure, closures = of_a_closure()
READS: dict[str, tuple[Callable[..., Any], Callable[[], object], Callable[[], object]]] = {
    "a global object's": (
        lambda x: x * weight * config.scale,
        lambda: setattr(config, "scale", 7.0),
        lambda: setattr(config, "scale", 1.0),
    ),
    "a closure's object's": (
        in_closure,
        lambda: setattr(closures, "scale", 7.0),
        lambda: setattr(closures, "scale", 1.0),
    ),
    "an object's slot": (
        lambda x: x * weight * slots.scale,
        lambda: setattr(slots, "scale", 7.0),
        lambda: setattr(slots, "scale", 1.0),
    ),
    "a class's": (
        lambda x: x * weight * Config.factor,
        lambda: setattr(Config, "factor", 7.0),
        lambda: setattr(Config, "factor", 1.0),
    ),
    "a class's, hidden by the object's own": (
        lambda x: x * weight * config.factor,
        lambda: setattr(config, "factor", 7.0),
        lambda: delattr(config, "factor"),
    ),
    "an entry of a dict": (
        lambda x: x * weight * table["scale"],
        lambda: table.update(scale=7.0),
        lambda: table.update(scale=1.0),
    ),
    "a bound method's": (
        scaled.run,
        lambda: setattr(scaled, "scale", 7.0),
        lambda: setattr(scaled, "scale", 1.0),
    ),
    "an entry of a list of a module's": (
        model,
        lambda: model.scales.__setitem__(0, 7.0),
        lambda: model.scales.__setitem__(0, 1.0),
    ),
    "a module's object's, by a local variable": (
        model,
        lambda: setattr(model.config, "scale", 7.0),
        lambda: setattr(model.config, "scale", 1.0),
    ),
    "two objects down": (
        model,
        lambda: setattr(model.config.inner, "scale", 7.0),
        lambda: setattr(model.config.inner, "scale", 1.0),
    ),
    "the object itself": (
        model,
        lambda: setattr(model, "config", other),
        lambda: setattr(model, "config", Config()),
    ),
    "an entry of a tuple": (
        lambda x: x * weight * config.sizes[1],
        lambda: setattr(config, "sizes", (1, 7)),
        lambda: setattr(config, "sizes", (1, 2)),
    ),
    "what a method of the same object reads": (
        scaled.outer,
        lambda: setattr(scaled, "scale", 7.0),
        lambda: setattr(scaled, "scale", 1.0),
    ),
    "an overridden method's": (
        blocks,
        lambda: setattr(config_of_blocks, "scale", 7.0),
        lambda: setattr(config_of_blocks, "scale", 1.0),
    ),
    "a method's in a loop": (
        blocks,
        lambda: setattr(config_of_block, "scale", 7.0),
        lambda: setattr(config_of_block, "scale", 1.0),
    ),
    "a slot, by a method": (
        slots.run,
        lambda: setattr(slots, "scale", 7.0),
        lambda: setattr(slots, "scale", 1.0),
    ),
}


@pytest.mark.parametrize("where", READS)
def test_number_that_is_another_is_seen_at_the_next_call_wherever_it_hangs(where: str) -> None:
    fn, change, change_back = READS[where]
    memory = Memory(fn)
    assert memory.holds() and memory.holds()
    change()
    try:
        assert not memory.holds()
    finally:
        change_back()


def test_what_code_counts_and_what_it_does_not_read_is_nobodys_business() -> None:
    model.ignored = 1
    memory = Memory(model)
    model.ignored, model.steps, model.scales[1], config.scale = 2, 3, 4.0, 5.0
    try:
        assert memory.holds()
    finally:
        model.scales[1], config.scale = 2.0, 1.0


def test_objects_on_the_way_to_an_equal_value_may_be_replaced() -> None:
    memory = Memory(model)
    model.config = Config()
    assert memory.holds() and memory.holds()
    model.config.inner.scale = 7.0  # of the new one
    try:
        assert not memory.holds()
    finally:
        model.config.inner.scale = 1.0


class Trainer:
    """What a training loop keeps beside the loss, some of it under names that the loss uses for other things."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state, self.shape = types.SimpleNamespace(step=0), (0, 0)

    def loss(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        self.shape = tuple(x.shape)
        y = self.model(x).view(self.shape[0], 1).exp().log()
        return y.square().mean(), self.optimizer.param_groups[0]["lr"]

    def log(self) -> str:
        return f"step {self.state.step}"


def test_what_a_training_loop_changes_beside_the_loss_makes_no_graph_stale() -> None:
    trainer = Trainer()
    memory = Memory(trainer.loss, trainer.model)
    trainer.state.step += 1
    trainer.shape = (3, 4)  # as the capture of another signature leaves it
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    assert memory.holds()
    step = gs.TrainStep(trainer.loss, trainer.optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
    with gs.thread_context("cpu") as context:
        for i in range(20):
            step(torch.ones(2 + i % 2, 2))
            schedule.step()
            trainer.state.step += 1
        assert (context.counters.eager_steps, context.counters.captures) == (6, 2)


def test_dicts_with_code_of_their_own_are_left_alone() -> None:
    class Raising(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            raise RuntimeError("code of the user's")

    class RaisingList(list):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("code of the user's")

    own, tensors, others = Raising(s=1.0), Raising(w=weight), RaisingList([torch.ones(2)])

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * weight * own["s"] * tensors["w"] * others[0]

    memory = Memory(fn)
    assert all(memory.holds() for _ in range(70))
    others.append(torch.ones(2))
    assert memory.holds()
    tensors["w"] = torch.ones(2)  # but another tensor there is seen
    assert not memory.holds()
    memory = Memory(fn)
    list.__setitem__(others, 0, torch.ones(2))
    assert not memory.holds()


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Hooked(torch.nn.Module):
    options = Attributes(scale=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.config = config
        self.register_forward_pre_hook(self._before)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        assert self.config.scale and self.config.inner.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.options["scale"]


def test_many_modules_that_read_one_object_cost_one_look_at_it() -> None:
    net = torch.nn.Sequential(*(Hooked() for _ in range(30)))
    memory = Memory(net)
    assert memory.holds()
    assert len(memory._next_stops) < 200  # each module's own entry, and the object's two numbers once


def test_nothing_of_the_users_runs_while_paths_are_followed() -> None:
    ran: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            return 1.0

        @property
        def scale(self) -> float:
            ran.append("scale")
            return 1.0

    watched = Watched()
    memory = Memory(lambda x: x * weight * watched.scale * watched.missing)
    assert memory.holds() and not ran


def test_graph_that_reads_a_config_is_captured_anew_when_that_changes() -> None:
    with gs.thread_context("cpu"):
        run = gs.graphed(model)
        with torch.no_grad():
            for _ in range(5):
                before = run(torch.ones(2))
            model.config.scale = 3.0
            try:
                after = run(torch.ones(2))
            finally:
                model.config.scale = 1.0
    assert torch.equal(before, torch.full((2,), 2.0)) and torch.equal(after, torch.full((2,), 4.0))
    assert run.stats().eager_calls == 4  # the changed call is one: what it reads is learnt anew


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(self): return self.a.b['c'][0].d", {("self", "self", "a.b[c][0].d")}),
        ("def f(self, x): return x.a + self.b", {("self", "self", "b")}),
        ("def f(self): self.n += 1", set()),
        ("def f(self): return [self.a for _ in x.y]", {("self", "self", "a"), ("global", "x", "y")}),
        ("def f(self): return lambda: self.a + g.b", {("self", "self", "a"), ("global", "g", "b")}),
        (
            "def f():\n c = g.a\n return c.b, c.d",
            {("global", "g", "a"), ("global", "g", "a.b"), ("global", "g", "a.d")},
        ),
        ("def f(x):\n c = g.a\n if x: c = x\n return c.b", {("global", "g", "a")}),
        ("def f(): return g.a[g.b]", {("global", "g", "a"), ("global", "g", "b")}),
    ],
)
def test_paths_are_read_from_bytecode_of_this_python(source: str, expected: set[tuple[str, str, str]]) -> None:
    scope: dict[str, Any] = {}
    exec(source, scope)
    found = set()
    for path in paths_read(scope["f"].__code__):
        steps = "".join(f"[{step.key}]" if step.is_entry else f".{step.key}" for step in path.steps)
        found.add((path.root, path.name, steps.lstrip(".")))
    assert found == expected, sys.version
