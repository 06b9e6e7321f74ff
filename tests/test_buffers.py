"""Static buffers and rings: addresses, order, failure, closing, deadlines, many threads."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsafe import gate
from graphsafe.buffers import BufferRing, Spec, StaticBuffers
from graphsafe.context import thread_context
from graphsafe.errors import GraphsafeError, RingClosed, ShapeMismatchError
from tests.helpers import join_threads, run_threads

SPECS = {"x": Spec((3,)), "n": Spec((), torch.int64)}


def make_ring(depth: int = 2) -> BufferRing:
    return BufferRing({"n": Spec((), torch.int64)}, depth=depth, device="cpu")


def put(ring: BufferRing, value: int, timeout: float | None = 10) -> None:
    with ring.produce(timeout) as slot:
        slot["n"].fill_(value)


def get(ring: BufferRing, timeout: float | None = 10) -> int:
    with ring.consume(timeout) as slot:
        return int(slot["n"])


@contextmanager
def waiting(ring: BufferRing, role: str, timeout: float | None) -> Iterator[list[BaseException]]:
    """A thread that enters ``role`` and is known to wait when the body runs; its exceptions are in the list."""
    errors: list[BaseException] = []
    waits = threading.Event()
    condition = ring._changed
    inner_wait = condition.wait

    def wait(timeout: float | None = None) -> bool:
        waits.set()
        return inner_wait(timeout)

    condition.wait = wait  # type: ignore[method-assign]

    def body() -> None:
        try:
            with ring.produce(timeout) if role == "produce" else ring.consume(timeout):
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True, name=f"waits-to-{role}")
    thread.start()
    assert waits.wait(10)
    yield errors
    join_threads([thread])


# static buffers


def test_static_buffers_never_move() -> None:
    buffers = StaticBuffers(SPECS, "cpu")
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
    for i in range(3):
        buffers.load({"x": torch.full((3,), float(i)), "n": torch.tensor(i)})
        assert buffers["x"].tolist() == [i] * 3 and buffers["n"].item() == i
    assert {name: tensor.data_ptr() for name, tensor in buffers.items()} == addresses


def test_static_buffers_are_a_mapping_of_marked_zeros() -> None:
    buffers = StaticBuffers(SPECS, "cpu")
    assert list(buffers) == ["x", "n"] and len(buffers) == 2 and "x" in buffers
    assert all(tensor._graphsafe_static is True for tensor in buffers.values())
    assert all(not tensor.any() for tensor in buffers.values())
    assert "x: (3,) of torch.float32" in repr(buffers)
    assert buffers == buffers and buffers != StaticBuffers(SPECS, "cpu") and buffers in {buffers}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n": torch.zeros(1, dtype=torch.int64)}, "n"),
        ({"n": torch.zeros((), dtype=torch.int32)}, "n"),
        ({"n": None}, "n"),
        ({"n": 3}, "n"),
        ({"extra": torch.zeros(1)}, "extra"),
    ],
)
def test_load_writes_nothing_when_a_tensor_differs(change: dict[str, object], name: str) -> None:
    buffers = StaticBuffers(SPECS, "cpu")
    batch: dict[str, object] = {"x": torch.ones(3), "n": torch.tensor(1)} | change
    if change.get(name, 0) is None:
        del batch[name]
    with pytest.raises(ShapeMismatchError) as caught:
        buffers.load(batch)  # type: ignore[arg-type]
    assert caught.value.name == name and name in str(caught.value) and isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not buffers["x"].any() and not buffers["n"].any()


def test_load_takes_strided_sources_and_those_that_require_grad() -> None:
    buffers = StaticBuffers({"x": Spec((2, 3))}, "cpu")
    source = torch.arange(6.0, requires_grad=True).reshape(3, 2).t()
    buffers.load({"x": source})
    assert torch.equal(buffers["x"], source.detach()) and not buffers["x"].requires_grad


def test_specs_and_arguments_are_checked() -> None:
    assert Spec([2, 3]).shape == Spec(torch.Size((2, 3))).shape == (2, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more"):
        Spec((2, -1))
    with pytest.raises(ValueError, match="no specs"):
        StaticBuffers({}, "cpu")
    for depth in (0, True, 1.5):
        with pytest.raises(ValueError, match="depth"):
            BufferRing(SPECS, depth=depth, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(GraphsafeError, match="not there"):
        StaticBuffers(SPECS, "cuda:99")


# rings


@given(st.lists(st.sampled_from(["put", "get", "put fails", "get fails"]), max_size=30), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_ring_behaves_as_a_bounded_queue(actions: list[str], depth: int) -> None:
    ring, queue, next_value = make_ring(depth), [], 0
    for action in actions:
        role = action[:3]
        if (role == "put" and len(queue) == depth) or (role == "get" and not queue):
            with pytest.raises(TimeoutError):
                put(ring, -1, 0) if role == "put" else get(ring, 0)
        elif action == "put":
            put(ring, next_value)
            queue.append(next_value)
            next_value += 1
        elif action == "get":
            assert get(ring) == queue.pop(0)
        elif action == "put fails":
            with pytest.raises(KeyError), ring.produce(0) as slot:
                slot["n"].fill_(-1)
                raise KeyError
        else:
            with pytest.raises(KeyError), ring.consume(0) as slot:
                assert slot["n"].item() == queue[0]
                raise KeyError
        stats = ring.stats()
        assert stats.num_ready == len(queue) and stats.num_free == depth - len(queue)


def test_ring_loses_and_repeats_nothing_between_many_threads() -> None:
    ring, num_items = make_ring(3), 100
    done, failed = threading.Semaphore(0), set()

    def produce(index: int) -> None:
        for i in range(num_items):
            put(ring, index * num_items + i)
        done.release()

    def consume() -> list[int]:
        seen = []
        while True:
            try:
                with ring.consume(20) as slot:
                    value = int(slot["n"])
                    if value % 7 == 0 and value not in failed:  # every seventh item fails once, and comes again
                        failed.add(value)
                        raise KeyError
                    seen.append(value)
            except KeyError:
                continue
            except RingClosed:
                return seen

    def work(index: int) -> list[int]:
        if index < 3:
            produce(index)
        elif index < 6:
            return consume()
        else:
            for _ in range(3):
                done.acquire()
            ring.close()
        return []

    everything = [value for values in run_threads(7, work) for value in values]
    assert sorted(everything) == list(range(3 * num_items))
    stats = ring.stats()
    assert stats.num_produced == stats.num_consumed == 3 * num_items and stats.num_free == 3 and stats.closed
    assert stats.num_returned == len(failed) == len(range(0, 3 * num_items, 7))


def test_ring_keeps_each_producers_order() -> None:
    ring = make_ring(2)

    def work(index: int) -> list[int]:
        if index < 2:
            for i in range(50):
                put(ring, 100 * index + i)
            return []
        return [get(ring) for _ in range(100)]

    seen = run_threads(3, work)[2]
    for index in range(2):
        mine = [value for value in seen if value // 100 == index]
        assert mine == sorted(mine) and len(mine) == 50


def test_ring_order_is_that_of_leaving_produce() -> None:
    ring = make_ring(2)
    first, second = ring.produce(0), ring.produce(0)
    first.__enter__()["n"].fill_(1)
    second.__enter__()["n"].fill_(2)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert [get(ring), get(ring)] == [2, 1]


def test_a_failing_consume_puts_its_item_back_first_in_line() -> None:
    ring = make_ring(3)
    for value in range(3):
        put(ring, value)
    with pytest.raises(KeyError), ring.consume(0):
        raise KeyError
    assert [get(ring) for _ in range(3)] == [0, 1, 2]
    assert ring.stats().num_returned == 1 and ring.stats().num_consumed == 3


def test_a_failing_consume_wakes_a_waiting_consumer() -> None:
    ring = make_ring(1)
    put(ring, 7)
    held = ring.consume(0)
    held.__enter__()
    with waiting(ring, "consume", 20) as errors:
        assert not held.__exit__(KeyError, KeyError(), None)
    assert errors == [] and ring.stats().num_consumed == 1


def test_timeouts_raise_and_say_what_the_ring_holds() -> None:
    ring = make_ring(1)
    with pytest.raises(TimeoutError, match=r"consume\(\) waited 0.01 s for an item.* 1 free, 0 in use"):
        get(ring, 0.01)
    worker = threading.Thread(target=put, args=(ring, 1), name="reader")
    worker.start()
    join_threads([worker])
    with pytest.raises(TimeoutError, match=r"produce\(\) waited 0 s for a free slot.* 1 are ready"):
        put(ring, 2, 0)
    assert get(ring) == 1
    with pytest.raises(TimeoutError):
        get(ring, 0)
    assert ring.stats().consume_wait_s > 0.005


def test_a_wait_without_deadline_reports_a_producer_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = make_ring(1)
    worker = threading.Thread(target=put, args=(ring, 1), name="reader")
    worker.start()
    join_threads([worker])
    get(ring)
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.02")
    reported = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ring.stats()  # a handler may use the ring: it does not run under its lock
            reported.set()

    handler = Handler()
    logging.getLogger("graphsafe").addHandler(handler)
    try:
        with caplog.at_level("WARNING", "graphsafe"), waiting(ring, "consume", None) as errors:
            assert reported.wait(10)
            ring.close()
    finally:
        logging.getLogger("graphsafe").removeHandler(handler)
    assert "'reader', which has ended" in caplog.text and "'waits-to-consume'" in caplog.text
    assert [type(error) for error in errors] == [RingClosed]


def test_close_ends_producers_at_once_and_consumers_when_drained() -> None:
    ring = make_ring(3)
    put(ring, 1)
    put(ring, 2)
    ring.close()
    ring.close()
    with pytest.raises(RingClosed, match="produce"):
        put(ring, 3)
    assert [get(ring), get(ring)] == [1, 2]
    with pytest.raises(RingClosed, match="consume"):
        get(ring)


@pytest.mark.parametrize("role", ["produce", "consume"])
def test_close_wakes_those_who_wait(role: str) -> None:
    ring = make_ring(1)
    if role == "produce":
        put(ring, 1)
    with waiting(ring, role, None) as errors:
        ring.close()
    assert [type(error) for error in errors] == [RingClosed]


def test_an_item_in_the_making_is_not_handed_over_after_close() -> None:
    ring = make_ring(1)
    with pytest.raises(RingClosed), ring.produce(0):
        ring.close()
    assert ring.stats().num_free == 1 and ring.stats().num_produced == 0


def test_an_item_put_back_after_close_can_still_be_consumed() -> None:
    ring = make_ring(1)
    put(ring, 5)
    with pytest.raises(KeyError), ring.consume(0):
        ring.close()
        raise KeyError
    assert get(ring) == 5


def test_no_seat_is_held_over_a_wait_for_a_ring() -> None:
    ring = make_ring(1)

    def work(index: int) -> int | None:
        with thread_context("cpu") as context, context.eager():
            if index == 0:
                return get(ring)  # holds the only seat, unless it gives it back
            put(ring, 9)
            return None

    assert run_threads(2, work) == [9, None]


def test_a_slot_taken_is_not_lost_when_the_seat_cannot_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make_ring(1)
    put(ring, 4)
    take = ring._try_take
    monkeypatch.setattr(ring, "_try_take", lambda role: None)  # as if the item came during the wait

    @contextmanager
    def released() -> Iterator[None]:
        yield
        raise TimeoutError("the gate")

    with monkeypatch.context() as patch:
        patch.setattr(gate, "released", released)
        with pytest.raises(TimeoutError, match="the gate"):
            get(ring)
    monkeypatch.setattr(ring, "_try_take", take)
    assert get(ring) == 4


def test_slots_are_the_same_tensors_round_after_round() -> None:
    ring = make_ring(2)
    addresses = []
    for value in range(6):
        with ring.produce(0) as slot:
            slot["n"].fill_(value)
        with ring.consume(0) as slot:
            addresses.append(slot["n"].data_ptr())
    assert len(set(addresses)) == 2 and addresses[:2] * 3 == addresses


def test_items_of_consumers_that_fail_come_again_in_their_order() -> None:
    ring = BufferRing({"x": Spec((1,), torch.int64)}, depth=3, device="cpu")
    for number in range(3):
        with ring.produce() as slot:
            slot["x"][0] = number
    first, second = ring.consume(), ring.consume()
    assert first.__enter__()["x"].item() == 0 and second.__enter__()["x"].item() == 1
    for block in (first, second):  # they fail in the order in which they took
        with pytest.raises(ValueError):
            block.__exit__(ValueError, ValueError(), None) or (_ for _ in ()).throw(ValueError())
    seen = []
    for _ in range(3):
        with ring.consume() as slot:
            seen.append(slot["x"].item())
    assert seen == [0, 1, 2]


def test_a_wait_for_the_device_to_be_done_with_a_slot_counts_as_its_roles_wait() -> None:
    class Event:
        """Of a copy out of the slot that takes a while."""

        waited = False

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            Event.waited = True
            threading.Event().wait(0.05)

    ring = make_ring(depth=1)
    put(ring, 1)
    with ring.consume(10):
        pass
    assert ring.stats().produce_wait_s == 0.0
    ring._free[0].events = [Event()]  # type: ignore[list-item]
    put(ring, 2)
    assert Event.waited
    assert ring.stats().produce_wait_s >= 0.05
    assert ring.stats().consume_wait_s == 0.0
