"""Captures on the CPU: operators recorded and run again, refusals that name the line, and clean failures."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import graphsafe as gs
from graphsafe import gate, walk

from .helpers import run_threads

DEADLINE_S = 30.0


def test_capture_replays_on_the_same_tensors_below_autograd() -> None:
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            y = layer(x).relu()
            view = y.view(-1)[:2]
            (gradient,) = torch.autograd.grad(y.sum(), layer.weight)
        for _ in range(3):
            x.normal_()
            graph.replay()
            expected = layer(x).relu()
            assert torch.equal(y, expected) and torch.equal(view, expected.view(-1)[:2])
            assert torch.equal(gradient, torch.autograd.grad(expected.sum(), layer.weight)[0])


def test_capture_replays_in_place_updates() -> None:
    counter = torch.zeros(1)
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            counter.add_(1)
        before = counter.clone()
        graph.replay()
        graph.replay()
    assert torch.equal(counter, before + 2)


def test_capture_draws_new_numbers_from_the_context_at_every_replay() -> None:
    def run() -> list[torch.Tensor]:
        with gs.thread_context("cpu", seed=1):
            with gs.capture() as graph:
                mask = torch.rand(8)
            found = [mask.clone()]
            for _ in range(3):
                graph.replay()
                found.append(mask.clone())
            return found

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(t.tolist()) for t in first}) == 4


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("item", lambda x: x.sum().item()),
        ("branch", lambda x: 1 if x.sum() > 0 else 0),
        ("nonzero", lambda x: x.nonzero()),
        ("boolean index", lambda x: x[x > 0]),
        ("unique", lambda x: x.unique()),
        ("equal", lambda x: torch.equal(x, x + 1)),
        ("unknown generator", lambda x: torch.rand(2, generator=torch.Generator())),
    ],
)
def test_capture_refuses_what_a_gpu_would_and_names_the_line(name: str, operation) -> None:
    x = torch.randn(6)
    with gs.thread_context("cpu") as context:
        with gs.capture() as good:
            y = x * 2
        generator = context.generator.get_state().clone()
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            operation(x)
        assert caught.value.location is not None and "test_capture.py" in caught.value.location
        assert caught.value.operation is not None and caught.value.cure is not None
        assert torch.equal(context.generator.get_state(), generator) or name == "unknown generator"
        assert gate.capturing() is None and gc.isenabled()
        x.fill_(3.0)
        good.replay()  # the earlier graph goes on
        assert torch.equal(y, torch.full((6,), 6.0))
        assert context.counters.failed_captures == 1


def test_capture_allows_integer_indices_and_fixed_shapes() -> None:
    x, index = torch.randn(6), torch.tensor([0, 2])
    with gs.thread_context("cpu"), gs.capture() as graph:
        y = x[index] + torch.where(x > 0, x, 0.0).sum() + gs.padding.fixed_nonzero(x > 0, 3)[0].sum()
    assert y.shape == (2,) and graph is not None


def test_capture_passes_the_blocks_own_error_through() -> None:
    with gs.thread_context("cpu"):
        with pytest.raises(KeyError, match="mine"), gs.capture():
            raise KeyError("mine")
        with gs.capture():
            torch.ones(2) + 1


def test_capture_outside_a_context_or_inside_another_is_an_error() -> None:
    with pytest.raises(gs.NoContextError), gs.capture():
        pass
    with gs.thread_context("cpu"), gs.capture(), pytest.raises(gs.CaptureError, match="inside a capture"), gs.capture():
        pass


def test_graph_replayed_by_another_thread_is_an_error() -> None:
    with gs.thread_context("cpu", name="owner"):
        with gs.capture() as graph:
            torch.ones(2) + 1

        def work(_: int) -> None:
            with pytest.raises(gs.WrongThreadError, match="owner"):
                graph.replay()

        run_threads(1, work, DEADLINE_S)
        graph.replay()


def test_graph_dies_with_its_context_and_by_reset() -> None:
    with gs.thread_context("cpu"):
        with gs.capture() as first:
            torch.ones(2) + 1
        with gs.capture() as second:
            torch.ones(2) + 1
        first.reset()
        with pytest.raises(gs.GraphsafeError, match="reset"):
            first.replay()
        second.replay()
    with pytest.raises(gs.GraphsafeError, match="context has ended"):
        second.replay()


def test_graph_keeps_alive_what_its_code_reached() -> None:
    with gs.thread_context("cpu"):

        def make() -> tuple[gs.Graph, weakref.ref[torch.Tensor]]:
            layer = nn.Linear(2, 2)
            with gs.capture() as graph:
                layer(torch.ones(1, 2))
            return graph, weakref.ref(layer.weight)

        graph, weight = make()
        gc.collect()
        assert weight() is not None
        graph.reset()
        del graph
        gc.collect()
        assert weight() is None


def test_collector_is_off_while_anything_captures_and_back_as_it_was() -> None:
    with gs.thread_context("cpu"):
        with gs.capture():
            assert not gc.isenabled()
        assert gc.isenabled()
        gc.disable()
        try:
            with gs.capture():
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()


def test_captures_of_many_threads_are_each_their_own() -> None:
    def work(i: int) -> None:
        with gs.thread_context("cpu", seed=i):
            x = torch.full((4,), float(i))
            for _ in range(20):
                with gs.capture() as graph:
                    y = x * 2 + torch.rand(4)
                x.add_(1)
                graph.replay()
                assert ((y - x * 2) >= 0).all() and ((y - x * 2) <= 1).all()

    run_threads(4, work, DEADLINE_S)


def test_walk_finds_tensors_wherever_they_hang() -> None:
    hidden = [torch.zeros(1) for _ in range(8)]

    class Slotted:
        __slots__ = ("tensor",)

    slotted = Slotted()
    slotted.tensor = hidden[0]

    class Holder:
        def __init__(self) -> None:
            self.tensor = hidden[1]

        def method(self) -> None: ...

    def outer():
        inside = hidden[2]
        return lambda default=hidden[3]: (inside, default)

    roots = (
        slotted,
        Holder().method,
        outer(),
        functools.partial(print, hidden[4], sep=hidden[5]),
        {"a": [({1: hidden[6]},)]},
        nn.ParameterList([nn.Parameter(hidden[7])]),
    )
    found = {id(t) for t in walk.tensors(*roots)}
    assert {id(t) for t in hidden[:7]} <= found
    assert any(t.data_ptr() == hidden[7].data_ptr() for t in walk.tensors(roots[-1]))


def test_walk_ends_on_cycles_and_finds_globals_that_code_names() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert walk.tensors(loop) == []
    assert any(t is GLOBAL for t in walk.tensors(reads_global))


GLOBAL = torch.zeros(3)


def reads_global() -> torch.Tensor:
    return GLOBAL + 1


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.detach().numpy()),
        ("repr", lambda x: repr(x)),
        ("format", lambda x: f"{x.sum()}"),
        ("masked put", lambda x: x.index_put_((x > 0,), x[:3].sum().expand(3))),
    ],
)
def test_capture_refuses_reads_that_no_operator_shows(name: str, operation) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, -1.0])
    with gs.thread_context("cpu"), pytest.raises(gs.CaptureError) as caught, gs.capture():
        operation(x)
    assert "test_capture.py" in str(caught.value.location)


def test_capture_allows_one_value_where_a_mask_is_true() -> None:
    x = torch.tensor([1.0, -2.0])
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            x[x < 0] = 0.0
        x.copy_(torch.tensor([-5.0, 6.0]))
        graph.replay()
    assert x.tolist() == [0.0, 6.0]


def test_capture_takes_the_default_generator_by_name_and_refuses_the_contexts() -> None:
    with gs.thread_context("cpu") as context:
        with gs.capture():
            torch.rand(2, generator=torch.default_generator)
        with pytest.raises(gs.CaptureError, match="generator"), gs.capture():
            torch.rand(2, generator=context.generator)


def test_graph_keeps_alive_what_its_block_rebinds() -> None:
    with gs.thread_context("cpu"):
        x = torch.ones(3)
        old = weakref.ref(x)
        with gs.capture() as graph:
            x = x * 2
        graph._recorder = None  # a CUDA graph holds no tensor itself
        gc.collect()
        assert old() is not None and x is not None
        graph.reset()
        gc.collect()
        assert old() is None


def test_stats_can_be_asked_while_graphs_come_and_go() -> None:
    def work(i: int) -> None:
        if i == 0:
            for _ in range(300):
                gs.stats()
            return
        with gs.thread_context("cpu"):
            for _ in range(100):
                with gs.capture():
                    pass

    run_threads(4, work, DEADLINE_S)


def test_walk_looks_into_everything_however_large() -> None:
    hidden = torch.zeros(1)
    many: list[object] = [object() for _ in range(300_000)]
    layer = nn.Linear(2, 2)
    many += [hidden, layer]
    assert any(t is hidden for t in walk.tensors(many)) and walk.modules(many) == [layer]


def test_capture_replays_a_block_that_changes_how_a_tensor_is_read() -> None:
    x = torch.arange(6.0).view(2, 3)
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            z = x * 1
            z.t_()
            w = z + 1
        x.mul_(2)
        graph.replay()
    assert torch.equal(w, x.t() + 1)


def test_capture_that_fails_inside_an_eager_block_gives_its_numbers_back() -> None:
    def run(fail: bool) -> torch.Tensor:
        with gs.thread_context("cpu", seed=6) as context, context.eager():
            if fail:
                with pytest.raises(gs.CaptureError), gs.capture():
                    torch.rand(5).sum().item()
            return torch.rand(3)

    assert torch.equal(run(True), run(False))


def test_capture_leaves_nothing_of_its_frame_alive() -> None:
    with gs.thread_context("cpu"):
        kept: torch.Tensor | None = torch.ones(5)
        gone = weakref.ref(kept)
        with gs.capture() as graph:
            torch.ones(2) + 1
        graph.reset()
        kept = None
        assert gone() is None and kept is None


def test_capture_leaves_a_dict_of_locals_alone_that_the_user_holds() -> None:
    x = torch.ones(3)
    with gs.thread_context("cpu"):
        variables = locals()
        with gs.capture() as graph:
            y = x + 1
        graph.replay()
    assert variables["x"] is x and y is not None


def test_walk_runs_no_code_of_a_containers_own() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def _refuse(self, *args: object) -> None:
            raise AssertionError("looked into by its own code")

        items = values = keys = __iter__ = __getitem__ = _refuse  # type: ignore[assignment]

    class OddList(list):  # type: ignore[type-arg]
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("looked into by its own code")

    tensor = torch.zeros(2)
    assert [t is tensor for t in walk.tensors(Odd(a=tensor))] == [True]
    assert [t is tensor for t in walk.tensors(OddList([tensor]))] == [True]
