from __future__ import annotations

import threading

import pytest
import torch

import graphsafe
from examples.dflash.pipeline import Pipeline, PipelineEnded, Rings, Topology

CPU = torch.device("cpu")
SPECS = {"number": graphsafe.Spec((1,), torch.int64)}
FEATURES = {"features": graphsafe.Spec((1,), torch.float32)}
EMPTY = {"number": torch.tensor([-1])}


def make(num_targets, num_drafters, depth=2):
    topology = Topology((CPU,) * num_targets, (CPU,) * num_drafters)
    return Pipeline(Rings(topology, SPECS, FEATURES, depth), threading.Event())


def numbers(count):
    return ({"number": torch.tensor([i])} for i in range(count))


def run(pipeline, batches, source=lambda batch: {"features": batch["number"].float() * 10}, train=None):
    """What each drafter took, in its order."""
    taken = [[] for _ in pipeline.topology.drafters]

    def take(number, slot):
        taken[number].append((slot["number"].item(), slot["features"].item()))
        if train is not None:
            train(number, slot)

    with graphsafe.WorkerGroup(timeout=20) as group:
        group.spawn(lambda: pipeline.guard(lambda: pipeline.read(batches, EMPTY)), device="cpu")
        for n in range(len(pipeline.topology.targets)):
            group.spawn(lambda n=n: pipeline.guard(lambda: pipeline.run_target(n, source)), device="cpu")
        for n in range(len(pipeline.topology.drafters)):
            group.spawn(
                lambda n=n: pipeline.guard(lambda: pipeline.run_drafter(n, lambda slot: take(n, slot))), device="cpu"
            )
    return taken


@pytest.mark.parametrize(("num_targets", "num_drafters"), [(1, 1), (2, 1), (1, 3), (3, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("depth", [1, 3])
def test_batch_i_goes_to_drafter_i_mod_r_in_order(num_targets, num_drafters, depth):
    taken = run(make(num_targets, num_drafters, depth), numbers(24))
    for number, got in enumerate(taken):
        assert got == [(i, 10.0 * i) for i in range(number, 24, num_drafters)]


def test_order_holds_when_the_first_target_is_slow():
    later_done = threading.Event()

    def source(batch):
        number = batch["number"].item()
        if number == 0:
            assert later_done.wait(20)  # 2. target 0 goes on only after target 1 is done with its batch
        if number == 1:
            later_done.set()  # 1.
        return {"features": batch["number"].float()}

    taken = run(make(2, 1), numbers(6), source)
    assert [number for number, _ in taken[0]] == [0, 1, 2, 3, 4, 5]


def test_last_round_is_filled_with_empty_batches():
    taken = run(make(1, 3), numbers(4))
    assert [[number for number, _ in got] for got in taken] == [[0, 3], [1, -1], [2, -1]]


def test_stop_ends_at_a_rounds_end_and_all_that_was_read_is_trained():
    pipeline = make(2, 3)
    read = []

    def endless():
        for i in range(10**6):
            read.append(i)
            yield {"number": torch.tensor([i])}

    def train(number, slot):
        if slot["number"].item() == 4:  # in the middle of the second round
            pipeline.stop.set()

    taken = run(pipeline, endless(), train=train)
    assert len({len(got) for got in taken}) == 1
    assert sorted(number for got in taken for number, _ in got) == read
    assert 6 <= len(read) < 100


@pytest.mark.parametrize("where", ["reader", "target", "drafter"])
def test_error_in_one_thread_ends_the_others_and_is_the_only_one_raised(where):
    def batches():
        for i in range(10**6):
            if where == "reader" and i == 7:
                raise KeyError("reader")
            yield {"number": torch.tensor([i])}

    def source(batch):
        if where == "target" and batch["number"].item() == 7:
            raise KeyError("target")
        return {"features": batch["number"].float()}

    def train(number, slot):
        if where == "drafter" and slot["number"].item() == 7:
            raise KeyError("drafter")

    pipeline = make(2, 2)
    called = []
    pipeline.on_abort(lambda: called.append(1))
    with pytest.raises(ExceptionGroup) as caught:
        run(pipeline, batches(), source, train)
    assert [repr(error) for error in caught.value.exceptions] == [repr(KeyError(where))]
    assert called == [1]


def test_quiet_errors_are_silent_only_after_another_thread_failed():
    pipeline = make(1, 1)

    def lost():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        pipeline.guard(lost, ConnectionError)
    assert pipeline.failed.is_set()
    pipeline.guard(lost, ConnectionError)


@pytest.mark.parametrize(("num_targets", "num_drafters"), [(1, 1), (6, 2), (3, 2), (2, 4)])
def test_a_drafters_rings_hold_at_least_the_depth(num_targets, num_drafters):
    rings = make(num_targets, num_drafters, depth=2).rings
    for drafter in range(num_drafters):
        slots = sum(ring.depth for (_, d), ring in rings.features.items() if d == drafter)
        assert slots >= 2


def test_threads_meet_once_all_are_ready_and_an_abort_ends_the_wait():
    pipeline = make(1, 2)
    with graphsafe.WorkerGroup(timeout=20) as group:
        for _ in range(3):
            group.spawn(pipeline.meet, device="cpu")

    pipeline = make(1, 2)

    def fail():
        raise ZeroDivisionError("planted")

    with pytest.raises(ExceptionGroup) as caught, graphsafe.WorkerGroup(timeout=20) as group:
        for _ in range(2):
            group.spawn(lambda: pipeline.guard(pipeline.meet, PipelineEnded), device="cpu")
        group.spawn(lambda: pipeline.guard(fail, PipelineEnded), device="cpu")
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
