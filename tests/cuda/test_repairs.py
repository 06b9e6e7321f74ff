"""Seeding and synchronising beside a capture (B18, B9), on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import graphsafe

pytestmark = pytest.mark.cuda

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    was_installed = bool(graphsafe.installed())
    graphsafe.install()
    yield
    if not was_installed:
        graphsafe.uninstall()


def _beside_a_capture(call: Callable[[], object]) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Run ``call`` in another thread during a capture of a random operator.

    Returns:
        whether it had ended before the capture did, and what two replays drew.
    """
    started, ended = threading.Event(), threading.Event()

    def body() -> None:
        started.set()
        call()
        ended.set()

    thread = threading.Thread(target=body, daemon=True)
    with graphsafe.thread_context("cuda:0", seed=3) as context:
        drawn = torch.zeros(64, device="cuda:0")
        context.synchronize()
        with graphsafe.capture() as graph:
            thread.start()  # 1. this thread captures
            assert started.wait(DEADLINE_S)
            early = ended.wait(0.5)  # 2. the other one calls, and must not get through
            drawn.copy_(torch.rand(64, device="cuda:0"))
        thread.join(DEADLINE_S)  # 3. it does once the capture has ended
        assert ended.is_set()
        draws = []
        for _ in range(2):
            graph.replay()
            draws.append(drawn.clone())
        context.synchronize()
        return early, draws[0].cpu(), draws[1].cpu()


def test_seeding_waits_for_the_capture_of_another_thread_and_neither_seed_is_lost() -> None:
    expected = _beside_a_capture(lambda: None)
    early, *draws = _beside_a_capture(lambda: torch.manual_seed(1234))
    assert not early
    assert torch.cuda.default_generators[0].initial_seed() == 1234
    assert all(torch.equal(draw, other) for draw, other in zip(draws, expected[1:], strict=True))


@pytest.mark.parametrize("synchronize", [torch.cuda.synchronize, torch.accelerator.synchronize])
def test_synchronize_waits_for_the_capture_of_another_thread(synchronize: Callable[[], None]) -> None:
    early, *_ = _beside_a_capture(synchronize)
    assert not early


LOCKED_STEP = """
import faulthandler, json, sys, threading
faulthandler.dump_traceback_later(80, exit=True)
import torch
from torch.utils.checkpoint import checkpoint
if sys.argv[1] == "graphsafe":
    import graphsafe
    graphsafe.install()
lock, got, idents = threading.RLock(), [], []

def layer(x):
    taken = lock.acquire(timeout=2)  # whoever recomputes must be the thread that holds the lock around the step
    got.append(taken)
    idents.append(threading.get_ident())
    if taken:
        lock.release()
    return x.sin()

def step():
    x = torch.ones(8, device="cuda", requires_grad=True)
    with lock:
        checkpoint(layer, x, use_reentrant=sys.argv[2] == "reentrant").sum().backward()

for body in (step, lambda: [thread.start() or thread.join() for thread in [threading.Thread(target=step)]]):
    body()
print(json.dumps([got, len(set(idents))]))
"""


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recompute_meets_the_lock_of_its_own_thread_and_another_one_on_plain_torch(kind: str) -> None:
    def run(who: str) -> tuple[list[bool], int]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOCKED_STEP, who, kind],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])},
        )
        assert done.returncode == 0, done.stderr
        got, threads = json.loads(done.stdout)
        return got, threads

    got, _ = run("plain")
    assert got == [True, False, True, False], "plain torch recomputes on a thread of its own"
    got, threads = run("graphsafe")
    assert got == [True] * 4 and threads == 2
