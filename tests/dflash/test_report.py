from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from examples.dflash import __main__ as command_line
from examples.dflash.history import History
from examples.dflash.report import report, summary

from .test_train import configuration, run

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def reading(step, **changes):
    shares = {"busy": 0.25, "wait_input": 0.75, "wait_room": 0.0, "wait_gate": 0.0}
    record = {
        "step": step,
        "loss": 6.0 - step / 100,
        "acceptance": 1 + step / 100,
        "slot_accuracy": [0.5 + step / 1000, step / 1000],
        "tokens_per_s": 10.0 if step == 10 else 1000.0 + step,
        "elapsed_s": 2.0 * step,
        "threads": {"reader": dict(shares), "drafter-0": {**shares, "device_busy": 0.5}},
        "memory": {
            "cpu": {"allocated_bytes": GIB, "peak_bytes": 2 * GIB},
            "cuda:0": {"allocated_bytes": 3 * GIB, "peak_bytes": (4 + step / 100) * GIB, "reserved_bytes": 8 * GIB},
        },
        "captures": 3,
        "replays": step,
        "compiles": 4,
        "recompiles": 0,
    }
    return {**record, **changes}


def start(**changes):
    described = {"config": {"target": "tiny", "block_size": 3}, "devices": {"cpu": "two cores", "cuda:0": "a GPU"}}
    return {"event": "start", "step": 0, "num_steps": 200, "targets": ["cuda:0"], "drafters": ["cuda:0"], **described}


def validation(step, acceptance, loss=5.0):
    return {"event": "validation", "step": step, "acceptance": acceptance, "loss": loss, "slot_accuracy": [0.5, 0.4]}


RUN = [
    start(),
    *(reading(step) for step in range(10, 101, 10)),
    validation(50, 1.25),
    validation(100, 1.75),
    {"event": "end", "step": 100},
]


def rows_of(records, evaluation=None):
    return dict(summary(History.of(records), evaluation))


def drawn(records, name="runs/x"):
    pytest.importorskip("matplotlib")
    from examples.dflash.figure import figure

    picture = figure(History.of(records), name)
    panels = {axes.get_title(loc="left"): axes for axes in picture.axes}
    return picture, panels


def line(axes, label):
    return next(
        (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines() if line.get_label() == label
    )


def written(directory, records, torn=""):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def test_history_drops_steps_that_were_trained_again():
    first = [start(), *(reading(step, loss=1.0) for step in (10, 20, 30, 40)), validation(40, 2.0)]
    again = [{"event": "resume", "step": 20}, *(reading(step, loss=2.0, elapsed_s=step - 20.0) for step in (30, 40))]
    history = History.of([*first, *again])
    assert history.series("loss") == ([10, 20, 30, 40], [1.0, 1.0, 2.0, 2.0])
    assert history.validation("acceptance") == ([], [])
    assert history.resumed == [20]
    assert history.seconds == 80 + 20  # of both attempts


def test_history_sees_a_run_that_began_again_without_a_word():
    records = [reading(step, loss=1.0) for step in (10, 20, 30)] + [reading(20, loss=2.0, elapsed_s=1.0)]
    history = History.of(records)
    assert history.series("loss") == ([10, 20], [1.0, 2.0])
    assert history.seconds == 60 + 1


def test_history_skips_what_is_not_there():
    history = History.of(
        [reading(10), {"step": 20}, {"loss": 3.0}, reading(30, loss=None, memory=None), {"event": "x"}]
    )
    assert history.series("loss") == ([10], [5.9])
    assert history.series("memory", "cuda:0", "reserved_bytes") == ([10], [8 * GIB])
    assert [record["step"] for record in history.readings] == [10, 20, 30]


def test_history_shares_are_weighted_by_the_time_of_each_reading():
    def busy(step, elapsed_s, share):
        return reading(step, elapsed_s=elapsed_s, threads={"drafter-0": {"busy": share}})

    history = History.of([busy(1, 50.0, 0.0), busy(2, 60.0, 1.0), busy(3, 90.0, 0.2)])  # the first one is warm-up
    assert history.shares()["drafter-0"]["busy"] == pytest.approx((10 * 1.0 + 30 * 0.2) / 40)


def test_summary_has_the_numbers_of_the_run():
    rows = rows_of(RUN)
    assert rows["training"] == "100 of 200 steps in 3 min 20 s"
    assert rows["loss"] == "5.000 at the end, 5.000 at best"
    assert rows["acceptance length"] == "2.00 at the end, 2.00 at best (step 100)"
    assert rows["validation"] == "1.75 at the end, 1.75 at best (step 100)"
    assert rows["accuracy by slot"] == "60% 10%"
    assert rows["throughput"] == "1,060 tokens/s (median after the warm-up)"
    assert rows["drafter-0"] == "busy 25%, device 50%; waited 75% for input"
    assert rows["memory on cuda:0"] == "5.00 GiB at most"
    assert rows["memory of the process"] == "2.00 GiB at most"
    assert rows["graphs"] == "3 captures, 100 replays, 4 compiles"
    assert rows["recompiles"] == "none"
    assert "error" not in rows and "evaluate" not in rows


def test_summary_tells_best_values_recompiles_and_how_the_run_ended():
    records = [
        start(),
        *(reading(step, acceptance=3.0 - abs(step - 30) / 10) for step in (10, 20, 30, 40)),
        {"event": "recompile", "step": 40, "function": "loss_fn", "reasons": ["tensor 'x' size mismatch"]},
        {"event": "error", "step": 40, "kind": "OSError", "text": "disk full"},
    ]
    rows = rows_of(records)
    assert rows["acceptance length"] == "2.00 at the end, 3.00 at best (step 30)"
    assert rows["recompiles"] == "1 after the warm-up; loss_fn at step 40: tensor 'x' size mismatch"
    assert rows["error"] == "OSError at step 40: disk full"
    assert rows["training"].endswith(", not ended")
    assert rows_of([*records, {"event": "stop", "step": 40}])["training"].endswith(", stopped early")
    assert "resumed after step 40" in rows_of([*records, {"event": "resume", "step": 40}])["training"]
    assert rows_of([*records[:-2], reading(50, recompiles=2)])["recompiles"] == "2 after the warm-up"


def test_summary_has_what_evaluate_found():
    evaluation = {
        "passed": True,
        "lossless": True,
        "acceptance": 2.25,
        "target_alone": {"seconds": 8.0},
        "drafter": {"all": {"acceptance": 2.25, "calls_saved": 0.5}, "seconds": 4.0},
        "prompt lookup": {"all": {"acceptance": 1.5, "calls_saved": 0.25}, "seconds": 6.0},
    }
    rows = rows_of(RUN, evaluation)
    assert rows["evaluate"] == "acceptance length 2.25, lossless; passed"
    assert rows["  drafter"] == "acceptance length 2.25, 50.0% of target calls saved, 4.0 s"
    assert rows["  prompt lookup"] == "acceptance length 1.50, 25.0% of target calls saved, 6.0 s"
    assert rows["  target alone"] == "8.0 s"
    failed = rows_of(RUN, {"acceptance": 1.0, "lossless": False, "passed": False})
    assert failed["evaluate"] == "acceptance length 1.00, NOT lossless; failed"


def test_figure_has_a_panel_for_each_question_with_the_runs_numbers():
    picture, panels = drawn(RUN)
    steps = list(range(10, 101, 10))
    assert tuple(picture.get_size_inches() * picture.dpi) == (1600, 1000)
    assert "runs/x" in picture.get_suptitle() and "target tiny" in picture.get_suptitle()
    assert "a GPU" in picture.get_suptitle()
    assert line(panels["Loss"], "training") == (steps, [6.0 - step / 100 for step in steps])
    assert line(panels["Loss"], "validation") == ([50, 100], [5.0, 5.0])
    assert line(panels["Acceptance length"], "validation") == ([50, 100], [1.25, 1.75])
    assert line(panels["Acceptance length"], "best: 1.75 at step 100") == ([100], [1.75])
    assert line(panels["Accuracy by drafted slot"], "slot 2") == (steps, [step / 1000 for step in steps])
    assert line(panels["Throughput"], "readings") == (steps, [record["tokens_per_s"] for record in RUN[1:11]])
    assert line(panels["Throughput"], "median after the warm-up: 1,060")[1] == [1060, 1060]
    assert line(panels["Memory"], "cuda:0, peak") == (steps, [4 + step / 100 for step in steps])
    assert line(panels["Memory"], "process, in use")[1] == [1.0] * 10
    assert panels["Memory"].get_ylabel() == "GiB" and panels["Loss"].get_xlabel() == "step"


def test_figure_stacks_each_threads_shares():
    _, panels = drawn(RUN)
    axes = panels["Where the time went"]
    bars = {bar.get_label(): [(b.get_x(), b.get_width()) for b in bar] for bar in axes.containers}
    assert bars["busy"] == [(0, 0.25), (0, 0.25)]
    assert bars["waits for input"] == [(0.25, 0.75), (0.25, 0.75)]
    assert bars["its device is busy"] == [(0, 0.5)]
    assert "waits for room" not in bars  # nobody did
    assert [label.get_text() for label in axes.get_yticklabels()] == ["reader", "drafter-0"]


def test_figure_marks_where_the_run_was_resumed():
    records = [*RUN[:6], {"event": "resume", "step": 50}, *RUN[6:11]]
    _, panels = drawn(records)
    assert all(line(panels[name], "resumed")[0] == [50, 50] for name in ("Loss", "Throughput", "Memory"))


def test_figure_of_many_devices_shows_the_fullest():
    memory = {
        f"cuda:{number}": {"allocated_bytes": number * GIB, "peak_bytes": 10 * number * GIB} for number in range(4)
    }
    records = [start() | {"drafters": ["cuda:3"]}, *(reading(step, memory=memory) for step in (10, 20))]
    _, panels = drawn(records)
    axes = panels["Memory of the fullest devices"]
    assert line(axes, "targets, in use") == ([10, 20], [2.0, 2.0])
    assert line(axes, "drafters, peak") == ([10, 20], [30.0, 30.0])


def test_figure_smooths_many_readings_and_takes_a_loss_that_falls_far_on_a_logarithmic_axis():
    records = [reading(step, loss=60.0 if step == 1 else 3.0 + step % 2) for step in range(1, 201)]
    _, panels = drawn(records)
    smooth = line(panels["Loss"], "training")[1]
    assert smooth[0] == 60.0 and all(3.4 < loss < 3.6 for loss in smooth[50:150])
    assert panels["Loss"].get_yscale() == "log"
    assert drawn(RUN)[1]["Loss"].get_yscale() == "linear"


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1}],
        [reading(1)],
        [reading(1, slot_accuracy=[0.5])],
        [reading(1, slot_accuracy=[0.0] * 15, loss=0.0, tokens_per_s=0.0, threads={})],
        [reading(step, threads={f"target-{number}": {"busy": 1.0} for number in range(40)}) for step in (1, 2)],
        [{"event": "resume", "step": 5}, reading(6, memory={}, slot_accuracy=[None, 0.5])],
    ],
)
def test_figure_is_drawn_whatever_is_missing(records, tmp_path):
    picture, _ = drawn(records)
    picture.savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert summary(History.of(records))


def test_report_of_a_trained_run_draws_and_prints(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config = configuration(tmp_path, max_steps=20, log_every=2)
    run(config, num_drafters=2)
    with (config.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22, "lo')
    capsys.readouterr()
    assert report(config) == 0
    header = (config.out / "report.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:24]) == (1600, 1000)
    said = capsys.readouterr().out
    for text in ("20 of 20 steps", "acceptance length", "drafter-1", "target-0", "memory of the process", "report.png"):
        assert text in said, text
    assert "not ended" not in said


def test_report_command_leaves_what_it_reads_as_it_is(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written(tmp_path, RUN, torn='{"st')
    (tmp_path / "evaluation.json").write_text('{"acceptance": 2.0')  # torn too
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert command_line.main(["report", "--out", str(tmp_path)]) == 0
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(after) - set(before) == {"report.png"}
    assert all(after[name] == content for name, content in before.items())


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, r"Run train first"), ("", "holds no reading yet"), ('{"event": "start"}\n', "no reading")],
)
def test_report_says_what_is_missing(tmp_path, capsys, content, text):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert command_line.main(["report", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert text in said and "metrics.jsonl" in said


def test_report_without_matplotlib_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    written(tmp_path, RUN)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "examples.dflash.figure", raising=False)
    assert command_line.main(["report", "--out", str(tmp_path)]) == 2
    assert "pip install" in capsys.readouterr().err


def test_only_the_picture_imports_matplotlib():
    code = f"import sys; sys.path[:0] = {[str(ROOT / 'src'), str(ROOT)]!r}; import examples.dflash.report as _; "
    code += "sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
