from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading

import pytest
import torch

from examples.dflash import batches as packing
from examples.dflash import drafter as drafters
from examples.dflash import train as train_module
from examples.dflash import trainer as trainer_module
from examples.dflash.config import Config, InputError
from examples.dflash.data import Document
from examples.dflash.drafter import DrafterConfig
from examples.dflash.pipeline import Topology
from examples.dflash.train import count_steps, keep_former, train_on

from .models import MASK_TOKEN, VOCAB, tiny_target

CPU = torch.device("cpu")


def documents(count=12, seed=0):
    """Documents that count up from a random start, so that the next token is easy to learn."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        length, start = rng.randint(14, 24), rng.randrange(VOCAB)
        tokens = [3 + (start + k) % (VOCAB - 5) for k in range(length)]
        made.append(Document(index, tokens, [k >= 4 for k in range(length)], 4))
    return made


def configuration(tmp_path, **changes):
    settings = dict(
        out=tmp_path / "run",
        targets=("cpu",),
        drafters=("cpu",),
        dtype="float32",
        step="graph",
        token_budget=64,
        num_anchors=12,
        loss_chunk=16,
        block_size=4,
        num_layers=1,
        num_features=2,
        intermediate_size=32,
        mask_token_id=MASK_TOKEN,
        loss_decay=4.0,
        lr=3e-3,
        epochs=100,
        max_steps=12,
        log_every=1,
        num_held_out=0,
    )
    return Config(**{**settings, **changes})


def run(config, docs=None, target=None, num_targets=1, num_drafters=1):
    target = target or tiny_target()
    devices = Topology((CPU,) * num_targets, (CPU,) * num_drafters)
    drafter = DrafterConfig.from_target(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        num_features=config.num_features,
        intermediate_size=config.intermediate_size,
        mask_token_id=config.mask_token_id,
    )
    code = train_on(docs or documents(), {CPU: target}, drafter, config, devices)
    return code, records(config)


def records(config):
    return [record for record in all_records(config) if "event" not in record]


def events(config, kind):
    return [record for record in all_records(config) if record.get("event") == kind]


def all_records(config):
    return [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]


def test_train_lowers_the_loss_and_saves_the_drafter(tmp_path):
    config = configuration(tmp_path, max_steps=60, log_every=5, lr=1e-2)
    code, log = run(config)
    assert code == 0
    assert [record["step"] for record in log] == [1, *range(5, 61, 5)]
    assert log[0]["loss"] == pytest.approx(torch.log(torch.tensor(VOCAB)).item(), rel=0.3)
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]
    assert log[-1]["acceptance"] > 1.3 * log[0]["acceptance"]
    for name in ("tokens_per_s", "drafter_busy", "grad_norm", "lr", "memory_bytes", "targets_waited_s"):
        assert all(record[name] >= 0 for record in log), name
    saved = drafters.load(config.drafter_path, "cpu")
    assert not torch.equal(saved.fc.weight, drafters.Drafter(saved.config, seed=config.seed).fc.weight)


@pytest.mark.parametrize(("num_targets", "num_drafters"), [(2, 1), (1, 2), (3, 2)])
def test_train_losses_depend_on_the_drafters_and_not_on_the_targets(tmp_path, num_targets, num_drafters):
    reference = configuration(tmp_path / "one", max_steps=5)
    run(reference, num_targets=1, num_drafters=num_drafters)
    config = configuration(tmp_path / "many", max_steps=5)
    _, log = run(config, num_targets=num_targets, num_drafters=num_drafters)
    assert [record["loss"] for record in log] == [record["loss"] for record in records(reference)]
    assert len(log) == 5


def test_train_modes_graph_and_eager_give_the_same_losses(tmp_path):
    _, graph = run(configuration(tmp_path / "graph", max_steps=6))
    _, eager = run(configuration(tmp_path / "eager", max_steps=6, step="eager"))
    assert [record["loss"] for record in graph] == [record["loss"] for record in eager]


def test_train_with_cached_features_gives_the_same_losses(tmp_path):
    _, plain = run(configuration(tmp_path / "plain", max_steps=12))
    target = tiny_target()
    calls = []
    features = target.features
    target.features = lambda tokens, *rest: calls.append(len(tokens)) or features(tokens, *rest)
    _, cached = run(configuration(tmp_path / "cached", max_steps=12, cache_features=0.1), target=target)
    assert [record["loss"] for record in cached] == pytest.approx([record["loss"] for record in plain], rel=1e-5)
    assert sum(calls) == sum(len(document.tokens) for document in documents())  # each document once


def test_train_fills_the_last_round_with_batches_of_zero_loss(tmp_path):
    docs = documents(8)
    config = configuration(tmp_path, epochs=1, max_steps=None, token_budget=32)
    num_batches = packing.num_batches(docs, config, 0)
    num_drafters = num_batches - 1  # so that a second round holds one batch
    code, log = run(config, docs, num_drafters=num_drafters)
    assert code == 0
    assert count_steps(docs, config, num_drafters) == len(log) == 2
    assert sum(record["tokens"] for record in log) == sum(len(document.tokens) for document in docs)
    assert log[1]["blocks"] > 0


def test_train_stops_at_a_rounds_end_on_sigint_and_saves(tmp_path, monkeypatch, capfd):
    config = configuration(tmp_path, max_steps=5000, log_every=1000)
    steps, both_started = {0: 0, 1: 0}, threading.Barrier(2)
    call = trainer_module.Trainer.__call__

    def counted(self, batch):
        call(self, batch)
        steps[self.number] += 1
        if self.num_steps == 3 and both_started.wait(20) == 0:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trainer_module.Trainer, "__call__", counted)
    before = signal.getsignal(signal.SIGINT)
    code, _ = run(config, num_drafters=2)
    assert code == 130
    assert steps[0] == steps[1] < 100
    assert config.drafter_path.is_file()
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping at the end of the round" in capfd.readouterr().err
    assert records(config)[-1]["step"] == steps[0]


def test_train_ends_with_the_exception_of_a_target_thread(tmp_path):
    target = tiny_target()
    features, calls = target.features, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError("in the target")
        return features(*args)

    target.features = failing
    with pytest.raises(ZeroDivisionError, match="in the target"):
        run(configuration(tmp_path, max_steps=500), target=target, num_drafters=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("drafter-", "target-", "reader"))]


@pytest.mark.parametrize("failing", [0, 1])
def test_train_ends_with_the_exception_of_a_drafter_thread_while_others_wait_for_it(tmp_path, monkeypatch, failing):
    call = trainer_module.Trainer.__call__

    def broken(self, batch):
        if self.number == failing and self.num_steps == 3:
            raise ZeroDivisionError("in the drafter")
        call(self, batch)

    monkeypatch.setattr(trainer_module.Trainer, "__call__", broken)
    with pytest.raises(ZeroDivisionError, match="in the drafter"):
        run(configuration(tmp_path, max_steps=500), num_drafters=3)


def test_train_ends_with_the_exception_of_the_reader(tmp_path):
    docs = documents()
    broken = dataclasses.replace(docs[3], tokens=[1] * 100)  # longer than the budget
    config = configuration(tmp_path)
    with pytest.raises(ValueError, match="64"):
        run(config, [*docs[:3], broken, *docs[4:]], num_drafters=2)


def test_train_out_of_memory_says_what_to_lower(tmp_path):
    target = tiny_target()
    target.features = lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried"))
    with pytest.raises(InputError, match=r"Out of memory: CUDA out of memory(.|\n)*estimate"):
        run(configuration(tmp_path), target=target)


def test_train_names_a_device_that_is_not_there(tmp_path):
    config = configuration(tmp_path, drafters=("cuda:77",))
    with pytest.raises(InputError, match=r"--drafters names cuda:77, and torch sees"):
        train_module.train(config)


def test_train_keeps_the_drafter_of_the_run_before(tmp_path, capsys):
    config = configuration(tmp_path)
    keep_former(config)
    config.out.mkdir(parents=True)
    config.drafter_path.write_bytes(b"former")
    config.drafter_path.with_suffix(".json").write_text("{}")
    keep_former(config)
    assert not config.drafter_path.exists()
    assert (config.out / f"previous-1-{config.drafter_path.name}").read_bytes() == b"former"
    config.drafter_path.write_bytes(b"later")
    keep_former(config)
    assert (config.out / f"previous-1-{config.drafter_path.name}").read_bytes() == b"former"
    assert (config.out / f"previous-2-{config.drafter_path.name}").read_bytes() == b"later"
    assert "previous-" in capsys.readouterr().out


def test_train_takes_tokens_for_a_target_of_random_weights_and_refuses_those_it_lacks(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    lines = [{"input_ids": document.tokens, "loss_mask": document.loss_mask} for document in documents(24)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = configuration(tmp_path, data=data, regenerate=False, max_steps=3, num_validation=2)
    monkeypatch.setattr(train_module, "resolve_target", lambda name: tmp_path)
    monkeypatch.setattr(train_module, "load_targets", lambda *args: {CPU: tiny_target()})
    assert train_module.train(config) == 0
    assert [record["step"] for record in records(config)] == [1, 2, 3]
    assert [record["step"] for record in events(config, "validation")] == [0, 3]
    data.write_text(data.read_text() + json.dumps({"input_ids": [5, VOCAB, 6], "loss_mask": [0, 1, 1]}) + "\n")
    with pytest.raises(InputError, match=f"has the token {VOCAB}"):
        train_module.train(config)
