"""A hand-over between threads and a load of many tensors, beside the standard library's queue and a loop of copies.

The queue is given a clone of each batch, as it must where the producer fills one tensor again and again. Both sides
pass the same batches, and the consumer's sums are compared.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []
NUM_ITEMS = 100
DEPTH = 4


def run_both(*bodies: Callable[[], None]) -> None:
    """Run each in a thread of its own, and hand on the first failure."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("num_elements", [64, 65_536, 1_048_576])
def test_hand_over_between_threads(benchmark: Any, num_elements: int) -> None:
    made = torch.empty(num_elements, dtype=torch.int64)
    ring = gs.BufferRing({"x": gs.Spec((num_elements,), torch.int64)}, depth=DEPTH, device="cpu")
    items: queue.Queue[torch.Tensor] = queue.Queue(maxsize=DEPTH)

    def through_ring() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64)

        def produce() -> None:
            for number in range(NUM_ITEMS):
                with ring.produce(30) as slot:
                    slot["x"].fill_(number)  # the producer writes where the consumer reads

        def consume() -> None:
            for _ in range(NUM_ITEMS):
                with ring.consume(30) as slot:
                    total.add_(slot["x"][-1])

        run_both(produce, consume)
        return total

    def through_queue() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64)

        def produce() -> None:
            for number in range(NUM_ITEMS):
                made.fill_(number)
                items.put(made.clone(), timeout=30)

        def consume() -> None:
            for _ in range(NUM_ITEMS):
                total.add_(items.get(timeout=30)[-1])

        run_both(produce, consume)
        return total

    config = {"device": "cpu", "items": f"{NUM_ITEMS} of {num_elements} int64", "depth": DEPTH, "threads": 2}
    compare(benchmark, {"BufferRing": through_ring, "queue.Queue of clones": through_queue}, config=config)


def test_round_trip_in_one_thread(benchmark: Any) -> None:
    """The bookkeeping alone: a ring's slot against a queue's put and get of a clone."""
    source = torch.arange(64)
    ring = gs.BufferRing({"x": gs.Spec((64,), torch.int64)}, depth=2, device="cpu")
    items: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def ours() -> torch.Tensor:
        with ring.produce(30) as slot:
            slot["x"].copy_(source)
        with ring.consume(30) as slot:
            return slot["x"][-1].clone()

    def other() -> torch.Tensor:
        items.put(source.clone())
        return items.get()[-1].clone()

    config = {"device": "cpu", "item": "64 int64", "threads": 1}
    compare(benchmark, {"BufferRing": ours, "queue.Queue of clones": other}, config=config)


def test_load_of_many_small_tensors(benchmark: Any) -> None:
    specs = {f"t{i}": gs.Spec((64,)) for i in range(32)}
    buffers, by_hand = gs.StaticBuffers(specs, DEVICE), gs.StaticBuffers(specs, DEVICE)
    batch = {name: torch.full((64,), float(i), device=DEVICE) for i, name in enumerate(specs)}

    def load() -> dict[str, torch.Tensor]:
        buffers.load(batch)
        return dict(buffers)

    def copies() -> dict[str, torch.Tensor]:
        for name, source in batch.items():
            by_hand[name].copy_(source)
        return dict(by_hand)

    def synchronize() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    config = {"device": DEVICE, "batch": "32 tensors of 64 float32"}
    sides = {"StaticBuffers.load": load, "a loop of copy_": copies}
    compare(benchmark, sides, config=config, after=synchronize, max_calls=16)
