"""The whole pipeline on a GPU: the target as a graph, checkpoints, validation, a killed run."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from examples.dflash.features import FeatureSource
from examples.dflash.pipeline import Topology
from examples.dflash.target import Target
from examples.dflash.train import train_on
from graphsafe import thread_context
from tests.dflash.models import packed_row, tiny_config, tiny_target
from tests.dflash.runs import losses, read_log, weights
from tests.dflash.test_train import configuration, documents

pytestmark = pytest.mark.cuda
FIRST = torch.device("cuda", 0)


def on_gpu(dtype=torch.float32):
    return Target(tiny_target().model.to(FIRST, dtype))


@pytest.mark.parametrize("label_chunk", [None, 50])
def test_target_as_a_graph_gives_what_it_gives_eagerly(label_chunk):
    target, calls = on_gpu(torch.bfloat16), []
    plain = FeatureSource(target, (1, 3), label_chunk=label_chunk)
    graphed = FeatureSource(target, (1, 3), label_chunk=label_chunk, graphed=True)
    read = target._read
    target._read = lambda *args: calls.append(1) or read(*args)
    with warnings.catch_warnings(), thread_context(FIRST), torch.no_grad():
        warnings.filterwarnings("error", message="The target runs without")
        for seed in range(8):
            batch = packed_row((60 - seed, 30 + seed), 128, 8, 4, seed=seed)
            expected = {name: tensor.clone() for name, tensor in plain(batch).items()}
            calls.clear()
            ours = graphed(batch)
            assert ours.keys() == expected.keys()
            for name, tensor in ours.items():
                assert torch.equal(tensor[:90], expected[name][:90]), (seed, name)
            assert bool(calls) == (seed < 4)  # three eager calls and the capture; then replays alone


def run(config, step=None):
    config = config if step is None else dataclasses.replace(config, step=step)
    return train_on(
        documents(24),
        {FIRST: on_gpu()},
        tiny_config(),
        config,
        Topology((FIRST,), (FIRST,)),
        validation=documents(3, 9),
    )


def gpu_configuration(path, **changes):
    usual = dict(targets=("cuda:0",), drafters=("cuda:0",), token_budget=256, num_anchors=32, num_layers=2)
    return configuration(path, **{**usual, **changes})


def test_training_resumed_from_a_checkpoint_goes_on_as_without_an_interruption(tmp_path):
    whole = gpu_configuration(tmp_path / "whole", max_steps=24, save_every=8)
    assert run(whole) == 0
    assert [record["step"] for record in read_log(whole) if record.get("event") == "validation"] == [0, 8, 16, 24]
    part = dataclasses.replace(whole, out=tmp_path / "part" / "run", keep_checkpoints=5)
    assert run(part) == 0
    for path in sorted(part.checkpoints_path.iterdir())[2:]:  # as a killed run leaves it
        path.rename(tmp_path / path.name)
    assert run(part) == 0
    assert [record["step"] for record in read_log(part) if record.get("event") == "resume"] == [16]
    assert losses(part) == losses(whole)
    for name, weight in weights(part).items():
        assert torch.equal(weight, weights(whole)[name]), name


def test_validation_is_the_same_however_the_step_runs(tmp_path):
    found = []
    for step in ("eager", "compile", "graph"):
        config = gpu_configuration(tmp_path / step, max_steps=6)
        assert run(config, step) == 0
        found.append([record["loss"] for record in read_log(config) if record.get("event") == "validation"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[1] == pytest.approx(found[2], rel=1e-4)


def test_memory_after_ten_steps_is_that_after_hundreds(tmp_path):
    config = gpu_configuration(tmp_path, max_steps=300, epochs=200, save_every=50, log_every=10)
    assert run(config) == 0
    log = [record for record in read_log(config) if "event" not in record]
    memory = {record["step"]: record["memory"]["cuda:0"] for record in log}
    assert memory[300]["peak_bytes"] == memory[60]["peak_bytes"], memory
    assert memory[300]["reserved_bytes"] == memory[60]["reserved_bytes"], memory
