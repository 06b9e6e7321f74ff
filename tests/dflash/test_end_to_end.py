"""Train on a target whose next token is known, then decode with the drafter: every part must agree with every other.

A label shifted by one, features of the wrong layer or place, a wrong position or mask, or a cache that is off by one in
decoding would each keep the acceptance length below the block size.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples.dflash.config import PRESETS
from examples.dflash.data import Document, Prompt
from examples.dflash.drafter import Drafter, load
from examples.dflash.evaluate import evaluate
from examples.dflash.pipeline import Topology
from examples.dflash.plan import drafter_config
from examples.dflash.speculate import ModelDrafting
from examples.dflash.step import COMPUTE_DTYPES
from examples.dflash.train import train_on

from .texts import counting_target

MODULUS, VOCABULARY, MASK_TOKEN = 12, 13, 12
BLOCK_SIZE = 4


def count_from(start, length):
    return [(start + place) % MODULUS for place in range(length)]


ALL_OPTIONS = dict(
    loss="dpace",
    labels="target",
    schedule="wsd",
    num_layers=2,
    sliding_window=5,
    gradient_checkpointing=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_drafter_trained_on_a_counting_target_reaches_the_block_size(tmp_path, options):
    cpu = torch.device("cpu")
    config = dataclasses.replace(
        PRESETS["demo"],
        out=tmp_path,
        num_held_out=0,
        token_budget=96,
        num_anchors=24,
        loss_chunk=48,
        block_size=BLOCK_SIZE,
        num_features=2,
        intermediate_size=32,
        mask_token_id=MASK_TOKEN,
        lr=5e-3,
        epochs=1000,
        max_steps=60,
        max_new_tokens=1 + 5 * BLOCK_SIZE,
        min_acceptance=float(BLOCK_SIZE),
        **{"num_layers": 1, **options},
    )
    target = counting_target(MODULUS, VOCABULARY)
    shape = drafter_config(config, target.shape)
    target.model.to(COMPUTE_DTYPES[config.dtype])
    documents = [
        Document(number, count_from(number, 31), [place >= 2 + number % 4 for place in range(31)], 2 + number % 4)
        for number in range(24)
    ]
    prompts = [Prompt(number, number + 1, count_from(5 * number, 2 + number % 4)) for number in range(6)]

    untrained = Drafter(shape)
    before = evaluate(
        counting_target(MODULUS, VOCABULARY), lambda lane: ModelDrafting(untrained, lane), prompts, config
    )
    assert before.acceptance < 2
    assert train_on(documents, {cpu: target}, shape, config, Topology((cpu,), (cpu,))) == 0
    drafter = load(config.drafter_path, cpu)
    after = evaluate(counting_target(MODULUS, VOCABULARY), lambda lane: ModelDrafting(drafter, lane), prompts, config)
    assert after.acceptance == BLOCK_SIZE
    assert after.passed
