from __future__ import annotations

import json
import sys
import threading
import time

import pytest
import torch

from examples.dflash.display import Display
from examples.dflash.loss import Loss, SlotCounts
from examples.dflash.metrics import Meter, Reporter, flatten, measure, read_records, summarize, up_to


def a_loss(scale=1.0):
    counts = SlotCounts(
        correct=torch.tensor([4.0, 2.0, 0.0]) * scale,
        total=torch.tensor([8.0, 8.0, 4.0]) * scale,
        accepted=torch.tensor([4.0, 1.0, 0.0]) * scale,
        blocks=torch.tensor(10.0) * scale,
    )
    return Loss(torch.tensor(6.0) * scale, torch.tensor(3.0) * scale, counts)


RECORD = {"step": 3, "loss": 1.5, "acceptance": 1.25, "tokens_per_s": 12.0, "drafter_busy": 0.5, "grad_norm": None}


def test_summary_is_of_the_sums_over_steps():
    meter = Meter(4, torch.device("cpu"))
    meter.add(measure(a_loss(), torch.tensor(30)))
    meter.add(measure(a_loss(3.0), torch.tensor(70)))
    summary = summarize(meter.take().tolist())
    assert summary["loss"] == 2.0
    assert summary["acceptance"] == 1.5
    assert summary["slot_accuracy"] == [0.5, 0.25, 0.0]
    assert (summary["tokens"], summary["blocks"]) == (100, 40)
    assert meter.take().eq(0).all()


def test_summary_of_nothing_is_finite():
    summary = summarize([0.0] * 13)
    assert (summary["loss"], summary["acceptance"], summary["slot_accuracy"]) == (0.0, 1.0, [0.0] * 3)


@pytest.mark.parametrize("live", [False, True])
def test_reporter_writes_a_line_a_reading_whatever_shows_it(tmp_path, capsys, live):
    path = tmp_path / "run" / "metrics.jsonl"
    reporter = Reporter(path, 10, live=live)
    reporter.say("hello [there]")
    reporter.advance(2)
    reporter.report(RECORD)
    lines = path.read_text().splitlines()  # before it is closed
    reporter.close()
    reporter.close()
    record = json.loads(lines[0])
    assert record.pop("time") > 0
    assert record == RECORD
    out = capsys.readouterr().out
    assert "hello [there]" in out
    assert live or "step 3/10  loss 1.500  acceptance 1.25  12 tokens/s  drafter busy 50%" in out


def scalars(directory):
    """What TensorBoard reads: by tag, the value at each step."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(directory))
    found.Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_reporter_writes_every_number_for_tensorboard_on_request(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, tensorboard=True, live=False)
    reporter.report({**RECORD, "slot_accuracy": [0.5, 0.25], "threads": {"drafter-0": {"busy": 0.75}}})
    reporter.event("validation", step=3, loss=2.0, acceptance=1.5, slot_accuracy=[0.125])
    reporter.close()
    found = scalars(tmp_path)
    assert found["loss"] == {3: 1.5}
    assert (found["slot_accuracy/1"], found["slot_accuracy/2"]) == ({3: 0.5}, {3: 0.25})
    assert found["threads/drafter-0/busy"] == {3: 0.75}
    assert (found["validation/loss"], found["validation/slot_accuracy/1"]) == ({3: 2.0}, {3: 0.125})
    assert "step" not in found and "grad_norm" not in found


def test_reporter_resumed_for_tensorboard_drops_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reporter = Reporter(path, 10, tensorboard=True, live=False)
    for step in (1, 2, 3):
        reporter.report({**RECORD, "step": step, "loss": float(step)})
    reporter.close()
    time.sleep(1.1)  # TensorBoard orders its files by the second in their names
    reporter = Reporter(path, 10, tensorboard=True, live=False, resume_step=1)
    reporter.report({**RECORD, "step": 2, "loss": 12.0})
    reporter.close()
    assert scalars(tmp_path)["loss"] == {1: 1.0, 2: 12.0}


def test_reporter_begins_its_file_anew_unless_it_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    Reporter(path, 10, live=False).close()
    assert path.read_text() == ""


def test_reporter_resumed_keeps_what_was_measured_up_to_the_step_and_all_other_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reporter = Reporter(path, 10, live=False)
    reporter.event("start", num_steps=10)
    for step in range(1, 6):
        reporter.report({**RECORD, "step": step})
        reporter.event("validation", acceptance=1.0)
        reporter.event("checkpoint", path="x")
    reporter.event("error", kind="OSError")
    reporter.close()
    with path.open("a") as file:
        file.write('{"step": 6, "loss": 1.')  # as a killed process leaves it
    reporter = Reporter(path, 10, live=False, resume_step=3)
    reporter.event("resume")
    reporter.report({**RECORD, "step": 4, "loss": 7.0})
    reporter.close()
    found = [(record.get("event"), record["step"]) for record in map(json.loads, path.read_text().splitlines())]
    measured = [(name, step) for step in (1, 2, 3) for name in (None, "validation", "checkpoint")]
    assert found == [("start", 0), *measured, ("error", 5), ("resume", 3), (None, 4)]
    assert read_records(path)[-1]["loss"] == 7.0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]  # no temporary one is left


def test_reporter_resumed_without_a_file_begins_one(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False, resume_step=3)
    reporter.event("resume")
    reporter.close()
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [3]


def test_reporter_writes_null_for_numbers_that_json_lacks(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False)
    reporter.report({**RECORD, "loss": float("nan"), "slot_accuracy": [0.5, float("inf")]})
    reporter.close()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss"], record["slot_accuracy"]) == (None, [0.5, None])


def test_reporter_events_have_the_last_step_unless_another_is_given(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False)
    reporter.advance(4)
    reporter.event("checkpoint", path="x")
    reporter.event("validation", step=2)
    reporter.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(record["event"], record["step"]) for record in records] == [("checkpoint", 4), ("validation", 2)]
    assert records[0]["path"] == "x"


def test_reporter_lines_stay_whole_when_threads_write_at_once(tmp_path):
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False)
    start = threading.Barrier(4)

    def write(number):
        start.wait(20)
        for _ in range(50):
            reporter.event("checkpoint", number=number, padding="x" * 300)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    reporter.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(record["number"] for record in records) == sorted([*range(4)] * 50)


@pytest.mark.parametrize("method", ["start", "advance", "add", "say", "stop"])
def test_reporter_goes_on_without_a_display_that_fails(tmp_path, capsys, monkeypatch, method):
    def fail(*_):
        raise OSError(5, "the terminal has gone")

    monkeypatch.setattr(Display, method, fail)
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=True)
    reporter.advance(2)
    reporter.say("one")
    reporter.report(RECORD)
    reporter.say("two")
    reporter.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["loss"] for record in records if "event" not in record] == [1.5]
    told = [record["text"] for record in records if record.get("event") == "display"]
    assert len(told) == 1 and "the terminal has gone" in told[0]
    assert "two" in capsys.readouterr().out


def test_reporter_goes_on_when_nobody_reads_what_it_prints(tmp_path, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(sys, "stdout", Closed())
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, live=False)
    reporter.say("hello")
    reporter.report(RECORD)
    reporter.close()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1


def test_records_are_read_past_lines_that_are_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\nnull\n\xff\n{"step": 2}\n{"st')
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_records_up_to_a_step_keep_those_without_one():
    assert up_to([{"event": "start"}, {"loss": 1}, {"step": 2}, {"step": 3}], 2) == [
        {"event": "start"},
        {"loss": 1},
        {"step": 2},
    ]


def test_flatten_names_every_number():
    record = {"a": 1, "b": {"c": 2.5, "d": [3, 4]}, "text": "x", "none": None}
    assert dict(flatten(record)) == {"a": 1, "b/c": 2.5, "b/d/1": 3, "b/d/2": 4}
