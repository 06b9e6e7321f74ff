"""Rings on CUDA: values are right behind a long kernel, between streams, threads, devices and the host."""

from __future__ import annotations

import gc

import pytest
import torch

from graphsafe.buffers import BufferRing, Spec, StaticBuffers
from graphsafe.context import thread_context
from tests.helpers import run_threads

pytestmark = pytest.mark.cuda

SLEEP_CYCLES = 20_000_000  # about 10 ms: far longer than any hand-over takes on the host
NUM_ITEMS = 8
SPECS = {"x": Spec((1 << 16,), torch.int64)}


def pipeline(ring: BufferRing, producer: str, consumer: str) -> list[tuple[int, int]]:
    """Values 1.. written behind a long kernel on one stream, and read on another; (min, max) of each item."""

    def work(index: int) -> list[torch.Tensor]:
        with thread_context(producer if index == 0 else consumer):
            seen = []
            for i in range(1, NUM_ITEMS + 1):
                if index == 0:
                    with ring.produce(30) as slot:
                        torch.cuda._sleep(SLEEP_CYCLES)
                        slot.load({"x": torch.full((1 << 16,), i, device=producer)})
                else:
                    with ring.consume(30) as slot:
                        torch.cuda._sleep(SLEEP_CYCLES)  # the read comes late too, so the next write must wait for it
                        seen.append(slot["x"].to(consumer, non_blocking=True).aminmax())
            return [torch.stack(list(pair)) for pair in seen]

    seen = run_threads(2, work, timeout=60)[1]
    return [tuple(pair.tolist()) for pair in seen]


EXPECTED = [(i, i) for i in range(1, NUM_ITEMS + 1)]


def test_ring_values_are_right_behind_a_long_kernel() -> None:
    assert pipeline(BufferRing(SPECS, depth=2, device="cuda:0"), "cuda:0", "cuda:0") == EXPECTED


def test_ring_values_are_right_with_one_slot() -> None:
    assert pipeline(BufferRing(SPECS, depth=1, device="cuda:0"), "cuda:0", "cuda:0") == EXPECTED


def test_pinned_ring_values_are_right_on_the_host_and_back() -> None:
    ring = BufferRing(SPECS, depth=2, device="cpu")
    with ring.produce(0) as slot:
        assert slot["x"].is_pinned()
    assert pipeline(ring, "cuda:0", "cuda:0") == [(0, 0), *EXPECTED][:NUM_ITEMS]


def test_host_reads_of_a_pinned_slot_wait_for_the_copy_into_it() -> None:
    ring = BufferRing(SPECS, depth=1, device="cpu")

    def work(index: int) -> list[int]:
        seen = []
        if index == 0:
            with thread_context("cuda:0"):
                for i in range(1, NUM_ITEMS + 1):
                    with ring.produce(30) as slot:
                        torch.cuda._sleep(SLEEP_CYCLES)
                        slot["x"].copy_(torch.full((1 << 16,), i, device="cuda:0"), non_blocking=True)
        else:
            for _ in range(NUM_ITEMS):
                with ring.consume(30) as slot:
                    seen.append(int(slot["x"].max()))
                    seen.append(int(slot["x"].min()))
        return seen

    assert run_threads(2, work, timeout=60)[1] == [i for i in range(1, NUM_ITEMS + 1) for _ in range(2)]


def test_host_writes_of_a_pinned_slot_wait_for_the_copy_out_of_it() -> None:
    ring = BufferRing(SPECS, depth=1, device="cpu")

    def work(index: int) -> list[int]:
        if index == 0:
            for i in range(1, NUM_ITEMS + 1):
                with ring.produce(30) as slot:
                    slot["x"].fill_(i)
            return []
        with thread_context("cuda:0"):
            bufs = [StaticBuffers(SPECS, "cuda:0") for _ in range(NUM_ITEMS)]
            for buf in bufs:
                with ring.consume(30) as slot:
                    torch.cuda._sleep(SLEEP_CYCLES)
                    buf.load(slot)
            return [int(value) for buf in bufs for value in buf["x"].aminmax()]

    assert run_threads(2, work, timeout=60)[1] == [i for i in range(1, NUM_ITEMS + 1) for _ in range(2)]


def test_a_failed_producers_late_writes_do_not_reach_the_next_item() -> None:
    ring = BufferRing(SPECS, depth=1, device="cuda:0")

    def work(index: int) -> None:
        with thread_context("cuda:0"):
            if index == 0:
                with pytest.raises(KeyError), ring.produce(30) as slot:
                    torch.cuda._sleep(10 * SLEEP_CYCLES)
                    slot["x"].fill_(-1)
                    raise KeyError

    run_threads(1, work)
    with thread_context("cuda:0") as context:
        with ring.produce(30) as slot:
            slot["x"].fill_(5)
        with ring.consume(30) as slot:
            low, high = slot["x"].aminmax()
        context.synchronize()
        assert (int(low), int(high)) == (5, 5)


def test_handing_over_waits_for_nothing_on_the_host() -> None:
    ring = BufferRing(SPECS, depth=1, device="cuda:0")
    with thread_context("cuda:0") as context:
        with ring.produce(0) as slot:
            torch.cuda._sleep(50 * SLEEP_CYCLES)
            slot["x"].fill_(1)
        with ring.consume(0):
            pass
        with ring.produce(0):
            pass
        assert context.stream is not None and not context.stream.query()  # the kernel still runs: nobody waited


def test_memory_of_a_dropped_ring_is_not_reused_under_a_running_kernel() -> None:
    ring = BufferRing(SPECS, depth=1, device="cuda:0")
    with ring.produce(0) as slot:
        slot["x"].fill_(7)
    with thread_context("cuda:0") as context:
        with ring.consume(0) as slot:
            torch.cuda._sleep(20 * SLEEP_CYCLES)
            low, high = slot["x"].aminmax()
        del slot, ring
        gc.collect()
        with torch.cuda.stream(torch.cuda.default_stream()):
            others = [torch.full((1 << 16,), -1, device="cuda:0") for _ in range(8)]
        context.synchronize()
        assert (int(low), int(high)) == (7, 7) and len(others) == 8


def test_load_is_one_launch_a_dtype() -> None:
    buffers = StaticBuffers({f"t{i}": Spec((64,)) for i in range(10)}, "cuda:0")
    batch = {f"t{i}": torch.full((64,), float(i), device="cuda:0") for i in range(10)}
    buffers.load(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        buffers.load(batch)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if "multi_tensor" in event.name or "elementwise" in event.name]
    assert len(launches) <= 1
    assert all(torch.equal(buffers[name], batch[name]) for name in batch)


@pytest.mark.two_gpus
@pytest.mark.parametrize("home", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize(("producer", "consumer"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:1", "cuda:1")])
def test_ring_values_are_right_between_devices(home: str, producer: str, consumer: str) -> None:
    assert pipeline(BufferRing(SPECS, depth=2, device=home), producer, consumer) == EXPECTED
