"""Whose a leaf is that threads share: its gradients arrive on one stream."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphsafe as gs
from graphsafe import context as contexts
from graphsafe import gate, leaf_owners, sessions
from graphsafe.leaf_owners import claimed
from graphsafe.repairs import nested_backward
from graphsafe.step_plans import StepPlan


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The process's backwards run inside no scope after the test."""
    before = list(nested_backward._scopes)
    yield
    nested_backward._scopes[:] = before


def in_another_context(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """What ``work`` returns in the context of a thread that stays until the second value is called."""
    ready, done, found = threading.Event(), threading.Event(), []

    def body() -> None:
        found.append(work())
        ready.set()
        assert done.wait(60)

    worker = gs.spawn(body, device="cpu")
    assert ready.wait(60)

    def end() -> None:
        done.set()
        worker.result(60)

    return found[0], end


def owns(context: gs.ThreadContext, leaves: list[torch.Tensor]) -> bool:
    with claimed(context, leaves) as own:
        return own


def doubled_as_own(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose graph keeps the leaf's node, which is this context's."""
    with claimed(gs.current_context(), [leaf]) as own:
        assert own
        return leaf * 2


def test_leaf_belongs_to_the_first_context_that_claims_it_as_long_as_a_graph_keeps_its_node() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    kept, end = in_another_context(lambda: doubled_as_own(leaves[0]))
    with gs.thread_context("cpu") as context:
        assert owns(context, leaves[1:]) and not owns(context, leaves)
        # 1. It stays the other's beyond its context, whose stream the node has.
        end()
        assert not owns(context, leaves)
        # 2. With the graph goes the node.
        del kept
        assert owns(context, leaves)


def test_node_is_kept_as_long_as_it_is_claimed() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with gs.thread_context("cpu") as context:
        with claimed(context, [leaf]) as own:
            assert own
            others, end = in_another_context(lambda: owns(gs.current_context(), [leaf]))
            assert not others
            end()
        others, end = in_another_context(lambda: owns(gs.current_context(), [leaf]))
        assert others
        end()


def test_node_that_an_eager_step_of_another_thread_may_have_made_is_waited_for() -> None:
    leaf = torch.ones(2, requires_grad=True)

    def step() -> None:
        with gs.current_context().eager(rng=False):
            kept = [leaf * 2]  # a node that nobody has marked
            started.set()
            assert not claims.wait(0.5)  # the other waits for the end of this step
            kept.clear()

    started, claims = threading.Event(), threading.Event()
    worker = gs.spawn(step, device="cpu")
    assert started.wait(60)
    with gs.thread_context("cpu") as context, claimed(context, [leaf]):
        claims.set()
    worker.result(60)


def test_claimed_leaf_that_becomes_another_kind_gets_a_node_that_is_looked_at_anew() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with gs.thread_context("cpu") as context:
        with claimed(context, [leaf]):
            mine = leaf * 2
        leaf.data = torch.ones(3, dtype=torch.float64)
        others, end = in_another_context(lambda: doubled_as_own(leaf))
        assert mine.grad_fn is not None and others.shape == (3,)
        assert not owns(context, [leaf])
        end()


def test_claimed_leaves_are_let_go_and_may_change_their_shape_while_the_context_lives() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with gs.thread_context("cpu") as context:
        assert owns(context, [leaf])
        leaf.data = torch.ones(5)
        (leaf * 3).sum().backward()
        assert torch.equal(leaf.grad, torch.full((5,), 3.0))
        gone = weakref.ref(leaf)
        del leaf
        gc.collect()
        assert gone() is None


def test_what_has_no_node_or_lies_elsewhere_is_not_asked_for_one() -> None:
    base = torch.ones(4, requires_grad=True).clone()
    stale = base.detach()[:2]
    stale.requires_grad_()
    others = [
        torch.ones(2),
        torch.ones(2, requires_grad=True) * 2,
        torch.eye(2).to_sparse().requires_grad_(),
        torch.ones(2, device="meta", requires_grad=True),
        stale,
    ]
    with gs.thread_context("cpu") as context:
        assert owns(context, others)


class Entered:
    """A scope that counts."""

    times = 0

    def __init__(self, roots: Any) -> None:
        assert isinstance(roots[0], torch.Tensor)

    def __enter__(self) -> None:
        Entered.times += 1

    def __exit__(self, *exc_info: object) -> None:
        pass


def needs_counted_backwards() -> None:
    sessions.watch_backwards()
    if nested_backward.accumulations() is None:
        pytest.skip("this torch's engine cannot be counted")


def test_outermost_backward_runs_inside_the_scope_that_was_asked_for() -> None:
    needs_counted_backwards()
    nested_backward.around(Entered)
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=True).sum().backward()  # one inside another
    assert Entered.times == 1 and torch.equal(x.grad, torch.full((2,), 2.0))


class Context:
    """A stand-in for a context of a GPU, with a real gate."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.gate = gate.gate_for(self.device)

    def seat(self, *, exclusive: bool) -> gate.Scope:
        return self.gate.seat(exclusive=exclusive)


@pytest.fixture
def on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """This thread has contexts of two GPUs, and has met nodes of others on both."""
    needs_counted_backwards()
    both = [Context(1), Context(0)]
    monkeypatch.setattr(contexts._per_thread, "contexts", both)
    monkeypatch.setattr(leaf_owners, "_guests", weakref.WeakSet(both))
    nested_backward.around(leaf_owners._Backward)
    return both


def test_backward_holds_a_seat_on_each_device_where_gradients_may_arrive_on_anothers_stream(
    on_two_gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[list[torch.device]] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: held.append([hold.gate.device for hold in gate._held()]))
    (x * 2).sum().backward()
    monkeypatch.setattr(leaf_owners, "_guests", weakref.WeakSet(on_two_gpus[:1]))
    (x * 2).sum().backward()
    monkeypatch.setattr(leaf_owners, "_guests", weakref.WeakSet())
    (x * 2).sum().backward()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert held == [[first, second], [second], []] and not gate._held()


def test_backward_inside_a_capture_is_checked_for_its_device_and_takes_no_seat(
    on_two_gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[Any, list[Context]]] = []
    monkeypatch.setattr(leaf_owners, "_check_nodes", lambda roots, found: checked.append((roots, found)))
    y = (torch.ones(2, requires_grad=True) * 2).sum()
    capture = on_two_gpus[0].gate.capture()
    capture.__enter__()
    try:
        y.backward()
        assert [hold.kind for hold in gate._held()] == [gate.Kind.CAPTURE]
    finally:
        capture.__exit__(None, None, None)
    ((roots, found),) = checked
    assert roots[0] is y and found == on_two_gpus[:1]


def test_backward_that_would_draw_anothers_stream_into_a_capture_is_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    y = leaf * 2
    kept, end = in_another_context(lambda: doubled_as_own(leaf))  # of which y's node is one, too
    with gs.thread_context("cpu") as context:
        for roots in (y, (y,), (torch.autograd.graph.get_gradient_edge(kept),)):
            with pytest.raises(gs.CaptureError, match=r"shape \(2,\) whose gradients arrive on another"):
                leaf_owners._check_nodes(roots, [context])
        leaf_owners._check_nodes((torch.ones(3, requires_grad=True) * leaf.detach()[:1],), [context])
        end()


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
