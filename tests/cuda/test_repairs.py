"""Seeding and synchronising beside a capture (B18, B9), on a GPU."""

from __future__ import annotations

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
