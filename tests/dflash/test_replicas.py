from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import graphsafe
from examples.dflash.config import InputError
from examples.dflash.drafter import Drafter
from examples.dflash.metrics import summarize
from examples.dflash.replicas import Replica, ReplicaLost, check_replica_devices
from examples.dflash.step import DrafterStep
from tests.helpers import run_threads

from .models import packed_row, tiny_config, tiny_target
from .test_train import configuration

CPU = torch.device("cpu")
BLOCK = 4


def in_contexts(n, fn):
    """fn(rank) in n threads that start together, each with a context."""

    def body(rank):
        with graphsafe.thread_context("cpu", seed=rank):
            return fn(rank)

    return run_threads(n, body)


@pytest.fixture(scope="module")
def target():
    return tiny_target()  # made before any thread, since it seeds torch's generator


def trained(target, config, rows, replica):
    """Losses and weights of a drafter trained on ``rows``, one step each."""
    drafter = Drafter(tiny_config(BLOCK), seed=3)
    head, embedding = target.lm_head_weight, target.embed_tokens.weight
    step = DrafterStep(drafter, embedding, head, config, len(rows), replica)
    losses = []
    for row in rows:
        features = target.features(row["tokens"], row["document_ids"], row["positions"], (1, 3))
        measured = replica.sum(step({**row, "features": features}).double())
        losses.append(summarize(measured.tolist())["loss"])
    return losses, {name: weight.clone() for name, weight in drafter.state_dict().items()}


def joined(first, second):
    """One row that holds the documents and blocks of two."""
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    shifted = second["document_ids"] + first["document_ids"].max() + 1
    both["document_ids"] = torch.cat([first["document_ids"], torch.where(second["document_ids"] < 0, -1, shifted)])
    anchors = torch.cat([first["anchors"], second["anchors"] + len(first["tokens"])])
    order = torch.argsort((~both["anchor_valid"]).int(), stable=True)
    both["anchor_valid"] = both["anchor_valid"][order]
    both["anchors"] = torch.where(both["anchor_valid"], anchors[order], 0)
    return both


def rows_of(seed, lengths=(19, 14), num_tokens=33):
    return [packed_row(lengths, num_tokens, 6, BLOCK, seed=seed + k) for k in range(6)]


def check_two_replicas_train_as_one_drafter_that_takes_both_rows(target, config):
    rows = [rows_of(0), rows_of(100, (9, 21))]
    store = dist.HashStore()

    def rank(number):
        replica = Replica(number, 2, CPU, store)
        try:
            return trained(target, config, rows[number], replica)
        finally:
            replica.close()

    (losses, weights), (losses2, weights2) = in_contexts(2, rank)
    assert losses == losses2
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    with graphsafe.thread_context("cpu", seed=0):
        alone, expected = trained(
            target, config, [joined(*pair) for pair in zip(*rows, strict=True)], Replica(0, 1, CPU, None)
        )
    assert losses == pytest.approx(alone, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_replicas_train_as_one_drafter_that_takes_both_rows(tmp_path, target, mode):
    config = configuration(tmp_path, step=mode, lr=1e-2)
    check_two_replicas_train_as_one_drafter_that_takes_both_rows(target, config)


def test_an_empty_batch_on_one_replica_changes_nothing_for_the_other(tmp_path, target):
    config = configuration(tmp_path, lr=1e-2)
    rows = [rows_of(0), rows_of(0, lengths=())]
    store = dist.HashStore()

    def rank(number):
        replica = Replica(number, 2, CPU, store)
        try:
            return trained(target, config, rows[number], replica)
        finally:
            replica.close()

    results = in_contexts(2, rank)
    with graphsafe.thread_context("cpu", seed=0):
        alone, expected = trained(target, config, rows[0], Replica(0, 1, CPU, None))
    for losses, weights in results:
        assert losses == alone
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_empty_batches_on_all_replicas_train_nothing_and_hang_nothing(tmp_path, target):
    config = configuration(tmp_path)
    store = dist.HashStore()

    def rank(number):
        replica = Replica(number, 2, CPU, store)
        try:
            return trained(target, config, rows_of(number, lengths=()), replica)
        finally:
            replica.close()

    for losses, weights in in_contexts(2, rank):
        assert losses == [0.0] * 6
        assert all(weight.isfinite().all() for weight in weights.values())


def test_a_replica_that_ends_frees_those_that_wait_for_it():
    store, left = dist.HashStore(), threading.Event()

    def rank(number):
        replica = Replica(number, 3, CPU, store)
        try:
            if number == 2:
                left.set()
                return None  # 1. leaves without taking part
            left.wait(20)
            with pytest.raises(ReplicaLost, match="lost another one"):  # 2. the others do not wait for ever
                replica.sum(torch.ones(3))
            return "freed"
        finally:
            replica.close()

    assert in_contexts(3, rank) == ["freed", "freed", None]


def test_a_replica_waits_without_a_seat():
    store = dist.HashStore()

    def rank(number):
        replica = Replica(number, 2, CPU, store)
        try:
            with graphsafe.current_context().eager(rng=True):  # alone on the device, so the other could not enter
                return replica.sum(torch.tensor([float(number + 1)])).item()
        finally:
            replica.close()

    assert in_contexts(2, rank) == [3.0, 3.0]


def test_replica_alone_needs_no_group():
    replica = Replica(0, 1, CPU, None)
    parameter = torch.nn.Parameter(torch.ones(2))
    replica.sum_gradients([parameter])
    parameter.sum().backward()
    assert parameter.grad.tolist() == [1, 1]
    assert replica.sum(torch.ones(2)).tolist() == [1, 1]
    replica.close()


def test_two_replicas_on_one_cuda_device_are_refused():
    with pytest.raises(InputError, match=r"cuda:1 more than once"):
        check_replica_devices([torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:1")])
    check_replica_devices([CPU, CPU])


def test_a_replica_warms_up_alone_and_trains_nothing(tmp_path, target):
    config = configuration(tmp_path, step="eager", lr=1e-2)
    store = dist.HashStore()
    first_is_warm = threading.Event()

    def rank(number):
        replica = Replica(number, 2, CPU, store)
        drafter = Drafter(tiny_config(BLOCK), seed=3)
        step = DrafterStep(drafter, target.embed_tokens.weight, target.lm_head_weight, config, 4, replica)
        row = packed_row((19, 14), 33, 6, BLOCK)
        features = target.features(row["tokens"], row["document_ids"], row["positions"], (1, 3))
        before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
        try:
            if number == 0:
                step.warm_up({**row, "features": features}, measures=True)  # 1. while the other takes part in nothing
                first_is_warm.set()
            assert first_is_warm.wait(20)
            assert all(torch.equal(before[name], weight) for name, weight in drafter.state_dict().items())
            assert all(parameter.grad is None for parameter in drafter.parameters())
            return step({**row, "features": features})[0].item(), replica.sum(torch.ones(1)).item()  # 2. both
        finally:
            replica.close()

    (loss, total), (loss2, total2) = in_contexts(2, rank)
    assert loss == loss2 and total == total2 == 2.0
