"""Who owns a leaf that threads share: its gradients arrive on one stream."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

import graphsafe as gs
from graphsafe import leaf_owners, sessions
from graphsafe.repairs import nested_backward


def test_leaf_belongs_to_the_first_context_that_claims_it_as_long_as_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nested_backward, "around", lambda scope: None)
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    claimed, done = threading.Event(), threading.Event()

    def owner() -> bool:
        mine = leaf_owners.claim(gs.current_context(), leaves[:1])
        claimed.set()
        assert done.wait(30)
        return mine and leaf_owners.claim(gs.current_context(), leaves[:1])

    worker = gs.spawn(owner, device="cpu")
    assert claimed.wait(30)
    with gs.thread_context("cpu") as context:
        assert not leaf_owners.claim(context, leaves)  # 1. the first is the worker's
        assert leaf_owners.claim(context, leaves[1:])
        done.set()
        assert worker.result(30)
        assert leaf_owners.claim(context, leaves)  # 2. whose context has ended


def test_leaves_claimed_are_let_go_with_their_context() -> None:
    leaf = torch.ones(2, requires_grad=True)
    gone = weakref.ref(leaf)
    with gs.thread_context("cpu") as context:
        assert leaf_owners.claim(context, [leaf])
    del context, leaf
    gc.collect()
    assert gone() is None


def test_outermost_backward_runs_inside_the_scope_that_was_asked_for() -> None:
    entered: list[int] = []

    @contextmanager
    def scope():  # type: ignore[no-untyped-def]
        entered.append(1)
        yield

    sessions.watch_backwards()
    if nested_backward.accumulations() is None:
        pytest.skip("this torch's engine cannot be counted")
    before = list(nested_backward._scopes)
    nested_backward.around(scope)
    try:
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=True).sum().backward()  # one inside another
        assert entered == [1] and torch.equal(x.grad, torch.full((2,), 2.0))
    finally:
        nested_backward._scopes[:] = before
