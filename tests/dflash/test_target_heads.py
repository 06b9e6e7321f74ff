"""Targets whose logits are more than the products of the head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

from examples.dflash import generate
from examples.dflash.config import InputError
from examples.dflash.decode import decode
from examples.dflash.target import Target

from .models import tiny_target
from .texts import CharTokenizer, conversation, tiny_run

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    initializer_range=0.3,
    eos_token_id=2,
)


def granite():
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0, embedding_multiplier=3.0))


def test_target_whose_head_has_a_bias_is_refused():
    with pytest.raises(InputError, match="head has a bias"):
        Target(PhiForCausalLM(PhiConfig(**SHAPE)))


def test_target_that_scales_its_logits_answers_greedily_as_its_model_does():
    model = granite()
    tokens = [5, 9, 13]
    expected = list(tokens)
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    target = Target(model)
    answer = decode(target, [tokens], 8).answers[0]
    assert answer == expected[3:][: len(answer)]
    assert not target.has_plain_logits
    assert tiny_target().has_plain_logits


@pytest.mark.parametrize("options", [dict(temperature=0.7), dict(num_samples=1)])
def test_answers_are_not_drawn_from_logits_that_the_target_scales(tmp_path, monkeypatch, options):
    def load(directory, device, dtype):
        return Target(granite(), CharTokenizer())

    monkeypatch.setattr(generate, "resolve_target", lambda name, say: tmp_path)
    monkeypatch.setattr(generate, "load_target", load)
    config = tiny_run(tmp_path, [conversation(f"number {number}") for number in range(5)])
    generate.main(config, say=lambda text: None)
    with pytest.raises(InputError, match="scales or caps its logits"):
        generate.main(dataclasses.replace(config, **options), say=lambda text: None)
