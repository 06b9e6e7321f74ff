"""One process with as many targets and drafters as a host of eight devices has, and the benchmark of such."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_topology, compile_at_once, pipeline_runs
from benchmarks.bench_topology import Split
from examples.dflash import batches as packing
from examples.dflash.features import FeatureSource
from examples.dflash.trainer import Trainer

from .models import MASK_TOKEN, tiny_target
from .runs import Run, losses, read_log, settings, weights
from .test_train import configuration, documents

CPU = torch.device("cpu")
NUM_DOCUMENTS = 24  # of train_tiny
NUM_STEPS = 10


def of_split(out, num_targets, num_drafters, **changes):
    devices = dict(targets=("cpu",) * num_targets, drafters=("cpu",) * num_drafters)
    return settings(out, **{"max_steps": NUM_STEPS, "save_every": None, "num_validation": 0, **devices, **changes})


class Watch:
    """Keeps what each drafter of a child was given, and its weights at the end, in a file each."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, rank):
        call, finish, taken = Trainer.__call__, Trainer.finish, {}

        def watched(trainer, batch):
            taken.setdefault(trainer.number, []).append(batch["tokens"].tolist())
            call(trainer, batch)

        def kept(trainer):
            finish(trainer)
            found = {"tokens": taken[trainer.number], "weights": trainer.step.drafter.state_dict()}
            torch.save(found, self.directory / f"{trainer.number}.pt")

        Trainer.__call__, Trainer.finish = watched, kept


@pytest.mark.parametrize(
    ("num_targets", "num_drafters", "step"),
    [(6, 2, "eager"), (6, 2, "graph"), (7, 1, "eager"), (5, 3, "eager"), (4, 4, "eager")],
)
def test_train_on_eight_devices_goes_in_order_and_all_replicas_end_equal(tmp_path, num_targets, num_drafters, step):
    config = of_split(tmp_path / "run", num_targets, num_drafters, step=step)
    run = Run(config, before=Watch(tmp_path))
    assert run.wait(40) == [0], run.said()
    replicas = [torch.load(tmp_path / f"{number}.pt") for number in range(num_drafters)]
    read = itertools.chain.from_iterable(
        packing.batches(documents(NUM_DOCUMENTS), config, epoch) for epoch in itertools.count()
    )
    expected = [batch["tokens"].tolist() for batch in itertools.islice(read, NUM_STEPS * num_drafters)]
    for number, replica in enumerate(replicas):
        assert replica["tokens"] == expected[number::num_drafters]
    saved = weights(config)
    for replica in replicas:
        assert replica["weights"].keys() == saved.keys()
        assert all(torch.equal(replica["weights"][name], saved[name]) for name in saved)
    last = [record for record in read_log(config) if "event" not in record][-1]
    assert last["step"] == NUM_STEPS
    assert {f"batches-{number}" for number in range(num_targets)} < last["rings"].keys()


class FailTarget:
    """An error in the target of that number, at its call of that number."""

    def __init__(self, number, num_calls, note):
        self.number, self.num_calls, self.note = number, num_calls, note

    def __call__(self, rank):
        call, calls = FeatureSource.__call__, []

        def failing(source, batch):
            if threading.current_thread().name == f"target-{self.number}":
                calls.append(1)
                if len(calls) == self.num_calls:
                    self.note.write_text(str(time.time()))
                    raise ZeroDivisionError("planted in a target")
            return call(source, batch)

        FeatureSource.__call__ = failing


def test_a_target_of_six_that_fails_ends_the_run_with_its_error_alone_and_the_run_goes_on_later(tmp_path):
    config, whole = (of_split(tmp_path / name, 6, 2, max_steps=16, save_every=4) for name in ("run", "whole"))
    run = Run(config, before=FailTarget(4, 4, tmp_path / "failed"))  # its fourth batch is of step 12
    assert run.wait(40) == [2], run.said()
    assert time.time() - float((tmp_path / "failed").read_text()) < 10  # no thread had to be given up
    errors = [line for line in run.said().splitlines() if "error" in line.lower()]
    assert errors == ["error ZeroDivisionError: planted in a target"]
    steps = [int(path.name.removeprefix("step-")) for path in config.checkpoints_path.glob("step-*")]
    assert steps and max(steps) < 12
    again = Run(config)
    assert again.wait(40) == [0], again.said()
    assert [r["step"] for r in read_log(config) if r.get("event") == "resume"] == [max(steps)]
    assert Run(whole).wait(40) == [0]
    assert losses(config)[16] == losses(whole)[16]
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(config).items())


@pytest.fixture
def tiny(tmp_path):
    """The options of a tiny random target."""
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    shape = ["--token-budget", "128", "--num-anchors", "8", "--block-size", "4", "--num-features", "2"]
    layers = ["--num-layers", "1", "--mask-token-id", str(MASK_TOKEN), "--loss-chunk", "64"]
    steps = ["--steps", "16", "--warmup", "6", "--log-every", "2", "--seconds-limit", "100"]
    return ["--preset", "demo", "--target", f"random:{tmp_path / 'target'}", *shape, *layers, *steps]


def main(monkeypatch, capsys, options):
    """The command's exit status, what it printed, and its last line."""
    monkeypatch.setattr(sys, "argv", ["bench_topology", *options])
    status = bench_topology.main()
    out = capsys.readouterr().out
    return status, out, json.loads(out.strip().splitlines()[-1])


def test_bench_topology_gives_whole_figures(tmp_path, tiny, monkeypatch, capsys):
    places = ["--out", str(tmp_path / "runs"), "--record", str(tmp_path / "record.json")]
    options = [*tiny, "--device", "cpu", "--topologies", "2+1", "--ways", "eager", "graph", *places]
    status, out, found = main(monkeypatch, capsys, options)
    assert status == 0, out
    assert json.loads((tmp_path / "record.json").read_text()) == found
    assert "they agree" in out and found["failed"] == [] and found["skipped"] == {}
    assert found["agreement"]["2+1"]["losses_agree"]
    assert found["versions"]["torch"] == torch.__version__ and "cores" in found["devices"]["cpu"]
    results = found["topologies"]["2+1"]
    assert set(results) == {"eager", "graph"}
    for result in results.values():
        assert (result["status"], result["last_step"], result["num_readings"]) == (0, 16, 5)
        low, high = result["quartiles"]
        assert 0 < low <= result["tokens_per_s"] <= high
        assert result["tokens_per_s_a_device"] == pytest.approx(result["tokens_per_s"] / 3)
        assert 0 < result["drafter_busy"] <= 1 and 0 < result["device_busy"]["target"] <= 1
        assert 0 < result["waits"]["reader"]["room"] <= 1
        assert set(result["rings"]) == {"batches-0", "batches-1", "features-0-0", "features-1-0"}
        times = result["starts_s"]
        assert 0 < times["loaded"] < times["ready"] < times["first_step"] < result["wall_s"]
        assert set(times["threads"]) == {"target-0", "target-1", "drafter-0"}
        assert all(when >= times["first_step"] for when in times["threads"].values())
        assert result["memory"]["peak_gib"]["cpu"] > 0 and result["memory"]["flat"]
    assert results["graph"]["captures"] > 0 and results["eager"]["captures"] == 0


def reading(step, loss=1.0, device_busy=0.5, reserved=2**30):
    threads = {f"target-{number}": {"device_busy": device_busy} for number in range(6)}
    threads |= {f"drafter-{number}": {"device_busy": 0.5} for number in range(2)}
    used = {"allocated_bytes": 2**28, "peak_bytes": 2**29}
    counts = {"drafter_busy": 0.75, "captures": 0, "compiles": 0, "recompiles": 0}
    none, waited = dict.fromkeys(("produce_wait_s", "consume_wait_s"), 0.0), {"produce_wait_s": 0.5 * step}
    rings = {f"batches-{target}": {**none, "consume_wait_s": 0.1 * step} for target in range(6)}
    rings |= {f"features-{target}-{target % 2}": {**none, **waited} for target in range(6)}
    contexts = {name: {"wait_s": 0.25 * step if name == "drafter-1" else 0.0} for name in ("reader", *threads)}
    return {
        "step": step,
        "loss": loss,
        "tokens_per_s": 80.0 * step,
        "time": 100.0 + step,
        "elapsed_s": step + 0.5,
        "threads": {"reader": {}, **threads},
        "memory": {"cpu": used, "cuda:0": {**used, "reserved_bytes": reserved}},
        "rings": rings,
        "contexts": contexts,
        **counts,
    }


def fake_run(losses_of, **changes):
    def run(way, options, out, seconds, environment):
        start = {"event": "start", "time": 99.0, "versions": {"torch": "2"}, "devices": {"cpu": "a processor"}}
        records = [start, *(reading(k, losses_of[way]) for k in (1, 10, 20, 30))]
        return {"began": 90.0, "wall_s": 9.0, "status": 0, "records": records, **changes}

    return run


@pytest.mark.parametrize(("graph", "status"), [(1.001, 0), (1.01, 1), (None, 1)])
def test_bench_topology_fails_when_losses_of_ways_differ(tmp_path, tiny, monkeypatch, capsys, graph, status):
    monkeypatch.setattr(pipeline_runs, "run", fake_run({"eager": 1.0, "graph": graph}))
    options = [*tiny, "--device", "cpu", "--ways", "eager", "graph", "--topologies", "6+2", "4+4"]
    found = main(monkeypatch, capsys, options)
    assert found[0] == status
    assert ("DO NOT AGREE" in found[1]) == bool(status)
    assert [agreed["losses_agree"] for agreed in found[2]["agreement"].values()] == [not status] * 2


def test_bench_topology_keeps_what_a_run_measured_that_was_stopped(tmp_path, tiny, monkeypatch, capsys):
    stopped = fake_run({"eager": 1.0}, status=None, error="not done after 9 s")
    monkeypatch.setattr(pipeline_runs, "run", stopped)
    status, out, found = main(monkeypatch, capsys, [*tiny, "--device", "cpu", "--ways", "eager"])
    assert status == 1 and found["failed"] == ["6+2 eager"]
    assert "stopped" in out and "failed at step 30: not done after 9 s" in out
    result = found["topologies"]["6+2"]["eager"]
    assert result["tokens_per_s"] == 1600.0 and result["tokens_per_s_a_device"] == 200.0
    assert result["waits"]["target"] == pytest.approx({"input": 0.1, "room": 0.5, "gate": 0.0})
    assert result["waits"]["drafter"] == pytest.approx({"input": 0.0, "gate": 0.125})
    assert result["waits"]["reader"]["room"] == 0.0


def test_bench_topology_says_why_it_skips(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(pipeline_runs, "run", fake_run({"eager": 1.0}))
    options = [*tiny, "--ways", "eager", "--topologies"]
    status, out, found = main(monkeypatch, capsys, [*options, "6+2", "7+1"])
    assert status == 1 and found["topologies"] == {}
    assert "7+1       skipped: needs 8 CUDA devices, and 3 are here" in out
    assert set(found["skipped"]) == {"6+2", "7+1"}
    status, _, found = main(monkeypatch, capsys, [*options, "6+2", "2+1"])
    assert status == 0 and set(found["topologies"]) == {"2+1"} and set(found["skipped"]) == {"6+2"}


def test_bench_topology_puts_targets_first_and_drafters_after():
    assert Split.parse("2+1").options("cuda") == ["--targets", "cuda:0,cuda:1", "--drafters", "cuda:2"]
    assert Split.parse("1+2").options("cpu") == ["--targets", "cpu", "--drafters", "cpu,cpu"]
    with pytest.raises(SystemExit):
        bench_topology.parse(["--topologies", "6-2"])


def test_bench_topology_finds_memory_that_grows_after_step_ten():
    steady = [reading(1, reserved=2**20), reading(10), reading(20), reading(30)]
    assert bench_topology.memory(steady)["flat"] is True
    grown = bench_topology.memory([*steady, reading(40, reserved=2**30 + 2**23)])
    assert grown["flat"] is False and grown["grown_bytes"] == {"cpu": 0, "cuda:0": 2**23}
    assert bench_topology.memory(steady[:2])["flat"] is None


def test_bench_topology_notes_when_each_thread_was_first_seen_at_work():
    found = bench_topology.starts(
        [{"event": "start", "time": 95.0}, reading(1, device_busy=0.0), reading(10)], began=90.0
    )
    assert (found["loaded"], found["ready"], found["first_step"]) == (5.0, 9.5, 11.0)
    assert found["threads"]["drafter-1"] == 11.0 and found["threads"]["target-5"] == 20.0
    assert bench_topology.starts([], began=90.0)["first_step"] is None


def test_a_command_that_hangs_is_ended_at_its_limit_with_the_stacks_of_its_threads(tmp_path):
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    began = time.monotonic()
    status, said = pipeline_runs.run_limited([sys.executable, "-c", code], tmp_path / "log", 1.0)
    assert status is None and time.monotonic() - began < 15
    assert "Fatal Python error: Aborted" in said and 'File "<string>", line 3' in said
    child = Path("/proc") / (tmp_path / "log.log").read_text().strip()
    deadline = time.monotonic() + 5
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline, "what it had started is still there"
        time.sleep(0.01)


def test_runs_are_of_this_trees_code(tmp_path):
    code = "import graphsafe, examples; print(graphsafe.__file__, *examples.__path__)"
    _, said = pipeline_runs.run_limited([sys.executable, "-c", code], tmp_path / "log", 60.0)
    root = Path(__file__).parents[2]
    assert set(said.split()) == {str(root / "src" / "graphsafe" / "__init__.py"), str(root / "examples")}


def test_first_steps_of_threads_that_begin_together_have_one_loss(tmp_path, tiny):
    target = tiny[tiny.index("--target") + 1]
    config = configuration(tmp_path, target=target, step="eager")
    found = compile_at_once.first_steps(config, [CPU] * 3)
    assert len(found["losses"]) == 3 and len(set(found["losses"])) == 1 and found["losses"][0] > 1
    assert 0 < max(found["threads_s"]) <= found["s"]


@pytest.mark.parametrize(("loss", "fails"), [(2.0, False), (2.1, True)])
def test_compile_at_once_gives_the_ratio_and_compares_losses(tmp_path, monkeypatch, loss, fails):
    seconds = {1: 4.0, 8: 6.0}

    def child(count, *args):
        return {"s": seconds[count], "losses": [2.0] * (count - 1) + [loss if count > 1 else 2.0], "dtype": "float32"}

    monkeypatch.setattr(compile_at_once, "_in_child", child)
    found = compile_at_once.compile_at_once(8, "cpu", [], tmp_path, 9.0)
    assert found["ratio"] == 1.5 and ("error" in found) == fails


def test_compile_at_once_says_what_failed(tmp_path):
    found = compile_at_once.compile_at_once(2, "cpu", ["--preset", "none"], tmp_path, 60.0)
    assert "--preset is 'none'" in found["error"]
