"""Whose a leaf is that threads share: its gradients arrive on one stream."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import graphsafe as gs
from graphsafe import context as contexts
from graphsafe import gate, leaf_owners, sessions
from graphsafe.leaf_owners import alive, claimed, claimed_if_shared, note_leaves, note_nodes
from graphsafe.repairs import nested_backward
from graphsafe.step_plans import StepPlan


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The process's backwards run inside no scope after the test that they did not run in before."""
    before, graphed = list(nested_backward._scopes), leaf_owners._Use.graphed
    yield
    nested_backward._scopes[:] = before
    leaf_owners._Use.graphed = graphed


class Context:
    """A stand-in for a context of a GPU, with a real gate. Its leaves lie on the CPU."""

    def __init__(self, name: str, device: str = "cpu", at: int = 0) -> None:
        self.name, self.stream = name, SimpleNamespace(cuda_stream=hash(name))
        self.device = torch.device(device)
        self.gate = gate.gate_for(torch.device("cuda", at))

    def seat(self, *, exclusive: bool) -> gate.Scope:
        return self.gate.seat(exclusive=exclusive)


def owns(context: Any, leaves: list[torch.Tensor]) -> bool:
    with claimed(context, leaves) as own:
        return own


def doubled_by(context: Any, leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose graph keeps the leaf's node, which has the context's stream."""
    with claimed(context, [leaf]) as own:
        assert own
        return leaf * 2


one, two = cast(gs.ThreadContext, Context("one")), cast(gs.ThreadContext, Context("two"))


def test_leaf_belongs_to_the_first_stream_as_long_as_a_graph_keeps_its_node() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    kept = doubled_by(one, leaves[0])
    assert owns(two, leaves[1:]) and not owns(two, leaves)
    # 1. The next context with that stream owns it, too.
    assert owns(cast(gs.ThreadContext, Context("one")), leaves)
    # 2. With the graph goes the node.
    del kept
    assert owns(two, leaves)


def test_node_is_kept_as_long_as_it_is_claimed() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with claimed(one, [leaf]) as own:
        assert own and not owns(two, [leaf])
    assert owns(two, [leaf])


def test_what_a_graphed_call_met_is_marked_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_owners._Use, "graphed", False)
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    # 1. Nobody shares anything: eager steps mark nothing.
    with claimed_if_shared(one, leaves):
        kept = [leaf * 2 for leaf in leaves]
    assert owns(two, leaves)
    del kept
    # 2. A graphed call in eager mode, and one in a capture.
    kept = [leaf * 2 for leaf in leaves]
    assert [ref() for ref in note_leaves(one, leaves[:1])] == leaves[:1]
    note_nodes(one, [kept[1], "no tensor"])
    assert not owns(two, leaves[:1]) and not owns(two, leaves[1:])
    # 3. From now on eager steps mark theirs.
    del kept
    with claimed_if_shared(one, leaves):
        kept = [leaf * 2 for leaf in leaves]
    assert not owns(two, leaves) and kept


def test_nodes_are_claimed_while_nobody_captures() -> None:
    leaf = torch.ones(2, requires_grad=True)
    kept: list[torch.Tensor] = []

    def captures() -> None:
        with one.gate.capture():
            started.set()
            kept.append(leaf * 2)
            assert not claims.wait(0.5)
            note_nodes(one, kept)

    started, claims = threading.Event(), threading.Event()
    worker = gs.spawn(captures, device="cpu")
    assert started.wait(60)
    with claimed(two, [leaf]) as own:
        claims.set()
        assert not own
    worker.result(60)


def test_claimed_leaf_that_becomes_another_kind_gets_a_node_that_is_looked_at_anew() -> None:
    leaf = torch.ones(2, requires_grad=True)
    mine = doubled_by(one, leaf)
    leaf.data = torch.ones(3, dtype=torch.float64)
    other = doubled_by(two, leaf)
    assert mine.grad_fn is not None and other.shape == (3,)
    assert not owns(one, [leaf])


def test_claimed_leaves_are_let_go_and_may_change_their_shape() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert owns(one, [leaf])
    noted = note_leaves(one, [leaf])
    leaf.data = torch.ones(5)
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((5,), 3.0)) and alive(noted) == [leaf]
    del leaf
    gc.collect()
    assert alive(noted) == [] == alive(None)


def test_what_has_no_node_or_lies_elsewhere_is_not_asked_for_one() -> None:
    stale = torch.ones(4).requires_grad_().clone()
    view = stale[:2]
    with torch.no_grad():
        stale.mul_(2)
    others = [
        torch.ones(2),
        torch.ones(2, requires_grad=True) * 2,
        torch.eye(2).to_sparse().requires_grad_(),
        torch.ones(2, device="meta", requires_grad=True),
        torch.nn.LazyLinear(2).weight,
        view,
    ]
    assert owns(one, others)
    with gs.thread_context("cpu") as context, claimed(context, [leaf := torch.ones(2, requires_grad=True)]) as own:
        assert own
        assert "graphsafe.stream" not in torch.autograd.graph.get_gradient_edge(leaf).node.metadata


class Entered:
    """A scope that counts."""

    times = 0

    def __init__(self, roots: Any, inputs: Any) -> None:
        assert isinstance(roots[0], torch.Tensor)

    def __enter__(self) -> None:
        Entered.times += 1

    def __exit__(self, *exc_info: object) -> None:
        pass


def needs_counted_backwards() -> None:
    sessions.watch_backwards()
    if nested_backward.accumulations() is None:
        pytest.skip("this torch's engine cannot be counted")


def test_each_backward_runs_inside_the_scope_that_was_asked_for() -> None:
    needs_counted_backwards()
    nested_backward.around(Entered)
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=True).sum().backward()  # one inside another
    assert Entered.times == 2 and torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.fixture
def on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """This thread has contexts of two GPUs."""
    needs_counted_backwards()
    monkeypatch.setattr(leaf_owners._Use, "graphed", True)
    both = [Context("second", "cuda:1", 1), Context("first", "cuda:0", 0)]
    monkeypatch.setattr(contexts._per_thread, "contexts", both)
    leaf_owners.watch()
    return both


def test_backward_holds_a_seat_on_each_device_of_its_thread(on_two_gpus: list[Context]) -> None:
    held: list[list[torch.device]] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: held.append([hold.gate.device for hold in gate.held()]))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    (x * 2).sum().backward()
    with on_two_gpus[0].seat(exclusive=True):
        (x * 2).sum().backward()
    assert held == [[first, second], [first, second]] and not gate.held()


def test_backward_takes_no_seat_in_a_compile_nor_before_anything_is_shared(
    on_two_gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(len(gate.held())))
    monkeypatch.setitem(gate.compiling, threading.get_ident(), 0.0)
    (x * 2).sum().backward()
    monkeypatch.delitem(gate.compiling, threading.get_ident())
    (x * 2).sum().backward()
    monkeypatch.setattr(leaf_owners._Use, "graphed", False)
    (x * 2).sum().backward()
    assert seen == [0, 2, 0]


def test_claim_before_a_capture_waits_for_eager_steps_which_mark_nothing() -> None:
    leaf = torch.ones(2, requires_grad=True)

    def step() -> None:
        with one.seat(exclusive=False):
            kept = [leaf * 2]  # whose node nobody has marked
            started.set()
            assert not claims.wait(0.5)
            kept.clear()

    started, claims = threading.Event(), threading.Event()
    worker = gs.spawn(step, device="cpu")
    assert started.wait(60)
    with claimed(two, [leaf], alone=True) as own:
        claims.set()
        assert own
    worker.result(60)


def test_nothing_is_claimed_in_inference_mode() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        assert owns(one, [leaf])
    assert owns(two, [leaf])


def test_backward_takes_no_seat_that_another_task_of_its_thread_holds(on_two_gpus: list[Context]) -> None:
    x = torch.ones(2, requires_grad=True)

    async def holder(done: asyncio.Event) -> None:
        with on_two_gpus[0].seat(exclusive=False):
            await done.wait()

    async def main() -> None:
        done = asyncio.Event()
        task = asyncio.create_task(holder(done))
        await asyncio.sleep(0)
        (x * 2).sum().backward()
        done.set()
        await task

    asyncio.run(main())
    assert torch.equal(x.grad, torch.full((2,), 2.0)) and not gate.held()


def test_threads_without_contexts_take_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_counted_backwards()
    monkeypatch.setattr(leaf_owners._Use, "graphed", True)
    leaf_owners.watch()
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(len(gate.held())))
    (x * 2).sum().backward()
    assert seen == [0]


def test_backward_inside_a_capture_is_checked_for_its_device_and_takes_no_seat(
    on_two_gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[Any, Any, list[Context]]] = []
    monkeypatch.setattr(leaf_owners, "_check_nodes", lambda *args: checked.append(args))
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    capture = on_two_gpus[0].gate.capture()
    capture.__enter__()
    try:
        y.backward(retain_graph=True)
        torch.autograd.grad(y, x)
        assert [hold.kind for hold in gate.held()] == [gate.Kind.CAPTURE]
    finally:
        capture.__exit__(None, None, None)
    for (roots, inputs, found), expected in zip(checked, [(), (x,)], strict=True):
        assert roots[0] is y and found == on_two_gpus[:1]
        assert len(inputs) == len(expected) and all(a is b for a, b in zip(inputs, expected, strict=True))


def test_backward_that_would_draw_anothers_stream_into_a_capture_is_refused() -> None:
    leaf, free = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = leaf * free
    kept = doubled_by(one, leaf)  # of which y's node is one, too
    edge = torch.autograd.graph.get_gradient_edge(kept)
    of_leaf = torch.autograd.graph.get_gradient_edge(leaf)
    for roots, inputs in (
        (y, ()),
        ((y,), None),
        ((edge,), ()),
        ((y,), (leaf,)),
        ((y,), (of_leaf,)),
        ((leaf,), ()),
        ((leaf.detach(), y), ()),
    ):
        with pytest.raises(gs.CaptureError, match=r"shape \(2,\) whose gradients arrive on another"):
            leaf_owners._check_nodes(roots, inputs, [two])
        leaf_owners._check_nodes(roots, inputs, [one])
    leaf_owners._check_nodes((y,), (free,), [one])
    assert not owns(two, [free])  # it was nobody's


def test_training_step_on_anothers_leaves_says_once_that_it_runs_eagerly() -> None:
    plan = StepPlan("", admitted=True)
    with pytest.warns(gs.GraphsafeWarning, match="another thread's graph reads its parameters"):
        plan.note_guest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.note_guest()


def test_a_backward_on_seats_in_compiled_code_waits_for_no_compile(on_two_gpus: list[Context]) -> None:
    """Dynamo would compile what the gate runs with its lock held, and wait for the lock of compiles."""
    names: list[str] = []
    gs.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # from here on the repairs of Dynamo are in
    from torch._dynamo import convert_frame

    original = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(frame.f_code.co_filename)
        return original(self, frame, *args, **kwargs)

    convert_frame.ConvertFrameAssert.__call__ = noted  # type: ignore[method-assign]
    try:

        @gs.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y = (x * 2).sum()
            y.backward()
            return y + 1

        x = torch.ones(3, requires_grad=True)
        step(x)
    finally:
        convert_frame.ConvertFrameAssert.__call__ = original  # type: ignore[method-assign]
    assert names and not [name for name in names if "graphsafe" in name and "tests" not in name], names
