"""The drafter's step under its options: losses, labels, sliding layers and checkpointing, alone and together."""

from __future__ import annotations

import pytest
import torch

import graphsafe
from examples.dflash.drafter import Drafter
from examples.dflash.metrics import NUM_SCALARS
from examples.dflash.replicas import Replica
from examples.dflash.smoke import smoke
from examples.dflash.step import COMPUTE_DTYPES, DrafterStep, lr_share

from .models import packed_row, tiny_config, tiny_target
from .test_train import configuration

CPU = torch.device("cpu")
BLOCK = 4
VARIANTS = {
    "plain": {},
    "dpace": dict(loss="dpace"),
    "target labels": dict(labels="target"),
    "all": dict(loss="dpace", labels="target", sliding_window=6, num_layers=2, gradient_checkpointing=True),
}


def stepped(config, batches, seed=3):
    """Measurements of a drafter's steps on batches, its weights before, and the drafter."""
    target, dtype = tiny_target(), COMPUTE_DTYPES[config.dtype]
    model = Drafter(
        tiny_config(BLOCK, num_layers=config.num_layers, sliding_window=config.sliding_window),
        seed=seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with graphsafe.thread_context("cpu", seed=0):
        head, embedding = target.lm_head_weight, target.embed_tokens.weight
        replica = Replica(0, 1, CPU, None)
        step = DrafterStep(model, embedding.to(dtype), head.to(dtype), config, 100, replica)
        measured = []
        for batch in batches:
            row = (batch["tokens"], batch["document_ids"], batch["positions"])
            features, tokens = target.features_and_tokens(*row, (1, 3))
            measured.append(step({**batch, "features": features.to(dtype), "target_tokens": tokens}))
    return measured, before, model


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_step_on_padding_alone_measures_zero_and_trains_nothing(tmp_path, name, mode):
    config = configuration(tmp_path, step=mode, weight_decay=0.0, **VARIANTS[name])
    measured, before, model = stepped(config, [packed_row((), 16, 4, BLOCK)] * 2)
    assert all(each.eq(0).all() for each in measured)
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_step_moves_every_parameter_of_every_variant(tmp_path, name, dtype):
    changes = {"num_layers": 2, **VARIANTS[name]}
    config = configuration(tmp_path, step="eager", weight_decay=0.0, lr=1e-5, warmup_ratio=0.0, dtype=dtype, **changes)
    measured, before, model = stepped(config, [packed_row((19, 14), 40, 6, BLOCK)])
    assert measured[0].isfinite().all()
    for key, weight in model.state_dict().items():
        assert not torch.equal(weight, before[key]), key


def test_step_with_gradient_checkpointing_gives_the_same_weights_in_every_variant(tmp_path):
    for name, changes in VARIANTS.items():
        batches = [packed_row((19, 14), 40, 6, BLOCK, seed=seed) for seed in range(2)]
        weights = []
        for on in (False, True):
            config = configuration(tmp_path, step="graph", **{**changes, "gradient_checkpointing": on})
            weights.append(stepped(config, batches)[2].state_dict())
        assert all(torch.equal(weight, weights[1][key]) for key, weight in weights[0].items()), name


def test_smoke_with_all_options_finds_memory_flat(tmp_path):
    tiny_target().model.config.save_pretrained(tmp_path / "target")
    assert smoke(configuration(tmp_path, target=str(tmp_path / "target"), **VARIANTS["all"])) == 0


def test_step_smooths_dpace_as_the_configuration_says(tmp_path):
    batch = packed_row((19, 14), 40, 6, BLOCK)
    config = configuration(tmp_path, loss="dpace", dpace_smoothing=0.999)
    measured = stepped(config, [batch])[0][0].tolist()
    weight, totals = measured[1], measured[NUM_SCALARS + BLOCK - 1 :][: BLOCK - 1]
    # All slots count as reached, nearly, so that slot j weighs as many as come from it on.
    assert weight == pytest.approx(sum((slot + 1) * total for slot, total in enumerate(totals)), rel=5e-3)


def test_step_follows_the_schedule_of_the_configuration(tmp_path):
    changes = dict(lr=2.0, warmup_ratio=0.1, schedule="wsd", cooldown_ratio=0.4)
    config = configuration(tmp_path, **changes)
    target, rates = tiny_target(), []
    with graphsafe.thread_context("cpu", seed=0):
        head, embedding = target.lm_head_weight, target.embed_tokens.weight
        step = DrafterStep(Drafter(tiny_config(BLOCK)), embedding, head, config, 10, Replica(0, 1, CPU, None))
        batch = packed_row((), 16, 4, BLOCK) | {"features": torch.zeros(16, 64)}
        for _ in range(11):
            rates.append(step.lr)
            step(batch)
    assert rates == [2 * lr_share(number, 10, 0.1, "wsd", 0.4) for number in range(11)]
    assert rates[1:7] == [2.0] * 6 and rates[10] == 0.0
