"""The benchmarks of the example at tiny sizes: they run to their last line, and find what is wrong."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import bench_pipeline, bench_speculators, pipeline_runs
from examples.dflash.config import preset
from examples.dflash.loss import labels_and_weights

from .models import MASK_TOKEN, tiny_target

HAS_SPECULATORS = importlib.util.find_spec("speculators") is not None
TINY = ["--num-features", "2", "--num-layers", "1", "--mask-token-id", str(MASK_TOKEN), "--loss-chunk", "64"]


@pytest.fixture
def tiny(tmp_path):
    """The options of a tiny random target."""
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    shape = ["--token-budget", "128", "--num-anchors", "8", "--block-size", "4"]
    return ["--preset", "demo", "--target", f"random:{tmp_path / 'target'}", *shape, *TINY]


def last_line(module, options):
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done, json.loads(done.stdout.strip().splitlines()[-1])


def test_pipeline_runs_each_way_on_the_same_data_and_compares_losses(tmp_path, tiny):
    options = [*tiny, "--ways", "eager", "graph", "--steps", "16", "--warmup", "6", "--log-every", "2"]
    done, found = last_line("bench_pipeline", [*options, "--out", str(tmp_path / "runs")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph is " in done.stdout and "they agree" in done.stdout
    assert set(found["results"]) == {"eager", "graph"} and found["failed"] == []
    for way, result in found["results"].items():
        assert (tmp_path / "runs" / way / "metrics.jsonl").is_file()
        assert result["num_readings"] == 5 and result["slowest"] <= result["tokens_per_s"] <= result["fastest"]
        assert 0 < result["first_step_s"] < result["wall_s"]
        assert 0 < result["drafter_device_busy"] <= 1 and result["peak_gib"] > 0
    assert found["results"]["graph"]["captures"] > 0 and found["results"]["eager"]["captures"] == 0
    ratio = found["results"]["graph"]["tokens_per_s"] / found["results"]["eager"]["tokens_per_s"]
    assert found["times_as_fast_as_eager"]["graph"] == pytest.approx(ratio)
    assert len(set(found["results"]["eager"]["losses"].values())) > 1


def test_pipeline_says_why_a_way_failed(tmp_path, tiny, capsys):
    arguments, others = bench_pipeline.parse([*tiny, "--ways", "eager", "--steps", "4", "--attention", "flex"])
    found = bench_pipeline.measure(arguments, others, tmp_path / "runs")
    assert found["failed"] == ["eager"]
    assert "--attention flex trains on CUDA alone" in capsys.readouterr().out


def test_pipeline_finds_losses_that_do_not_agree():
    results = {"eager": {"losses": {1: 2.0, 2: 2.0}}, "graph": {"losses": {1: 2.0, 2: 2.2, 3: 9.0}}}
    assert pipeline_runs.losses_apart(results) == pytest.approx(0.1)
    assert not bench_pipeline.describe(results, "bfloat16")["losses_agree"]
    del results["graph"]["losses"][2]
    assert bench_pipeline.describe(results, "bfloat16")["losses_agree"]


def test_pipeline_finds_a_loss_that_is_not_a_number():
    results = {"eager": {"losses": {1: 2.0}}, "graph": {"losses": {1: math.nan}}}
    assert not bench_pipeline.describe(results, "bfloat16")["losses_agree"]
    results["graph"]["losses"][1] = None  # as metrics.jsonl has it
    assert not bench_pipeline.describe(results, "bfloat16")["losses_agree"]


def test_pipeline_takes_readings_after_the_warmup_alone():
    def reading(step, speed):
        threads = {"drafter-0": {"device_busy": 0.5}, "target-0": {"device_busy": 0.25}}
        more = {"threads": threads, "drafter_busy": 0.75, "memory_bytes": 2**30, "recompiles": 0, "captures": 1}
        return {"step": step, "tokens_per_s": speed, "time": 100.0 + step, "loss": 1.0, **more}

    records = [{"event": "start"}, *(reading(step, 10.0 * step) for step in (1, 2, 3, 4, 5))]
    found = bench_pipeline.summarize({"records": records, "began": 99.0, "wall_s": 9.0}, 2)
    assert (found["tokens_per_s"], found["slowest"], found["fastest"]) == (40.0, 30.0, 50.0)
    assert found["first_step_s"] == 2.0 and found["target_device_busy"] == 0.25
    assert "readings after the warm-up" in bench_pipeline.summarize({"records": records}, 4)["error"]


def test_speculators_is_skipped_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(bench_speculators.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_speculators"])
    assert bench_speculators.main() == 0
    assert "pip install --no-deps speculators==0.9.0" in capsys.readouterr().out


def test_speculators_work_has_blocks_that_end_with_their_document(tiny):
    config = bench_speculators.make_config(bench_speculators.parse([*tiny, "--token-budget", "1200"]))
    work = bench_speculators.make_work(config)
    batch, last = work.batch, work.batch["anchors"] + work.drafter.block_size - 1
    assert torch.equal(batch["document_ids"][last], batch["document_ids"][batch["anchors"]])
    assert len(batch["anchors"].unique()) == config.num_anchors
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    weights = labels_and_weights(*(batch[name] for name in names), block_size=4, decay=config.gamma)[1]
    assert bench_speculators.slot_mean_factor(work) == pytest.approx(weights.numel() / weights.sum().item())


def test_speculators_losses_that_differ_fail(capsys):
    config = bench_speculators.make_config(bench_speculators.parse(["--preset", "demo", "--dtype", "float32"]))
    assert config.labels == "target" and config.target == "random:" + preset("demo").target

    def side(loss, ms):
        return {"loss": loss, "ms": ms, "ready_s": 1.0}

    found = bench_speculators.compare(config, {"ours": side(2.0, 4.0), "theirs": side(2.1, 6.0)})
    assert found["times_as_fast"] == 1.5 and not found["losses_agree"]
    found = bench_speculators.compare(config, {"ours": side(2.0, 4.0), "theirs": side(2.0, 6.0)})
    assert found["losses_agree"]
    out = capsys.readouterr().out
    assert all(what in out for what, _, _ in bench_speculators.DIFFERENCES)


def test_stub_is_a_module_of_classes_and_only_for_what_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    assert bench_speculators.stub_missing(("json", "no_such_module_here")) == ["no_such_module_here"]
    from no_such_module_here.part import Thing

    assert isinstance(Thing, type)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_such_module")


@pytest.mark.skipif(not HAS_SPECULATORS, reason="speculators is not installed")
def test_speculators_gives_the_same_loss_for_equal_weights(tiny):
    done, found = last_line("bench_speculators", [*tiny, "--steps", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["losses_apart"] < 1e-5
