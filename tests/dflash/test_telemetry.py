from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import graphsafe
from examples.dflash import __main__ as command_line
from examples.dflash import trainer as trainer_module
from examples.dflash.config import InputError
from examples.dflash.pipeline import Rings, Topology
from examples.dflash.recompiles import MAX_REASONS, find_recompile
from examples.dflash.telemetry import DeviceTimer, Telemetry, describe_run, read_memory

from .test_train import all_records, configuration, records, run

CPU = torch.device("cpu")
SPECS = {"number": graphsafe.Spec((1,), torch.int64)}
FEATURES = graphsafe.Spec((1,), torch.float32)
WAITS = ("wait_input", "wait_room", "wait_gate")


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("examples.dflash.telemetry.time.monotonic", clock)
    return clock


class FakeRing:
    """A ring with the counts that a test gives it."""

    def __init__(self):
        self.depth, self.num_ready, self.closed = 2, 1, False
        self.produce_wait_s, self.consume_wait_s = 0.0, 0.0

    def stats(self):
        return self


def telemetry(num_targets=1, num_drafters=1):
    rings = Rings(Topology((CPU,) * num_targets, (CPU,) * num_drafters), SPECS, {"features": FEATURES}, 2)
    rings.batches = [FakeRing() for _ in rings.batches]
    rings.features = {pair: FakeRing() for pair in rings.features}
    return Telemetry(rings), rings


def test_telemetry_shares_are_the_waits_of_each_threads_own_sides_of_the_rings(clock):
    made, rings = telemetry(2, 2)
    clock.now += 10
    rings.batches[0].produce_wait_s, rings.batches[0].consume_wait_s = 3.0, 4.0
    rings.batches[1].produce_wait_s = 2.0
    rings.features[0, 0].produce_wait_s, rings.features[0, 0].consume_wait_s = 1.0, 9.0
    threads = made.read()["threads"]
    assert list(threads) == ["reader", "target-0", "target-1", "drafter-0", "drafter-1"]
    for name, share, busy in (("reader", (0, 0.5), 0.5), ("target-0", (0.4, 0.1), 0.5), ("drafter-0", (0.9, 0), 0.1)):
        assert (threads[name]["wait_input"], threads[name]["wait_room"]) == pytest.approx(share), name
        assert threads[name]["busy"] == pytest.approx(busy), name
    assert threads["target-1"]["busy"] == threads["drafter-1"]["busy"] == 1.0


def test_telemetry_shares_are_of_the_time_since_the_last_reading(clock):
    made, rings = telemetry()
    ring = rings.features[0, 0]
    clock.now, ring.consume_wait_s = clock.now + 10, 5.0
    assert made.read()["drafter_busy"] == pytest.approx(0.5)
    clock.now, ring.consume_wait_s = clock.now + 4, 6.0
    assert made.read()["drafter_busy"] == pytest.approx(0.75)


def test_telemetry_shares_add_up_to_1_when_a_wait_began_before_the_last_reading(clock):
    made, rings = telemetry()
    clock.now += 1
    rings.batches[0].consume_wait_s, rings.features[0, 0].produce_wait_s = 6.0, 2.0  # 8 s of waits end within 1 s
    shares = made.read()["threads"]["target-0"]
    assert shares["busy"] == 0
    assert (shares["wait_input"], shares["wait_room"]) == pytest.approx((0.75, 0.25))


def test_telemetry_leaves_out_threads_that_have_ended():
    made, rings = telemetry(2, 1)
    rings.batches[0].closed = rings.features[0, 0].closed = True
    assert list(made.read()["threads"]) == ["reader", "target-1", "drafter-0"]
    rings.batches[1].closed = rings.features[1, 0].closed = True
    assert list(made.read()["threads"]) == ["drafter-0"]


def test_telemetry_reading_is_plain_numbers():
    def numbers(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and numbers(item) for key, item in value.items())
        return type(value) in (int, float)

    reading = telemetry(2, 1)[0].read()
    assert numbers(reading)
    assert json.loads(json.dumps(reading)) == reading
    assert reading["rings"]["batches-1"] == {"depth": 2, "num_ready": 1, "produce_wait_s": 0.0, "consume_wait_s": 0.0}


def test_telemetry_counts_what_its_own_threads_did_since_it_was_made(clock):
    def steps(count):
        with graphsafe.thread_context("cpu", name="drafter-0") as context:
            for _ in range(count):
                with context.eager():
                    pass

    steps(5)  # of a run before
    made, _ = telemetry()
    steps(2)  # in a context that has ended
    reading = made.read()
    assert reading["contexts"]["drafter-0"]["eager_steps"] == reading["eager_steps"] == 2
    assert reading["contexts"]["target-0"]["eager_steps"] == 0


def test_telemetry_wait_at_the_gate_is_not_busy():
    made, _ = telemetry()
    there, held, leave = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with graphsafe.thread_context("cpu") as context:
            assert there.wait(20)
            with context.eager():  # 2. nobody else may step
                held.set()
                assert leave.wait(20)

    def wait():
        with graphsafe.thread_context("cpu", name="target-0") as context:
            there.set()  # 1.
            assert held.wait(20)
            threading.Timer(0.5, leave.set).start()  # 4. after a while
            with context.eager():  # 3. waits
                pass

    threads = [threading.Thread(target=body) for body in (hold, wait)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    reading = made.read()
    shares = reading["threads"]["target-0"]
    assert reading["contexts"]["target-0"]["wait_s"] > 0.1
    assert shares["wait_gate"] > 0.1
    assert shares["busy"] + sum(shares[name] for name in WAITS) == pytest.approx(1)


def test_telemetry_counts_compiles_and_those_after_the_warm_up_as_recompiles():
    @graphsafe.compile(backend="eager", dynamic=False)
    def compiled(x):
        return x + 1

    compiled(torch.ones(2))
    made, _ = telemetry()
    compiled(torch.ones(3))
    first = made.read()
    made.warmed_up()
    compiled(torch.ones(3))
    assert (first["compiles"], first["recompiles"]) == (1, 0)
    assert made.read()["recompiles"] == 0
    compiled(torch.ones(4))
    last = made.read()
    assert (last["compiles"], last["recompiles"]) == (2, 1)


def test_device_timer_sums_its_blocks_on_the_cpu():
    timer = DeviceTimer(CPU)
    wait = timer.around(lambda seconds: time.sleep(seconds) or seconds)
    assert wait(0.02) + wait(0.03) == 0.05
    time.sleep(0.1)  # outside of blocks
    assert 0.05 <= timer.busy_s < 0.1


class FakeEvent:
    """A CUDA event that is complete when the test says so."""

    made: list[FakeEvent] = []  # noqa: RUF012

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.done, self.at_ms, self.num_records = False, 0.0, 0
        FakeEvent.made.append(self)

    def record(self, stream):
        self.done, self.num_records = False, self.num_records + 1

    def query(self):
        return self.done

    def elapsed_time(self, end):
        assert self.done and end.done, "reading it would wait, or raise"
        return end.at_ms - self.at_ms


def test_device_timer_reads_cuda_events_once_they_are_complete_and_uses_them_again(monkeypatch):
    FakeEvent.made = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timer = DeviceTimer(torch.device("cuda", 0))
    with timer:
        pass
    with timer:
        pass
    assert timer.busy_s == 0  # neither is complete
    first, first_end, second, second_end = FakeEvent.made
    first.done = first_end.done = second.done = True
    first_end.at_ms = 1500.0
    assert timer.busy_s == 1.5
    with timer:  # in the first pair
        pass
    assert len(FakeEvent.made) == 4
    for event in FakeEvent.made:
        event.done = True
    second.at_ms, second_end.at_ms = 2000.0, 2250.0
    first.at_ms, first_end.at_ms = 2250.0, 2500.0
    assert timer.busy_s == 2.0


def test_device_timer_forgets_a_block_that_an_error_ends(monkeypatch):
    FakeEvent.made = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timer = DeviceTimer(torch.device("cuda", 0))
    with pytest.raises(ZeroDivisionError), timer:
        raise ZeroDivisionError
    assert [event.num_records for event in FakeEvent.made] == [1, 0]
    assert timer.busy_s == 0


def test_memory_of_the_process_is_read_in_bytes():
    before = read_memory([CPU])["cpu"]
    block = torch.ones(2**25)  # 128 MiB
    after = read_memory([CPU])["cpu"]
    assert after["allocated_bytes"] - before["allocated_bytes"] > 0.9 * block.nbytes
    assert after["peak_bytes"] >= after["allocated_bytes"] > block.nbytes


def test_run_is_described_by_its_configuration_versions_and_devices(tmp_path):
    described = describe_run(configuration(tmp_path), Topology((CPU, CPU), (CPU,)))
    assert json.loads(json.dumps(described)) == described
    assert described["config"]["lr"] == 3e-3
    assert described["config"]["out"] == str(tmp_path / "run")
    assert described["versions"]["torch"] == torch.__version__
    assert described["versions"]["graphsafe"] in (graphsafe.__version__, "not installed")
    assert (described["targets"], described["drafters"]) == (["cpu", "cpu"], ["cpu"])


def test_train_writes_what_each_thread_did(tmp_path):
    _, log = run(configuration(tmp_path, max_steps=24, log_every=8), num_targets=2, num_drafters=2)
    threads = ["reader", "target-0", "target-1", "drafter-0", "drafter-1"]
    assert list(log[0]["threads"]) == threads
    for record in log:
        assert list(record["threads"])[-2:] == threads[-2:]
        for shares in record["threads"].values():
            assert shares["busy"] + sum(shares[name] for name in WAITS) == pytest.approx(1)
    last = log[-1]
    assert all(0 < last["threads"][name]["device_busy"] <= 1 for name in threads[3:])
    assert last["captures"] >= 2 and last["contexts"]["drafter-1"]["captures"] >= 1
    assert last["memory"]["cpu"]["peak_bytes"] == last["memory_bytes"]
    assert last["rings"]["features-1-1"]["depth"] >= 1
    assert sum(ring["consume_wait_s"] + ring["produce_wait_s"] for ring in last["rings"].values()) > 0


def test_train_notes_its_start_and_its_end(tmp_path):
    config = configuration(tmp_path, max_steps=3)
    run(config)
    start, *_, end = all_records(config)
    assert (start["event"], start["step"], start["num_steps"]) == ("start", 0, 3)
    assert start["config"]["block_size"] == 4 and start["versions"]["torch"]
    assert (end["event"], end["step"]) == ("end", 3)


def test_train_notes_the_error_that_ends_it(tmp_path, monkeypatch):
    call = trainer_module.Trainer.__call__

    def broken(self, batch):
        call(self, batch)
        if self.num_steps == 3:
            raise ZeroDivisionError("in the drafter\nand more")

    monkeypatch.setattr(trainer_module.Trainer, "__call__", broken)
    config = configuration(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(config)
    last = all_records(config)[-1]
    assert last.pop("time") > 0
    assert last == {"event": "error", "step": 3, "kind": "ZeroDivisionError", "text": "in the drafter"}


def recompile_error(compiled, *args):
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError) as caught:
        compiled(*args)
    return caught.value


def names_guards():
    """Whether this torch says which guards failed; 2.9 does not."""
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    return "size mismatch" in str(recompile_error(compiled, torch.ones(3)))


def test_recompile_names_its_function_and_every_guard_that_failed():
    @torch.compile(backend="eager", dynamic=False)
    def doubled(x, times=2):
        return x * times

    doubled(torch.ones(3))
    doubled(torch.ones(4))
    error = recompile_error(doubled, torch.ones(5))
    error.add_note("In worker 'drafter-3'.")
    found = find_recompile(ExceptionGroup("threads", [ValueError("other"), error]))
    assert (found.function, found.thread) == ("doubled", "drafter-3")
    assert found.file.endswith("test_telemetry.py")
    assert "doubled() in test_telemetry.py" in str(found) and "by the thread drafter-3" in str(found)
    if not names_guards():
        assert found.reasons == () and "this version of torch does not say" in str(found)
        return
    assert len(found.reasons) == 2
    assert all("size mismatch at index 0. expected" in reason and "actual 5" in reason for reason in found.reasons)
    text = str(found)
    assert found.caller.startswith("recompile_error() in test_telemetry.py, line ") and found.caller in text
    assert "actual 5" in text
    number = find_recompile(recompile_error(doubled, torch.ones(3), 7)).reasons
    assert any(reason.replace(" ", "") == "times==2" for reason in number)  # the source line behind it is left out


def test_recompile_of_what_was_never_compiled_has_no_reasons():
    found = find_recompile(recompile_error(torch.compile(lambda x: x - 1, backend="eager"), torch.ones(2)))
    assert found.reasons == ()
    assert "no compiled form" in str(found)


def test_recompile_with_many_reasons_prints_some():
    guards = "\n".join(f"    - 0/{number}: size {number}" for number in range(MAX_REASONS + 3))
    error = RuntimeError(
        "Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: '/x/y.py', function name: 'f', "
        f"line number: 7\n    triggered by the following guard failure(s):\n{guards}"
    )
    found = find_recompile(error)
    assert len(found.reasons) == MAX_REASONS + 3
    assert "f() in y.py, line 7" in str(found) and "and 3 more" in str(found)


def test_recompile_is_told_when_torch_names_nothing():
    found = find_recompile(RuntimeError("Detected recompile when torch.compile stance is 'fail_on_recompile'"))
    assert (found.function, found.reasons, found.caller) == (None, (), None)
    assert str(found).startswith("A function had to be compiled anew")


def test_other_errors_are_no_recompiles():
    assert find_recompile(ExceptionGroup("threads", [RuntimeError("CUDA error"), ValueError("Detected")])) is None


def test_train_ends_with_the_reason_of_a_recompile_after_the_warm_up(tmp_path, monkeypatch):
    @torch.compile(backend="eager", dynamic=False)
    def measured(x):
        return x.sum()

    call = trainer_module.Trainer.__call__

    def recompiling(self, batch):
        call(self, batch)
        measured(torch.ones(4 if self.num_steps > self.warm_after else 3))

    monkeypatch.setattr(trainer_module, "compiles", lambda *_: True)
    monkeypatch.setattr("examples.dflash.train.compiles", lambda *_: True)
    monkeypatch.setattr(trainer_module.Trainer, "__call__", recompiling)
    config = configuration(tmp_path, max_steps=50)
    with pytest.raises(InputError, match=r"measured\(\) in test_telemetry.py") as caught:
        run(config)
    assert "called by recompiling() in" in str(caught.value)
    assert "drafter-0" in str(caught.value) and "after the warm-up" in str(caught.value)
    assert command_line.explain(caught.value) == str(caught.value)  # no traceback for it
    event = all_records(config)[-1]
    assert (event["event"], event["function"], event["step"]) == ("recompile", "measured", len(records(config)))
    if names_guards():
        assert "expected 3, actual 4" in event["reasons"][0]
        assert "expected 3, actual 4" in str(caught.value)
    measured(torch.ones(5))  # the stance is as before
