"""What a hand-over and a load cost, beside the standard library's queue and a loop of copies."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

import graphsafe as gs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ITEMS = 200


def test_ring_round_trip_in_one_thread(benchmark: Any) -> None:
    ring = gs.BufferRing({"x": gs.Spec((8,))}, depth=2, device=DEVICE)

    def round_trip() -> None:
        with ring.produce(0):
            pass
        with ring.consume(0):
            pass

    benchmark(round_trip)


def test_queue_round_trip_in_one_thread(benchmark: Any) -> None:
    items: queue.Queue[int] = queue.Queue(maxsize=2)

    def round_trip() -> None:
        items.put(0)
        items.get()

    benchmark(round_trip)


@pytest.mark.parametrize("num_pairs", [1, 4])
def test_ring_hands_items_between_threads(benchmark: Any, num_pairs: int) -> None:
    def pipeline() -> None:
        ring = gs.BufferRing({"x": gs.Spec((8,))}, depth=2 * num_pairs, device="cpu")
        barrier = threading.Barrier(2 * num_pairs)

        def produce() -> None:
            barrier.wait()
            for _ in range(NUM_ITEMS // num_pairs):
                with ring.produce(30):
                    pass

        def consume() -> None:
            barrier.wait()
            for _ in range(NUM_ITEMS // num_pairs):
                with ring.consume(30):
                    pass

        threads = [threading.Thread(target=target) for target in (produce, consume) for _ in range(num_pairs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    benchmark.extra_info["num_items"] = NUM_ITEMS
    benchmark.pedantic(pipeline, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("how", ["load", "copies"])
def test_load_of_many_small_tensors(benchmark: Any, how: str) -> None:
    specs = {f"t{i}": gs.Spec((64,)) for i in range(32)}
    buffers = gs.StaticBuffers(specs, DEVICE)
    batch = {name: torch.ones(64, device=DEVICE) for name in specs}

    def copies() -> None:
        for name, source in batch.items():
            buffers[name].copy_(source)

    benchmark((lambda: buffers.load(batch)) if how == "load" else copies)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
