"""What breaks a run at an awkward moment is said, and leaves nothing that the next run cannot go on from."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from examples.dflash.checkpoint import Checkpoints, Snapshot, read_checkpoint
from examples.dflash.config import InputError
from examples.dflash.drafter import Drafter
from examples.dflash.metrics import Reporter
from examples.dflash.pipeline import Pipeline, Rings, Topology
from examples.dflash.processes import PeerLost, Processes
from examples.dflash.replicas import ReplicaLost
from examples.dflash.signals import Signals, listen
from examples.dflash.train import _means_loss
from graphsafe import Spec

from .models import tiny_config
from .runs import Run, read_log, settings, weights

CPU = torch.device("cpu")
NUM_ROUNDS = 12  # of ``short``: a measurement, ten steps, and a measurement


def short(out, **changes):
    return settings(out, **{"max_steps": 10, "save_every": None, **changes})


def events(config, name):
    return [record for record in read_log(config) if record.get("event") == name]


def snapshot(step=3, num_steps=9, **changes):
    model = Drafter(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    values = {"step": step, "num_steps": num_steps, "contract": {}, "acceptance": None, "best": None}
    return Snapshot.take(model, optimizer, scheduler, **{**values, **changes})


def fill_the_disk(rank):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # of each file


@pytest.mark.parametrize("save_every", [2, None])
def test_a_checkpoint_that_the_disk_cannot_take_ends_the_run_with_its_name(tmp_path, save_every):
    config = short(tmp_path / "run", save_every=save_every)
    run = Run(config, before=fill_the_disk)
    assert run.wait() == [2], run.said()
    name = f"step-{save_every or 10:08d}"
    assert "error InputError" in run.said() and f"{name} could not be written" in run.said()
    assert not config.checkpoints_path.exists() or not list(config.checkpoints_path.iterdir())
    assert Run(config).wait() == [0]


def test_the_error_of_a_checkpoint_comes_before_the_next_one_is_due(tmp_path):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", 2)
    checkpoints.check()
    checkpoints.save(snapshot())
    with pytest.raises(InputError, match="step-00000003 could not be written"):
        for _ in range(500):
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.close()


def test_metrics_that_the_disk_cannot_take_are_named_and_leave_the_first_error_as_it_is(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False)
    reporter._file.close()
    reporter._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl") as caught:
        reporter.event("start")
    assert caught.value.errno == errno.ENOSPC
    reporter.close()


class StopBefore:
    """SIGTERM before a process's reader asks for the round of that number, from 0."""

    def __init__(self, number):
        self.number = number

    def __call__(self, rank):
        stops, calls = Signals.stops, []

        def counted(signals, agree):
            calls.append(1)
            if len(calls) > self.number:
                signals._pipeline.stop.set()
            return stops(signals, agree)

        Signals.stops = counted


def test_a_run_that_is_stopped_before_its_last_measurement_goes_on_with_it(tmp_path):
    config, whole = (short(tmp_path / name) for name in ("run", "whole"))
    assert Run(config, before=StopBefore(NUM_ROUNDS - 1)).wait() == [128 + signal.SIGTERM]
    stopped = Checkpoints(config.checkpoints_path, 2).newest()
    assert stopped.step == 10 and stopped.acceptance is None and not stopped.is_final
    assert not config.best_path.exists()
    assert Run(config).wait() == [0]
    assert Run(whole).wait() == [0]
    assert [e["step"] for e in events(config, "validation")] == [0, 10]
    assert not list(config.out.glob("previous-*"))
    done, of_whole = (Checkpoints(c.checkpoints_path, 2).newest() for c in (config, whole))
    assert done.is_final and (done.acceptance, done.best) == (of_whole.acceptance, of_whole.best)
    assert config.best_path.exists()


def test_a_signal_after_the_last_round_was_read_leaves_the_run_a_finished_one(tmp_path):
    config = short(tmp_path / "run")
    assert Run(config, before=StopBefore(NUM_ROUNDS)).wait() == [0]
    assert events(config, "end") and not events(config, "stop")


def restarted(rank):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"


def test_a_finished_run_is_not_trained_anew_when_torchrun_restarts_it(tmp_path):
    config = short(tmp_path / "run")
    assert Run(config).wait() == [0]
    before = weights(config)
    again = Run(config, before=restarted)
    assert again.wait() == [0], again.said()
    assert [e["step"] for e in events(config, "resume")] == [10]
    assert [e["step"] for e in events(config, "validation")] == [0, 10]  # known, so not noted once more
    assert not list(config.out.glob("previous-*"))
    assert all(torch.equal(weights(config)[name], before[name]) for name in before)


def test_a_measurement_is_added_to_a_checkpoint_that_is_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    for changes in ({"unmeasured": True}, {"acceptance": 1.5, "best": 1.5}):
        checkpoints.save(snapshot(9, 9, **changes))
        checkpoints.wait()
        newest = checkpoints.newest()
        assert newest.is_final != newest.unmeasured
    assert (newest.acceptance, newest.best) == (1.5, 1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]
    checkpoints.close()


def test_a_checkpoint_that_someone_has_renamed_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(snapshot(3))
    checkpoints.wait()
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003-broken")
    assert checkpoints.newest() is None
    for step in (4, 5):
        checkpoints.save(snapshot(step))
    checkpoints.wait()
    assert checkpoints.newest().step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003-broken", "step-00000005"]
    checkpoints.close()


def test_a_checkpoint_of_zeros_is_named_as_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(snapshot())
    checkpoints.wait()
    file = tmp_path / "step-00000003" / "optimizer.pt"
    file.write_bytes(bytes(file.stat().st_size))  # as a power cut may leave it
    model = Drafter(tiny_config())
    with pytest.raises(InputError, match="step-00000003 is damaged"):
        read_checkpoint(file.parent).restore(model, torch.optim.AdamW(model.parameters()), None)
    checkpoints.close()


def pipeline():
    specs = {"x": Spec((1,), torch.float32)}
    return Pipeline(Rings(Topology((CPU,), (CPU,)), specs, specs, 1), threading.Event())


def test_a_signals_handler_takes_no_lock_of_the_main_thread(monkeypatch):
    """It runs between two instructions of the main thread, which may hold that very lock."""
    ended, aborted_by = pipeline(), []
    monkeypatch.setattr(ended, "abort", lambda: aborted_by.append(threading.current_thread()))
    with listen(ended) as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGINT] * 3
    assert ended.stop.is_set() or len(aborted_by) == 3
    assert aborted_by and threading.main_thread() not in aborted_by


def test_a_signal_that_has_also_ended_the_reader_of_the_output_is_heard():
    """As Ctrl-C does to ``... 2>&1 | tee log``."""
    stopped = pipeline()
    read_end, write_end = os.pipe()
    os.close(read_end)
    stderr = os.dup(2)
    try:
        with listen(stopped):
            os.dup2(write_end, 2)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.stop.wait(10)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write_end)


def test_what_is_to_end_with_a_pipeline_ends_at_once_where_it_has_ended():
    ended, called = pipeline(), []
    assert ended.abort()
    assert not ended.abort()
    ended.on_abort(lambda: called.append(1))
    assert called == [1]


def test_errors_that_another_process_causes_in_several_threads_are_one_loss():
    alone = Processes()
    lost = [ReplicaLost("a"), PeerLost("b"), BaseExceptionGroup("c", [ReplicaLost("d")])]
    assert _means_loss(BaseExceptionGroup("all", lost), alone)
    assert not _means_loss(BaseExceptionGroup("all", [*lost, ValueError("own")]), alone)
    assert not _means_loss(TimeoutError("stuck"), alone)


def freeze_while_connecting(rank):
    if rank == 1:
        from examples.dflash import replicas

        gather, calls = replicas.gather, []

        def freezing(*args):
            gather(*args)
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)

        replicas.gather = freezing


def test_a_process_that_freezes_while_groups_connect_ends_the_others(tmp_path):
    config = short(tmp_path / "run", targets=("cpu",) * 2, drafters=("cpu",) * 2, peer_timeout_s=2.0)
    run = Run(config, size=2, before=freeze_while_connecting)
    run.processes[0].join(25)
    code, said = run.processes[0].exitcode, run.said()
    run.processes[1].kill()
    run.wait()
    assert code == 2, said
    assert "error PeerLost: Process 1 has not been heard of" in said


def test_a_second_signal_to_one_process_is_named_by_the_others(tmp_path):
    config = settings(tmp_path / "run", targets=("cpu",) * 2, drafters=("cpu",) * 2, max_steps=3000, epochs=10**6)
    run = Run(config, size=2)
    run.wait_for_step(5)
    os.kill(run.processes[0].pid, signal.SIGSTOP)  # so that the stop is not agreed on in between
    run.send(signal.SIGINT, rank=1)
    time.sleep(0.2)
    run.send(signal.SIGINT, rank=1)
    time.sleep(0.2)
    run.send(signal.SIGCONT)
    assert run.wait() == [2, 130], run.said()
    assert "Process 1 failed: a second signal" in run.logs[0].read_text()
