"""What measures the example on GPUs: the target's compiled pass, and smoke's times, memory and kernels."""

from __future__ import annotations

import json

import pytest
import torch
from torch._dynamo.utils import counters

import graphsafe
from examples.dflash.features import FeatureSource
from examples.dflash.smoke import smoke
from examples.dflash.target import Target

from ..dflash.models import packed_row, tiny_qwen3, tiny_target
from ..dflash.test_train import configuration
from .test_dflash import losses, run

pytestmark = pytest.mark.cuda
FIRST = torch.device("cuda:0")
IDS = (1, 3)


@pytest.fixture(autouse=True)
def fresh_compiles():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_compiled_pass_gives_the_eager_features_and_compiles_once(make, graphed):
    target = Target(make().model.to(FIRST, torch.bfloat16))
    batches = [packed_row(lengths, 256, 8, 4, seed=seed) for seed, lengths in enumerate([(200, 40), (90, 100, 66)])]
    with graphsafe.thread_context(FIRST):
        plain = FeatureSource(target, IDS)
        expected = [plain(batch)["features"].clone() for batch in batches]
        counters.clear()
        source = FeatureSource(target, IDS, graphed=graphed, compiled=True)
        ours = [source(batches[index % 2])["features"].clone() for index in range(8)]  # the graph's last six or so
    assert counters["frames"]["ok"] == 1
    for index, features in enumerate(ours):
        valid = int((batches[index % 2]["document_ids"] >= 0).sum())
        error = (features[:valid] - expected[index % 2][:valid]).float().norm() / expected[index % 2][
            :valid
        ].float().norm()
        assert error < 0.02, (index, error)


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_training_on_a_compiled_target_gives_the_losses_of_an_eager_one(tmp_path, mode):
    found = []
    for target_step in ("eager", "compile"):
        torch.compiler.reset()
        shape = dict(token_budget=128, num_anchors=32, loss_chunk=64)
        config = configuration(tmp_path / target_step, step=mode, target_step=target_step, **shape)
        found.append(losses(run(config, [FIRST], [FIRST])))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_smoke_times_steps_and_finds_the_kernels_of_each_kind(tmp_path, mode):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    devices = dict(targets=("cuda:0",), drafters=("cuda:0",))
    config = configuration(
        tmp_path,
        target=str(tmp_path / "target"),
        step=mode,
        dtype="bfloat16",
        profile=tmp_path / "trace.json",
        **devices,
    )
    assert smoke(config) == 0
    record = json.loads((config.out / "smoke.json").read_text())
    assert record["flat"] and len(record["step_ms"]) == config.smoke_steps
    assert record["tflop_per_s"] > 0 and record["memory"]["peak_reserved_bytes"] > 0
    kinds = record["kernels"]
    for kind in ("attention forward", "attention backward", "matrix products", "loss chunk", "optimizer and clipping"):
        assert kinds[kind]["ms"] > 0, kinds
    assert (tmp_path / "trace.json").stat().st_size > 0
