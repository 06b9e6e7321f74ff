from __future__ import annotations

import json

import pytest
import torch

from examples.dflash.loss import Loss, SlotCounts
from examples.dflash.metrics import Meter, Reporter, measure, summarize


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


def test_reporter_writes_for_tensorboard_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    reporter = Reporter(tmp_path / "metrics.jsonl", 10, tensorboard=True, live=False)
    reporter.report(RECORD)
    reporter.close()
    assert list(tmp_path.glob("events.out.tfevents.*"))
