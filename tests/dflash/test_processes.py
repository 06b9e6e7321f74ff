"""Several processes train as one, and end together, whatever happens to one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from examples.dflash.config import InputError
from examples.dflash.pipeline import Topology
from examples.dflash.processes import PeerLost, Processes

from .runs import DEADLINE_S, Run, losses, read_log, settings, weights

CPU = torch.device("cpu")
FOUR = ("cpu",) * 4  # drafters of a host: two for each of two processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process of four drafters."""
    config = settings(tmp_path_factory.mktemp("alone") / "run", drafters=FOUR, log_every=1, max_steps=16, epochs=9)
    run = Run(config)
    assert run.wait() == [0], run.said()
    return config


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_two_processes_of_two_drafters_train_as_one_of_four(tmp_path, alone):
    config = settings(tmp_path / "run", targets=("cpu",) * 2, drafters=FOUR, log_every=1, max_steps=16, epochs=9)
    run = Run(config, size=2)
    assert run.wait() == [0, 0], run.said()
    assert losses(config) == losses(alone)
    assert equal(weights(config), weights(alone))
    assert len(losses(config)) > 3


def test_a_run_of_two_processes_goes_on_bit_for_bit_after_a_stop(tmp_path):
    both = dict(targets=("cpu",) * 2, drafters=("cpu",) * 2, max_steps=80)
    whole = settings(tmp_path / "whole", **both)
    assert Run(whole, size=2).wait() == [0, 0]
    config = settings(tmp_path / "run", **both)
    run = Run(config, size=2)
    run.wait_for_step(10)
    run.send(signal.SIGTERM, rank=1)  # to one of them alone: both end, after the same round
    assert run.wait() == [143, 143], run.said()
    assert Run(config, size=2).wait() == [0, 0]
    assert [record["event"] for record in read_log(config) if record.get("event") == "resume"]
    assert equal(weights(config), weights(whole))


def test_an_odd_number_of_batches_is_filled_up(tmp_path):
    """As many documents as make five batches for four drafters."""
    config = settings(tmp_path / "run", targets=("cpu",) * 2, drafters=FOUR, epochs=1, max_steps=None, log_every=1)
    config = dataclasses.replace(config, token_budget=100)
    run = Run(config, size=2)
    assert run.wait() == [0, 0], run.said()
    log = [record for record in read_log(config) if "event" not in record]
    assert len(log) == 2
    assert 0 < log[1]["blocks"] <= config.num_anchors < log[0]["blocks"]


@pytest.mark.parametrize(("end", "rank"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)])
def test_a_dead_process_ends_the_others_with_an_error_and_the_run_goes_on_later(tmp_path, end, rank):
    """Process 0 has the store, too."""
    both = dict(targets=("cpu",) * 2, drafters=FOUR, max_steps=3000, epochs=10**6, peer_timeout_s=2.0)
    config = settings(tmp_path / "run", **both)
    run = Run(config, size=2)
    run.wait_for_step(10)
    run.send(end, rank=rank)
    other = 1 - rank
    began = time.monotonic()
    run.processes[other].join(30)
    assert run.processes[other].exitcode == 2, run.said()
    assert time.monotonic() - began < 20
    said = run.logs[other].read_text()
    assert ("The run's store has not answered" if rank == 0 else "Process 1 has not been heard of") in said, said
    assert "The last checkpoint is" in said and "goes on from there" in said
    run.processes[rank].kill()
    run.processes[rank].join()
    later = Run(config, size=2)
    done = max(record.get("step", 0) for record in read_log(config))
    later.wait_for_step(done + 3)
    later.send(signal.SIGINT)
    assert later.wait() == [130, 130], later.said()


def test_an_error_in_one_process_is_named_by_the_others(tmp_path):
    config = settings(tmp_path / "run", targets=("cpu",) * 2, drafters=("cpu",) * 2, max_steps=3000, epochs=10**6)
    run = Run(config, size=2, before=break_the_target)
    assert run.wait() == [2, 2], run.said()
    assert "ZeroDivisionError: in the target" in run.logs[1].read_text()
    assert "Process 1 failed: ZeroDivisionError: in the target" in run.logs[0].read_text()


def break_the_target(rank):
    from examples.dflash.target import Target

    if rank == 1:
        features, calls = Target.features, []

        def failing(*args):
            calls.append(1)
            if len(calls) == 9:
                raise ZeroDivisionError("in the target")
            return features(*args)

        Target.features = failing


def differ(rank):
    from examples.dflash import train as train_module

    if rank == 1:
        train = train_module.train_on
        train_module.train_on = lambda documents, *args, **kwargs: train(documents[:-1], *args, **kwargs)


def test_processes_with_other_data_are_refused(tmp_path):
    config = settings(tmp_path / "run", targets=("cpu",) * 2, drafters=("cpu",) * 2)
    run = Run(config, size=2, before=differ)
    assert run.wait() == [2, 2], run.said()
    assert "documents: process 0 has" in run.logs[1].read_text()
    assert "Process 1 failed: InputError" in run.logs[0].read_text()


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_two_train_as_one_all_the_same(tmp_path):
    changes = {"max_steps": 200, "save_every": 20, "epochs": 500, "peer_timeout_s": 2.0}
    whole = settings(tmp_path / "whole", drafters=FOUR, **changes)
    assert Run(whole).wait() == [0]
    changes |= {"targets": ["cpu"] * 2, "drafters": list(FOUR)}
    config = settings(tmp_path / "run", **changes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "tests.dflash.runs", str(config.out), json.dumps(changes)]
    with (tmp_path / "log").open("w+") as log:
        launched = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not any(record.get("step", 0) >= 40 for record in read_log(config)):
                assert time.monotonic() < deadline and launched.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.02)
            workers = children(launched.pid)
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            assert launched.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()
        finally:
            if launched.poll() is None:
                os.killpg(launched.pid, signal.SIGKILL)
    resumed = [record["step"] for record in read_log(config) if record.get("event") == "resume"]
    assert resumed and all(step % 20 == 0 for step in resumed)
    assert max(losses(config)) == 200
    assert equal(weights(config), weights(whole))


def children(pid):
    """Processes that ``pid`` has started, in the order of their numbers."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError):
                continue
            if parent == pid:
                found.append(int(entry))
    return sorted(found)


def test_processes_share_a_hosts_devices_in_order():
    devices = Topology(tuple(torch.device("cuda", i) for i in range(4)), (CPU, CPU))
    parts = [object.__new__(Processes) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.local_rank, part.local_size = rank, 2
    assert [part.share(devices).targets for part in parts] == [devices.targets[:2], devices.targets[2:]]
    with pytest.raises(InputError, match=r"--drafters names 3 devices.*2 processes"):
        parts[0].share(Topology(devices.targets, (CPU,) * 3))


def test_one_process_agrees_with_itself():
    processes = Processes()
    assert processes.agree(15) == 15
    assert processes.from_first("x", lambda: "text") == "text"
    processes.check()
    processes.close()


def test_a_silent_process_is_lost_and_a_waiting_one_is_told():
    store = dist.HashStore()
    here = Processes(0, 2, store=store, timeout_s=0.5)
    told = threading.Event()
    here.on_loss(told.set)
    assert told.wait(10)
    with pytest.raises(PeerLost, match="Process 1 has not been heard of"):
        here.check()
    here.on_loss(told.clear)  # at once, when it has happened already
    assert not told.is_set()
    here.close()


def test_processes_that_end_normally_lose_nobody():
    store = dist.HashStore()
    both = [Processes(rank, 2, store=store, timeout_s=5.0) for rank in range(2)]
    threads = [threading.Thread(target=one.close) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for one in both:
        one.check()


def test_an_incomplete_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"WORLD_SIZE is 2(.|\n)*torchrun"):
        Processes.join(5.0)
