"""The benchmark of topologies on two GPUs, and first steps of threads that compile on both at once."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import bench_topology, compile_at_once
from tests.dflash.models import MASK_TOKEN, tiny_target
from tests.dflash.test_train import configuration

pytestmark = pytest.mark.cuda


@pytest.fixture
def target(tmp_path):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    return f"random:{tmp_path / 'target'}"


@pytest.mark.two_gpus
@pytest.mark.slow
def test_bench_topology_measures_a_target_and_a_drafter_on_a_gpu_each(tmp_path, target, monkeypatch, capsys):
    options = ["--preset", "demo", "--target", target, "--topologies", "1+1", "99+1", "--ways", "eager", "graph"]
    options += ["--token-budget", "128", "--num-anchors", "8", "--block-size", "4", "--num-features", "2"]
    options += ["--num-layers", "1", "--mask-token-id", str(MASK_TOKEN), "--loss-chunk", "64"]
    options += ["--steps", "40", "--warmup", "20", "--log-every", "5", "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["bench_topology", *options])
    status = bench_topology.main()
    out = capsys.readouterr().out
    assert status == 0, out
    found = json.loads(out.strip().splitlines()[-1])
    assert set(found["skipped"]) == {"99+1"} and found["agreement"]["1+1"]["losses_agree"]
    for result in found["topologies"]["1+1"].values():
        assert set(result["memory"]["peak_gib"]) == {"cpu", "cuda:0", "cuda:1"}
        assert result["memory"]["flat"], result["memory"]
        assert result["recompiles"] == 0 and result["tokens_per_s"] > 0
        assert all(when is not None for when in result["starts_s"]["threads"].values())
    assert found["topologies"]["1+1"]["graph"]["captures"] > 0


@pytest.mark.slow
def test_first_steps_of_threads_that_compile_at_once_have_one_loss(tmp_path, target):
    config = configuration(tmp_path, target=target, step="compile")
    devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(4)]
    found = compile_at_once.first_steps(config, devices)
    assert found["losses"] == pytest.approx([found["losses"][0]] * 4, rel=2e-3)
    assert 0 < max(found["threads_s"]) <= found["s"]
