"""A run that was stopped or killed goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import time

import pytest
import torch

from examples.dflash import drafter as drafters
from examples.dflash.checkpoint import FREE, Checkpoints, contract, read_checkpoint
from examples.dflash.config import Config, InputError

from .runs import Run, losses, read_log, settings, weights
from .test_train import documents

NUM_KILLS = 10


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("whole") / "run")
    run = Run(config)
    assert run.wait() == [0], run.said()
    return config


def checkpoints(config):
    return sorted(path.name for path in config.checkpoints_path.iterdir())


def test_train_writes_checkpoints_keeps_the_newest_and_the_best(uninterrupted):
    assert checkpoints(uninterrupted) == ["step-00000056", "step-00000060"]
    log = read_log(uninterrupted)
    measured = {record["step"]: record["acceptance"] for record in log if record.get("event") == "validation"}
    assert list(measured) == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert measured[60] > measured[0]
    newest = read_checkpoint(uninterrupted.checkpoints_path / "step-00000060")
    assert (newest.step, newest.num_steps, newest.acceptance) == (60, 60, measured[60])
    assert newest.best == max(value for step, value in measured.items() if step > 0)
    assert newest.is_final
    best_step = max((step for step in measured if step > 0), key=lambda step: (measured[step], -step))
    saved = drafters.load(uninterrupted.best_path, "cpu").state_dict()
    assert equal(saved, weights(uninterrupted)) == (best_step == 60)


def test_killed_runs_go_on_bit_for_bit(tmp_path):
    """kill -9 at random moments; each time the next one goes on, until the run is done."""
    whole, config = (
        settings(tmp_path / name, max_steps=400, save_every=5, log_every=1) for name in ("whole", "killed")
    )
    assert Run(whole).wait() == [0]
    rng = random.Random(5)
    for number in range(NUM_KILLS):
        run = Run(config)
        if number % 4:
            run.wait_for_step(25 * number)
        time.sleep(0.1 * rng.random())  # into a step, a checkpoint, or the start
        run.processes[0].kill()
        assert run.wait() == [-signal.SIGKILL], run.said()
        for path in config.checkpoints_path.glob("step-*"):
            assert read_checkpoint(path).step > 0
            drafters.load(path / "drafter.safetensors", "cpu")
        if config.drafter_path.exists():
            drafters.load(config.drafter_path, "cpu")
    assert Run(config).wait() == [0]
    assert sum(record.get("event") == "resume" for record in read_log(config)) >= NUM_KILLS // 2
    assert equal(weights(config), weights(whole))
    best, best_of_whole = (drafters.load(c.best_path, "cpu").state_dict() for c in (config, whole))
    assert equal(best, best_of_whole)
    assert not list(config.checkpoints_path.glob(".*"))


def test_a_stopped_run_goes_on_bit_for_bit_and_repeats_no_reading(tmp_path, uninterrupted):
    config = settings(tmp_path / "run")
    run = Run(config)
    run.wait_for_step(15)
    run.send(signal.SIGTERM)
    assert run.wait() == [128 + signal.SIGTERM], run.said()
    stopped_at = int(checkpoints(config)[-1].split("-")[1])
    assert 15 <= stopped_at < 60
    assert Run(config).wait() == [0]
    assert equal(weights(config), weights(uninterrupted))
    steps = [record["step"] for record in read_log(config) if "event" not in record]
    assert steps == sorted(set(steps))
    measured = [record["step"] for record in read_log(config) if record.get("event") == "validation"]
    assert measured == sorted(set(measured))
    common = losses(config).keys() & losses(uninterrupted).keys()
    assert len(common) > 5
    resumed = [record["step"] for record in read_log(config) if record.get("event") == "resume"]
    assert resumed == [stopped_at]


def test_a_changed_hyper_parameter_is_refused_with_its_name_and_the_run_is_left_as_it_is(tmp_path):
    config = settings(tmp_path / "run", max_steps=400)
    run = Run(config)
    run.wait_for_step(10)
    run.send(signal.SIGINT)
    assert run.wait() == [130]
    before = (checkpoints(config), weights(config), config.metrics_path.read_text())
    changed = Run(dataclasses.replace(config, lr=2e-2, drafters=("cpu", "cpu")))
    assert changed.wait() == [2]
    for text in ("--lr: was 0.01, is 0.02", "number of drafters: was 1, is 2", "--no-resume"):
        assert text in changed.said()
    assert checkpoints(config) == before[0]
    assert equal(weights(config), before[1])
    assert config.metrics_path.read_text() == before[2]
    anew = Run(dataclasses.replace(config, lr=2e-2, max_steps=3, resume=False))
    assert anew.wait() == [0]
    assert equal(drafters.load(config.out / "previous-1-drafter.safetensors", "cpu").state_dict(), before[1])
    assert (config.out / "previous-1-checkpoints").is_dir()


def test_a_finished_run_has_nothing_left_to_do_and_keeps_its_drafter(tmp_path):
    config = settings(tmp_path / "run", max_steps=14)
    assert Run(config).wait() == [0]
    before, log = weights(config), losses(config)
    again = Run(config)
    assert again.wait() == [0], again.said()
    assert "this run is finished" in again.said()
    assert equal(weights(config), before)
    assert losses(config) == log
    assert not list(config.out.glob("previous-*"))


def test_every_option_is_part_of_the_contract_or_named_as_free():
    names = {field.name for field in dataclasses.fields(Config)}
    assert names >= FREE
    kept = contract(Config(), documents(3), 2, 10)
    assert kept.keys() - names == {"number of drafters", "number of steps", "documents"}
    assert names - FREE == kept.keys() & names


def test_contract_changes_with_the_documents():
    docs = documents(3)
    other = [dataclasses.replace(docs[0], loss_mask=[True] * len(docs[0].tokens)), *docs[1:]]
    assert contract(Config(), docs, 1, 5) == contract(Config(), documents(3), 1, 5)
    assert contract(Config(), docs, 1, 5) != contract(Config(), other, 1, 5)


def test_a_damaged_checkpoint_is_named(tmp_path):
    config = settings(tmp_path / "run", max_steps=300)
    run = Run(config)
    run.wait_for_step(20)
    run.send(signal.SIGTERM)
    run.wait()
    newest = Checkpoints(config.checkpoints_path, 2).newest()
    file = newest.path / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    broken = Run(config)
    assert broken.wait() == [2]
    assert str(newest.path) in broken.said() and "damaged" in broken.said()
    (newest.path / "state.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(InputError, match="its format is 99"):
        read_checkpoint(newest.path)


def test_a_second_train_is_refused_while_the_first_writes(tmp_path):
    config = settings(tmp_path / "run", max_steps=2000)
    first = Run(config)
    first.wait_for_step(5)
    second = Run(config)
    assert second.wait() == [2]
    assert "Another train" in second.said()
    first.send(signal.SIGTERM)
    assert first.wait() == [143]
