"""TrainStep on the CPU: the eager loop's numbers, the signature rules, and what is seen before a replay."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphsafe as gs

from .helpers import run_threads

DEADLINE_S = 60.0


def model(seed: int = 0, dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 1))


def batches(n: int, size: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(n)]


def loss_of(net: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, y: ((net(x) - y) ** 2).mean()


def train(
    n: int = 24, *, seed: int = 3, schedule: bool = True, optimizer: Any = torch.optim.AdamW, **kwargs: Any
) -> tuple[list[float], list[torch.Tensor], gs.TrainStep]:
    net = model()
    opt = optimizer(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, n)
    step = gs.TrainStep(loss_of(net), opt, **kwargs)
    losses = []
    with gs.thread_context("cpu", seed=seed):
        for i, batch in enumerate(batches(n)):
            losses.append(step(*batch).item())
            if schedule and (i + 1) % kwargs.get("accumulate", 1) == 0:
                scheduler.step()
    return losses, [t.detach().clone() for t in net.state_dict().values()], step


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_train_step_graph_equals_the_eager_loop_bit_for_bit(
    accumulate: int, set_to_none: bool, max_grad_norm: float | None
) -> None:
    kwargs = {"accumulate": accumulate, "set_to_none": set_to_none, "max_grad_norm": max_grad_norm}
    eager, graph = train(mode="eager", **kwargs), train(mode="graph", **kwargs)
    assert eager[0] == graph[0]
    assert all(torch.equal(a, b) for a, b in zip(eager[1], graph[1], strict=True))
    if max_grad_norm is not None:
        assert torch.equal(eager[2].grad_norm, graph[2].grad_norm)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_train_step_eager_mode_is_the_plain_loop(accumulate: int) -> None:
    net = model(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    plain_losses = []
    for i, (x, y) in enumerate(batches(12)):
        loss = loss_of(net)(x, y)
        (loss / accumulate).backward()
        plain_losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    other = model(dropout=0.0)
    step = gs.TrainStep(
        loss_of(other), torch.optim.AdamW(other.parameters(), lr=1e-2), accumulate=accumulate, max_grad_norm=0.5
    )
    with gs.thread_context("cpu"):
        losses = [step(*batch).item() for batch in batches(12)]
        assert torch.equal(step.grad_norm, norm)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_train_step_threads_equal_their_solo_runs() -> None:
    alone = [train(seed=i, schedule=False)[0] for i in range(3)]
    together: list[list[float]] = [[] for _ in range(3)]
    nets = [model() for _ in range(3)]

    def work(i: int) -> None:
        step = gs.TrainStep(loss_of(nets[i]), torch.optim.AdamW(nets[i].parameters(), lr=1e-2))
        with gs.thread_context("cpu", seed=i):
            together[i] = [step(*batch).item() for batch in batches(24)]

    run_threads(3, work, DEADLINE_S)
    assert together == alone


def test_train_step_that_draws_nothing_takes_shared_seats() -> None:
    net = model(dropout=0.0)
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), mode="eager")
    with gs.thread_context("cpu") as context:
        step(*batches(1)[0])
        kinds: list[bool] = []
        seat = context.seat
        context.seat = lambda *, exclusive: kinds.append(exclusive) or seat(exclusive=exclusive)  # type: ignore
        step(*batches(1)[0])
    assert kinds == [False]


def test_train_step_replays_read_only_static_inputs() -> None:
    seen: list[int] = []
    net = model()

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(x.data_ptr())
        return loss_of(net)(x, y)

    step = gs.TrainStep(loss_fn, torch.optim.AdamW(net.parameters()), num_warmup_iters=2)
    data = batches(6)
    kept = copy.deepcopy(data)
    with gs.thread_context("cpu") as context:
        for batch in data:
            step(*batch)
        assert context.counters.eager_steps == 2 and context.counters.captures == 1
        assert context.counters.replays == 3
    assert seen[:2] == [data[0][0].data_ptr(), data[1][0].data_ptr()]
    assert len(set(seen[2:])) == 1 and seen[2] not in {x.data_ptr() for x, _ in data}
    assert all(torch.equal(a[0], b[0]) for a, b in zip(data, kept, strict=True))  # the caller's are untouched


def test_train_step_reads_static_buffers_in_place_and_counts_their_slots_as_one_signature() -> None:
    seen: set[int] = set()
    net = model()

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add(x.data_ptr())
        return loss_of(net)(x, y)

    slots = [gs.StaticBuffers({"x": gs.Spec((4, 8), torch.float32), "y": gs.Spec((4, 1), torch.float32)}) for _ in "ab"]
    step = gs.TrainStep(loss_fn, torch.optim.AdamW(net.parameters()), max_graphs=1, num_warmup_iters=1)
    with gs.thread_context("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, (x, y) in enumerate(batches(8)):
            slots[i % 2].load({"x": x, "y": y})
            step(slots[i % 2]["x"], slots[i % 2]["y"])
    assert seen == {slot["x"].data_ptr() for slot in slots}


def test_train_step_outputs_are_copies_or_aliases() -> None:
    def run(outputs: str) -> list[torch.Tensor]:
        net = model()
        step = gs.TrainStep(
            lambda x, y: (loss_of(net)(x, y), {"x": x, "n": 3}),
            torch.optim.AdamW(net.parameters()),
            outputs=outputs,
            num_warmup_iters=1,
        )
        with gs.thread_context("cpu"):
            results = [step(*batch) for batch in batches(5)]
        assert all(aux["n"] == 3 and not loss.requires_grad for loss, aux in results)
        if outputs == "copy":
            assert all(torch.equal(aux["x"], x) for (_, aux), (x, _) in zip(results, batches(5), strict=True))
        return [loss for loss, _ in results]

    copies, aliases = run("copy"), run("alias")
    assert len({loss.data_ptr() for loss in copies}) == 5
    assert len({loss.data_ptr() for loss in aliases[2:]}) == 1
    assert aliases[2].item() == copies[-1].item()  # overwritten by the last replay


def test_train_step_more_signatures_than_max_graphs_run_eagerly_with_one_warning() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), max_graphs=2, num_warmup_iters=1)
    with gs.thread_context("cpu") as context, pytest.warns(gs.GraphsafeWarning, match="max_graphs=2") as caught:
        for _ in range(4):
            for size in (2, 3, 4, 5):
                step(*batches(1, size)[0])
        assert context.counters.captures == 2 and context.counters.mismatches >= 3
    assert len([w for w in caught if issubclass(w.category, gs.GraphsafeWarning)]) == 1


def test_train_step_mismatch_can_be_an_error_before_anything_is_trained() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), on_mismatch="error")
    with gs.thread_context("cpu"):
        step(*batches(1)[0])
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(gs.ShapeMismatchError):
            step(*batches(1, size=5)[0])
        assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
        step(*batches(1)[0])


def test_train_step_mismatch_can_run_eagerly() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), on_mismatch="eager", num_warmup_iters=1)
    with gs.thread_context("cpu") as context:
        for size in (4, 4, 5, 5, 5, 4):
            step(*batches(1, size)[0])
        assert context.counters.captures == 1 and context.counters.eager_steps == 4


def test_train_step_train_and_eval_are_two_signatures() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), num_warmup_iters=1)
    with gs.thread_context("cpu") as context:
        for mode in (True, False) * 3:
            net.train(mode)
            step(*batches(1)[0])
        assert context.counters.captures == 2


def test_train_step_hyper_parameter_that_changes_after_capture_raises_with_its_name() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = gs.TrainStep(loss_of(net), optimizer, num_warmup_iters=1)
    with gs.thread_context("cpu"):
        for batch in batches(3):
            step(*batch)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(gs.GraphsafeError, match="weight_decay"):
            step(*batches(1)[0])
        optimizer.param_groups[0]["weight_decay"] = 1e-2
        step(*batches(1)[0])


@pytest.mark.parametrize("replace", ["parameter", "optimizer state", "moved", "gradient"])
def test_train_step_sees_replaced_memory_before_the_replay(replace: str) -> None:
    def run(mode: str) -> list[float]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        step = gs.TrainStep(loss_of(net), optimizer, mode=mode, num_warmup_iters=1)
        losses = []
        with gs.thread_context("cpu", seed=1) as context:
            for i, batch in enumerate(batches(10)):
                if i == 5:
                    if replace == "parameter":
                        fresh = nn.Parameter(torch.zeros(16, 8))
                        net[0].weight = fresh
                        optimizer.param_groups[0]["params"][0] = fresh
                    elif replace == "optimizer state":
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    elif replace == "moved":
                        net.to(torch.float64).to(torch.float32)
                    else:
                        net[0].weight.grad = torch.ones(16, 8)
                losses.append(step(*batch).item())
            if mode == "graph":
                assert context.counters.captures == (1 if replace == "gradient" else 2)
                assert context.counters.eager_steps == 2
        return losses

    assert run("graph") == run("eager")


def test_train_step_that_cannot_be_captured_names_the_line_and_trains_nothing() -> None:
    net = model(dropout=0.0)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(net)(x, y)
        return loss if loss.item() < 1e9 else loss * 0  # the host reads the loss

    step = gs.TrainStep(loss_fn, torch.optim.AdamW(net.parameters()), num_warmup_iters=1)
    with gs.thread_context("cpu"):
        step(*batches(1)[0])
        before = copy.deepcopy(net.state_dict())  # the running statistics of BatchNorm among it
        with pytest.raises(gs.CaptureError, match=r"loss\.item") as caught:
            step(*batches(1)[0])
        assert "test_train_step.py" in str(caught.value.location)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
        assert all(p.grad is None for p in net.parameters())


def test_train_step_flush_steps_on_what_has_accumulated() -> None:
    def run(mode: str) -> list[torch.Tensor]:
        net = model(dropout=0.0)
        step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters(), lr=1e-2), accumulate=4, mode=mode)
        with gs.thread_context("cpu"):
            for batch in batches(10):
                step(*batch)
            step.flush()
            assert all(p.grad is None for p in net.parameters())
            after = [p.detach().clone() for p in net.parameters()]
            step.flush()  # nothing left
            assert all(torch.equal(a, b) for a, b in zip(after, net.parameters(), strict=True))
        return after

    net = model(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(batches(10)):
        (loss_of(net)(x, y) / 4).backward()
        if i in (3, 7, 9):
            optimizer.step()
            optimizer.zero_grad()
    for mode in ("eager", "graph"):
        assert all(torch.equal(a, b) for a, b in zip(run(mode), net.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_train_step_resumes_bit_for_bit_in_the_middle_of_an_accumulation(mode: str) -> None:
    def fresh() -> tuple[nn.Module, gs.TrainStep]:
        net = model()
        return net, gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters(), lr=1e-2), accumulate=3, mode=mode)

    data = batches(23)
    net, step = fresh()
    with gs.thread_context("cpu", seed=1):
        whole = [step(*batch).item() for batch in data]
    half, step = fresh()
    with gs.thread_context("cpu", seed=1):
        first = [step(*batch).item() for batch in data[:11]]
        state, weights = pickle.loads(pickle.dumps(step.state_dict())), copy.deepcopy(half.state_dict())
    assert state["position"] == 2
    other, step = fresh()
    other.load_state_dict(weights)
    step.load_state_dict(state)
    with gs.thread_context("cpu", seed=99):
        second = [step(*batch).item() for batch in data[11:]]
    assert first + second == whole
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_train_step_load_state_dict_refuses_what_is_no_state() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    with pytest.raises(gs.GraphsafeError, match="position"):
        step.load_state_dict({"optimizer": {}})


def test_train_step_outside_a_context_or_from_another_thread_is_an_error() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    with pytest.raises(gs.NoContextError):
        step(*batches(1)[0])
    with gs.thread_context("cpu", name="owner"):
        step(*batches(1)[0])

        def work(_: int) -> None:
            with gs.thread_context("cpu"), pytest.raises(gs.WrongThreadError, match="owner"):
                step(*batches(1)[0])

        run_threads(1, work, DEADLINE_S)
    with gs.thread_context("cpu"):  # the owner's context has ended: another may go on
        step(*batches(1)[0])


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"mode": "fast"}, "mode"),
        ({"accumulate": 0}, "accumulate"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"outputs": "view"}, "outputs"),
        ({"on_mismatch": "ignore"}, "on_mismatch"),
        ({"max_graphs": 0}, "max_graphs"),
        ({"num_warmup_iters": -1}, "num_warmup_iters"),
    ],
)
def test_train_step_arguments_are_checked(kwargs: dict[str, Any], name: str) -> None:
    net = model()
    with pytest.raises(gs.GraphsafeError, match=name):
        gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), **kwargs)


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adagrad(p), lambda p: torch.optim.SGD(p, lr=0.1)])
def test_train_step_optimizer_that_a_gpu_would_refuse_warns_by_name_and_works(make) -> None:
    net = model()
    optimizer = make(net.parameters())
    with pytest.warns(gs.GraphsafeWarning, match=type(optimizer).__name__):
        step = gs.TrainStep(loss_of(net), optimizer)
    with gs.thread_context("cpu"):
        losses = [step(*batches(1)[0]).item() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_train_step_bad_loss_or_batch_says_so() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = batches(1)[0]
    with gs.thread_context("cpu"):
        with pytest.raises(gs.GraphsafeError, match="loss of one element"):
            gs.TrainStep(lambda x, y: net(x), optimizer)(x, y)
        with pytest.raises(gs.GraphsafeError, match="does not require grad"):
            gs.TrainStep(lambda x, y: x.sum(), optimizer)(x, y)
        with pytest.raises(gs.GraphsafeError, match="cannot be hashed"):
            gs.TrainStep(lambda x, y, z: loss_of(net)(x, y), optimizer)(x, y, object.__new__(Unhashable))
        with pytest.raises(gs.ShapeMismatchError, match="meta"):
            gs.TrainStep(loss_of(net), optimizer)(x.to("meta"), y)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


def test_train_step_nested_in_a_capture_runs_inline() -> None:
    net = model(dropout=0.0)
    step = gs.TrainStep(loss_of(net), torch.optim.SGD(net.parameters(), lr=0.1), mode="eager")
    x, y = batches(1)[0]
    with gs.thread_context("cpu"):
        before = net[0].weight.detach().clone()
        with gs.capture() as graph:
            step(x, y)
        once = net[0].weight.detach().clone()
        graph.replay()
    assert not torch.equal(before, once) and not torch.equal(once, net[0].weight)


def test_train_step_frees_its_graphs_memory_with_its_context() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), num_warmup_iters=1)
    for _ in range(2):
        with gs.thread_context("cpu") as context:
            for batch in batches(4):
                step(*batch)
            assert context.counters.eager_steps >= 1 and context.counters.captures == 1


@pytest.mark.parametrize("change", ["frozen", "submodule"])
def test_train_step_sees_a_frozen_parameter_and_a_replaced_module(change: str) -> None:
    def run(mode: str) -> list[torch.Tensor]:
        net = model(dropout=0.0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        step = gs.TrainStep(loss_of(net), optimizer, model=net, mode=mode, num_warmup_iters=1)
        with gs.thread_context("cpu") as context:
            for i, batch in enumerate(batches(8)):
                if i == 4 and change == "frozen":
                    net[0].weight.requires_grad_(False)
                if i == 4 and change == "submodule":
                    net[2] = nn.Tanh()
                step(*batch)
            if mode == "graph":
                assert context.counters.captures == 2
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("eager"), run("graph"), strict=True))


def test_train_step_accumulation_of_signatures_that_reach_different_parameters_equals_eager() -> None:
    def run(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        left, right = nn.Linear(4, 4), nn.Linear(4, 4)
        parameters = [*left.parameters(), *right.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-1, weight_decay=0.5)

        def loss_fn(x: torch.Tensor, both: bool) -> torch.Tensor:
            out = left(x)
            return (right(out) if both else out).square().mean()

        step = gs.TrainStep(loss_fn, optimizer, accumulate=2, mode=mode, num_warmup_iters=1, max_graphs=8)
        generator = torch.Generator().manual_seed(5)
        pattern = [(True, True), (False, False), (True, False), (False, True)] * 6
        with gs.thread_context("cpu") as context:
            for pair in pattern:
                for both in pair:
                    step(torch.randn(3, 4, generator=generator), both)
            if mode == "graph":
                assert context.counters.replays > 0
        return [p.detach().clone() for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run("eager"), run("graph"), strict=True))


def test_train_step_notes_for_each_kind_of_call_whether_it_draws() -> None:
    def run(neighbour: bool) -> float:
        net = model(dropout=0.0)

        def loss_fn(x: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:
            return ((nn.functional.dropout(net(x), p) - y) ** 2).mean()

        step = gs.TrainStep(loss_fn, torch.optim.AdamW(net.parameters()), mode="eager")
        with gs.thread_context("cpu", seed=5):
            step(*batches(1)[0], 0.0)  # draws nothing
            if neighbour:
                torch.rand(11)
            return step(*batches(1)[0], 0.5).item()  # does

    assert run(False) == run(True)


def test_train_step_input_that_requires_grad_is_an_error_before_anything_is_trained() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    x, y = batches(1)[0]
    with gs.thread_context("cpu"), pytest.raises(gs.GraphsafeError, match="requires grad"):
        step(x.requires_grad_(), y)


def test_train_step_state_keeps_its_rng_until_the_first_call_and_refuses_another_optimizers() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    with gs.thread_context("cpu", seed=4):
        step(*batches(1)[0])
        state = step.state_dict()
    other = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["generator"], state["generator"])
    small = nn.Linear(2, 2)
    with pytest.raises(gs.GraphsafeError, match="does not fit"):
        gs.TrainStep(lambda x: small(x).sum(), torch.optim.AdamW(small.parameters())).load_state_dict(state)


def test_train_step_learning_rate_that_becomes_a_tensor_is_seen() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "lr": torch.tensor(1e-3)}, {"params": net[3].parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    step = gs.TrainStep(loss_of(net), optimizer, num_warmup_iters=1)
    with gs.thread_context("cpu"):
        for batch in batches(4):
            step(*batch)
        optimizer.param_groups[1]["lr"] = torch.tensor(1e-2)
        with pytest.raises(gs.GraphsafeError, match="'lr'"):
            step(*batches(1)[0])


def test_train_step_learning_rate_that_a_hook_of_the_step_sets_stays() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    step = gs.TrainStep(loss_of(net), optimizer)
    with gs.thread_context("cpu"):
        for batch in batches(6):
            step(*batch)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


def test_train_step_state_that_is_further_than_this_accumulation_is_refused() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), accumulate=4)
    with gs.thread_context("cpu"):
        for batch in batches(3):
            step(*batch)
        state = step.state_dict()
    short = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), accumulate=2)
    with pytest.raises(gs.GraphsafeError, match="3 micro-batches"):
        short.load_state_dict(state)
    state["gradients"][0] = torch.zeros(1)
    with pytest.raises(gs.GraphsafeError, match="shapes"):
        step.load_state_dict(state)
    with pytest.raises(gs.GraphsafeError, match="accumulate"):
        gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), accumulate=1.5)  # type: ignore[arg-type]


def test_train_step_resumes_its_rng_also_inside_an_eager_block() -> None:
    net = model()
    weights = copy.deepcopy(net.state_dict())
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    with gs.thread_context("cpu", seed=4) as context, context.eager():
        state = step.state_dict() | {"optimizer": copy.deepcopy(step.state_dict()["optimizer"])}
        step(*batches(1)[0])
        state["generator"] = step.state_dict()["generator"]
        weights = copy.deepcopy(net.state_dict())
        expected = step(*batches(1)[0])
    net.load_state_dict(weights)
    other = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), mode="eager")
    other.load_state_dict(state)
    with gs.thread_context("cpu", seed=9) as context, context.eager():
        assert torch.equal(other(*batches(1)[0]), expected)


def test_train_step_sparse_gradients_accumulate_as_in_the_eager_loop() -> None:
    def run(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
        parameters = [*table.parameters(), *head.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gs.GraphsafeWarning)
            step = gs.TrainStep(
                lambda i: head(table(i)).square().mean(), torch.optim.SGD(parameters, lr=0.1), accumulate=2, mode=mode
            )
        generator = torch.Generator().manual_seed(1)
        with gs.thread_context("cpu"):
            for _ in range(12):
                step(torch.randint(10, (5,), generator=generator))
        return [p.detach().clone() for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run("eager"), run("graph"), strict=True))


def test_train_step_aux_may_have_more_leaves_later() -> None:
    net, calls = model(), []

    def loss_fn(x: torch.Tensor, y: torch.Tensor):
        calls.append(1)
        return loss_of(net)(x, y), [x.mean()] * len(calls)

    step = gs.TrainStep(loss_fn, torch.optim.AdamW(net.parameters()), num_warmup_iters=1)
    with gs.thread_context("cpu"):
        assert [len(step(*batch)[1]) for batch in batches(5)] == [1, 2, 3, 4, 5]


def test_train_step_batch_that_is_not_dense_is_an_error() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()))
    x, y = batches(1)[0]
    with gs.thread_context("cpu"), pytest.raises(gs.GraphsafeError, match="layout"):
        step(x.to_sparse(), y)


def test_train_step_freezing_and_thawing_in_an_accumulation_equals_the_eager_loop() -> None:
    def run(mode: str) -> list[torch.Tensor]:
        net = model(dropout=0.0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.3)
        step = gs.TrainStep(loss_of(net), optimizer, accumulate=2, mode=mode, num_warmup_iters=1)
        with gs.thread_context("cpu") as context:
            for i, batch in enumerate(batches(32)):
                if i in (9, 20):
                    net[0].weight.requires_grad_(i == 20)
                step(*batch)
            if mode == "graph":
                assert context.counters.captures == 6 and context.counters.replays > 12
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("eager"), run("graph"), strict=True))


def test_train_step_is_clean_to_lint_with_an_optimizer_that_it_makes_capturable() -> None:
    net = model()
    step = gs.TrainStep(loss_of(net), torch.optim.AdamW(net.parameters()), model=net)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    assert gs.lint(step, *batches(1)[0]) == []
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    bad = gs.TrainStep(lambda x, y: loss_of(net)(x, y) * float(x.sum()), torch.optim.AdamW(net.parameters()))
    assert [finding.op for finding in gs.lint(bad, *batches(1)[0])]
