from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from examples.dflash.config import InputError
from examples.dflash.target import Target, load_target, packed_attention, target_layer_ids
from tests.helpers import run_threads

from .models import VOCAB, packed_row, tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

IDS = (1, 3, 4)


def features(target, batch, ids=IDS):
    return target.features(batch["tokens"], batch["document_ids"], batch["positions"], ids)


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 1, (18,)),
    ],
)
def test_target_layer_ids_are_those_of_published_drafters(num_layers, num_features, expected):
    assert target_layer_ids(num_layers, num_features) == expected


def test_target_layer_ids_refuse_a_target_with_too_few_layers():
    with pytest.raises(ValueError, match="--num-features"):
        target_layer_ids(6, 5)


def test_features_are_the_layers_outputs_side_by_side():
    target = tiny_target()
    batch = packed_row((17,), 17, 1, 4)
    states = target.model(batch["tokens"][None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in IDS], dim=-1)
    torch.testing.assert_close(features(target, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_features_of_packed_documents_equal_those_of_each_alone(family):
    target = tiny_target()
    if family == "qwen3":
        torch.manual_seed(0)
        target = Target(
            Qwen3ForCausalLM(
                Qwen3Config(
                    vocab_size=VOCAB,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=6,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    head_dim=16,
                )
            )
        )
    batch = packed_row((11, 7, 13), 40, 1, 4)
    packed = features(target, batch)
    start = 0
    for length in (11, 7, 13):
        tokens = batch["tokens"][start : start + length]
        states = target.model(tokens[None], output_hidden_states=True).hidden_states
        alone = torch.cat([states[layer + 1][0] for layer in IDS], dim=-1)
        torch.testing.assert_close(packed[start : start + length], alone, rtol=1e-5, atol=1e-5)
        start += length
    assert packed[start:].eq(0).all()


def test_features_ignore_other_documents_and_what_comes_later():
    target = tiny_target()
    batch = packed_row((11, 7), 24, 1, 4)
    before = features(target, batch)
    changed = dict(batch, tokens=batch["tokens"].clone())
    changed["tokens"][8:11] = 5  # the end of the first document
    after = features(target, changed)
    assert torch.equal(after[:8], before[:8])
    torch.testing.assert_close(after[11:], before[11:], rtol=1e-5, atol=1e-6)
    assert not torch.equal(after[8:11], before[8:11])


def test_features_are_zero_when_all_is_padding():
    target = tiny_target()
    assert features(target, packed_row((), 16, 1, 4)).eq(0).all()


def test_features_do_not_run_the_head(monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(target.model.lm_head, "forward", lambda *a: pytest.fail("the head ran"))
    features(target, packed_row((11,), 16, 1, 4))


def test_features_are_right_when_layers_after_the_last_are_dropped():
    target = tiny_target()
    batch = packed_row((11, 7), 24, 1, 4)
    before = features(target, batch)
    target.drop_layers_after(max(IDS))
    assert len(target.decoder.layers) == 5
    assert torch.equal(features(target, batch), before)


def test_features_of_threads_do_not_mix():
    target = tiny_target()
    batches = [packed_row((11, 7), 24, 1, 4, seed=seed) for seed in range(4)]
    expected = [features(target, batch) for batch in batches]

    def body(index):
        return [features(target, batches[index]) for _ in range(10)]

    for index, results in enumerate(run_threads(4, body)):
        assert all(torch.equal(result, expected[index]) for result in results)


def test_packed_attention_by_flex_equals_documents_one_by_one():
    from examples.dflash.target import _document_mask

    torch.manual_seed(0)
    batch = packed_row((11, 7), 18, 1, 4)
    query, key, value = torch.randn(1, 4, 18, 16), torch.randn(1, 2, 18, 16), torch.randn(1, 2, 18, 16)
    by_document, _ = packed_attention(None, query, key, value, torch.tensor([11, 7]).view(1, 1, 1, -1), scaling=0.3)
    mask = _document_mask(batch["document_ids"])
    by_flex, _ = packed_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(by_flex, by_document, rtol=1e-5, atol=1e-5)


def test_target_decodes_as_before_with_its_attention_registered():
    torch.manual_seed(0)
    target = tiny_target()
    plain = LlamaForCausalLM(target.model.config)
    plain.load_state_dict(target.model.state_dict())
    plain.set_attn_implementation("eager")
    tokens = torch.randint(3, VOCAB, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0  # padded on the left, as in batched decoding
    ours = target.model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    theirs = plain.eval().generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, theirs)


def test_target_reads_what_the_drafter_must_follow():
    target = tiny_target()
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (32, 6, VOCAB)
    assert (target.num_heads, target.num_kv_heads, target.head_dim) == (4, 2, 16)
    assert (target.rope_theta, target.rms_norm_eps) == (5000.0, 1e-5)
    assert target.eos_token_ids == (2,)
    assert target.mask_token_id is None
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_target_refuses_layers_that_packed_documents_cannot_use():
    config = Qwen3Config(num_hidden_layers=2, hidden_size=32, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="sliding_attention"):
        Target(Qwen3ForCausalLM(config))


def test_load_target_names_a_missing_directory(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        load_target(tmp_path / "nowhere", "cpu", torch.float32)


def test_target_of_a_model_without_head_dim_uses_hidden_over_heads():
    config = LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    config.head_dim = None
    assert Target(LlamaForCausalLM(LlamaConfig(**config.to_diff_dict()))).head_dim == 8
