"""Counted operations are those that torch runs; speeds follow from them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig

from examples.dflash import cost
from examples.dflash.attention import sdpa_mask
from examples.dflash.config import PRESETS
from examples.dflash.drafter import Drafter
from examples.dflash.loss import block_loss
from examples.dflash.memory import drafter_config
from examples.dflash.pipeline import Topology
from examples.dflash.plan import read_target

from .models import VOCAB, packed_row, tiny_config, tiny_target
from .test_train import configuration

TOKENS, ANCHORS, BLOCK = 64, 12, 4
PRODUCTS = {"mm", "addmm", "bmm"}


def products(counter):
    """Operations of plain matrix products: all but attention's."""
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if str(operation).split(".")[-1] in PRODUCTS)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_drafter_flops_are_the_matrix_products_that_torch_runs(tmp_path, checkpointing):
    config = configuration(tmp_path, gradient_checkpointing=checkpointing)
    shape = tiny_config(block_size=BLOCK, num_layers=3)
    drafter = Drafter(shape, gradient_checkpointing=checkpointing)
    batch = packed_row((30, 34), TOKENS, ANCHORS, BLOCK)
    mask = sdpa_mask(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK)
    features, blocks = torch.randn(TOKENS, 64), torch.randn(ANCHORS, BLOCK, 32)
    labels = torch.zeros(ANCHORS, BLOCK - 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        hidden = drafter(features, blocks, batch["positions"], torch.zeros(ANCHORS, BLOCK), mask)
        block_loss(
            hidden, torch.randn(VOCAB, 32), labels, torch.ones(ANCHORS, BLOCK - 1), chunk=36
        ).weighted_sum.backward()
    flops = cost.drafter_flops(config, shape, 32.0)
    attention = flops.parts["attention"]
    again = flops.recomputed - attention / 6 - (attention / 3 if checkpointing else 0)
    assert products(counter) == flops.useful - attention + again
    assert (again > 0) == checkpointing


def test_drafter_attention_is_over_visible_keys_alone(tmp_path):
    config, shape = configuration(tmp_path), tiny_config(block_size=BLOCK, num_layers=2)
    width = shape.num_heads * shape.head_dim
    pairs = ANCHORS * BLOCK * (32 / 2 + BLOCK)
    assert cost.drafter_flops(config, shape, 32.0).parts["attention"] == 12 * pairs * width * 2
    sliding = dataclasses.replace(shape, sliding_window=6, num_full_layers=1)
    half = ANCHORS * BLOCK * (6 + (BLOCK + 1) / 2)
    assert cost.drafter_flops(config, sliding, 32.0).parts["attention"] == 12 * (pairs + half) * width


def test_target_flops_are_the_matrix_products_that_torch_runs(tmp_path):
    target, batch = tiny_target(), packed_row((30, 34), TOKENS, ANCHORS, BLOCK)
    target.drop_layers_after(3)
    with FlopCounterMode(display=False) as counter:
        target.features(batch["tokens"], batch["document_ids"], batch["positions"], (1, 3))
    config = configuration(tmp_path)
    flops = cost.target_flops(config, target.shape, 4, 32.0)
    assert products(counter) == flops.parts["layers"]
    assert flops.parts["attention"] == 4 * TOKENS * 64 * (33 / 2) * 4
    assert "head" not in flops.parts
    labelled = dataclasses.replace(config, labels="target")
    assert cost.target_flops(labelled, target.shape, 4, 32.0).parts["head"] == 2 * TOKENS * 32 * VOCAB
    assert cost.num_target_layers(config, tiny_config()) == 4
    assert cost.num_target_layers(labelled, tiny_config()) == 6


def test_matrices_of_a_dense_target_are_those_of_its_shape_and_of_experts_only_the_chosen_count(tmp_path):
    tiny_target().model.config.save_pretrained(tmp_path / "dense")
    facts = read_target(configuration(tmp_path, target=str(tmp_path / "dense")))
    config = configuration(tmp_path)
    assert cost.target_flops(config, facts.shape, 4, 32.0, facts.layer_parameters) == cost.target_flops(
        config, facts.shape, 4, 32.0
    )
    experts = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    experts.save_pretrained(tmp_path / "experts")
    facts = read_target(configuration(tmp_path, target=str(tmp_path / "experts")))
    attention = 32 * (64 + 2 * 32 + 64)
    assert facts.layer_parameters == attention + 32 * 8 + 2 * 3 * 32 * 24


def test_flops_of_a_qwen3_8b_drafter_are_those_worked_out_by_hand():
    config = PRESETS["qwen3-8b"]
    shape = read_target(config).shape
    flops = cost.drafter_flops(config, drafter_config(config, shape), 1024.0)
    slots, layer = 1536 * 16, 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert flops.parts["layers over block slots"] == 6 * slots * layer * 5
    assert flops.parts["fc"] == 4 * 49152 * 5 * 4096 * 4096
    assert flops.parts["frozen head"] == 4 * 1536 * 15 * 4096 * 151936
    assert flops.useful == pytest.approx(231.7e12, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peak_is_that_of_the_device_and_of_no_namesake(name, teraflops):
    assert cost.peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def devices(targets, drafters):
    return Topology(
        tuple(torch.device("cuda", index) for index in targets),
        tuple(torch.device("cuda", index) for index in drafters),
    )


def test_speed_is_bounded_by_the_busiest_side():
    speed = cost.Speed(devices((0, 1, 2), (3,)), (0.6, 0.6, 0.6), (0.5,))
    assert speed.bottleneck == "drafters"
    assert speed.batches_per_s == pytest.approx(2.0)
    assert speed.drafters_busy == pytest.approx(1.0)
    assert speed.targets_busy == pytest.approx(0.4)
    speed = cost.Speed(devices((0,), (1,)), (0.6,), (0.5,))
    assert speed.bottleneck == "targets"
    assert speed.drafters_busy == pytest.approx(5 / 6)


def test_speed_of_a_device_that_does_both_adds_its_work():
    speed = cost.Speed(devices((0,), (0,)), (0.9,), (0.1,))
    assert speed.bottleneck == "devices that do both"
    assert speed.batches_per_s == pytest.approx(1.0)
    assert (speed.targets_busy, speed.drafters_busy) == (pytest.approx(0.9), pytest.approx(0.1))
    assert speed.gain_of_two == pytest.approx(1 / 0.9)


def test_best_split_gives_each_side_devices_by_its_work():
    assert cost.Speed(devices((0,), (1,)), (3.0,), (1.0,)).best_split(8) == (6, 2)
    assert cost.Speed(devices((0,), (1,)), (1.0,), (3.0,)).best_split(8) == (2, 6)
    assert cost.Speed(devices((0,), (1,)), (1.0,), (1.0,)).best_split(2) == (1, 1)


def test_speed_takes_work_over_peak_and_a_launch_at_least_and_is_unknown_for_unknown_devices():
    target, step = cost.Flops({"layers": 55e12}), cost.Flops({"attention": 9e12, "fc": 36e12}, recomputed=1.5e12)
    pair = devices((0,), (1,))
    speed = cost.speed(pair, target, step, 4, lambda device: 100e12)
    assert speed.target_s == (pytest.approx(1.0),)
    assert speed.drafter_s == (pytest.approx(1.0),)  # attention's scores are in the assumed share
    small = cost.speed(pair, cost.Flops({"layers": 1.0}), step, 4, lambda device: 100e12)
    assert small.target_s == (pytest.approx(4 * cost.HOST_S_A_TARGET_LAYER),)
    assert cost.speed(pair, target, step, 4, lambda device: None) is None
