"""Telemetry on a GPU: device time by events that nothing waits for, memory, graphs, and the reason of a recompile."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import graphsafe
from examples.dflash import trainer as trainer_module
from examples.dflash.config import InputError
from examples.dflash.report import report
from examples.dflash.telemetry import DeviceTimer, read_memory

from ..dflash.test_train import configuration
from .test_dflash import FIRST, SHAPE, run

pytestmark = pytest.mark.cuda
CYCLES = 200_000_000  # about a tenth of a second of a device at 2 GHz


@pytest.fixture(autouse=True)
def fresh_compiles():
    torch.compiler.reset()


def test_device_timer_measures_the_device_and_does_not_wait_for_it():
    timer = DeviceTimer(FIRST)
    torch.ones(1, device=FIRST).add_(1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    with timer:
        torch.cuda._sleep(CYCLES)
    assert timer.busy_s == 0
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    device_s = time.perf_counter() - began
    assert host_s < 0.5 * device_s
    first_s = timer.busy_s
    assert first_s == pytest.approx(device_s, rel=0.2)
    torch.cuda._sleep(CYCLES)  # in no block
    with timer:
        torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    assert timer.busy_s == pytest.approx(2 * first_s, rel=0.2)


def test_device_timer_is_read_while_other_threads_capture():
    timers = [DeviceTimer(FIRST) for _ in range(3)]
    ended = threading.Event()

    def step(timer):
        scale = torch.full((1,), 2.0, device=FIRST)
        for size in range(1, 20):
            graphed = graphsafe.graphed(lambda x: (x * scale).sum(), num_warmup_iters=1)
            for _ in range(4):
                with timer:
                    assert graphed(torch.ones(size, device=FIRST)).item() == 2.0 * size
            graphed.close()

    def read():
        while not ended.is_set():
            assert all(timer.busy_s >= 0 for timer in timers)

    with graphsafe.WorkerGroup(timeout=60) as group:
        reader = group.spawn(read, device=FIRST, name="reading")
        workers = [group.spawn(step, timer, device=FIRST) for timer in timers]
        try:
            for worker in workers:
                worker.result(timeout=300)
        finally:
            ended.set()
        reader.result(timeout=60)
    torch.cuda.synchronize()
    assert all(timer.busy_s > 0 for timer in timers)


def test_memory_of_the_device_is_read_in_bytes():
    before = read_memory([FIRST])[str(FIRST)]
    block = torch.ones(2**26, device=FIRST)
    after = read_memory([FIRST])[str(FIRST)]
    assert after["allocated_bytes"] - before["allocated_bytes"] == block.nbytes
    assert after["peak_bytes"] >= after["allocated_bytes"]
    assert after["reserved_bytes"] >= after["allocated_bytes"]


def test_train_writes_what_devices_graphs_and_compiles_did(tmp_path, capsys):
    config = configuration(tmp_path, max_steps=40, log_every=10, **SHAPE)
    log = run(config, [FIRST], [FIRST])
    last = log[-1]
    for record in log[1:]:
        assert 0 < record["threads"]["drafter-0"]["device_busy"] <= 1
    assert last["compiles"] >= 1 and last["recompiles"] == 0
    assert last["captures"] >= 1 and last["replays"] >= 20
    assert last["contexts"]["drafter-0"]["graph_bytes"] > 0
    memory = last["memory"][str(FIRST)]
    assert memory["reserved_bytes"] >= memory["allocated_bytes"] > 0
    assert last["memory_bytes"] == memory["peak_bytes"]
    start = json.loads((config.out / "metrics.jsonl").read_text().splitlines()[0])
    assert start["devices"][str(FIRST)] == torch.cuda.get_device_name(FIRST)
    pytest.importorskip("matplotlib")
    assert report(config) == 0
    said = capsys.readouterr().out
    assert f"memory on {FIRST}" in said and "device " in said


@pytest.mark.parametrize("mode", ["compile", "eager"])
def test_train_ends_with_the_reason_of_a_recompile(tmp_path, monkeypatch, mode):
    config = configuration(tmp_path, max_steps=60, step=mode, **SHAPE)
    call = trainer_module.Trainer.__call__

    def changing(self, batch):
        if self.num_steps == self.warm_after + 2:  # fewer anchors than those it was compiled for
            batch = {name: batch[name] for name in batch}
            batch |= {name: batch[name][:-8].clone() for name in ("anchors", "anchor_valid")}
        call(self, batch)

    monkeypatch.setattr(trainer_module.Trainer, "__call__", changing)
    with pytest.raises(InputError, match="after the warm-up") as caught:
        run(config, [FIRST], [FIRST])
    assert "expected" in str(caught.value) or "==" in str(caught.value)
    last = json.loads((config.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "recompile" and last["reasons"] and last["thread"] == "drafter-0"
