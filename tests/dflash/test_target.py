from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    FalconH1Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.dflash.config import InputError
from examples.dflash.drafter import Drafter, DrafterConfig
from examples.dflash.fetch import resolve_target
from examples.dflash.known import known_config
from examples.dflash.packed import document_mask, packed_attention
from examples.dflash.target import Target, TargetShape, load_target, model_class, target_layer_ids
from examples.dflash.train import drafter_config, load_targets, topology, train_on
from tests.helpers import run_threads

from .models import MASK_TOKEN, VOCAB, packed_row, tiny_target
from .test_train import configuration, documents

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


QWEN3 = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": lambda: tiny_target().model.config,
    "llama3": lambda: LlamaConfig(**QWEN3, rope_parameters=LLAMA3_ROPE, eos_token_id=[2, 5, 7]),
    "smollm2": lambda: LlamaConfig(
        **{**QWEN3, "num_attention_heads": 2, "num_key_value_heads": 1}, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**QWEN3, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied": lambda: Qwen3Config(**QWEN3, head_dim=16, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**QWEN3, use_sliding_window=False, sliding_window=16),
    "yarn": lambda: Qwen3Config(
        **QWEN3,
        head_dim=16,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "multimodal": lambda: Mistral3Config(
        text_config=MistralConfig(**QWEN3, head_dim=16, sliding_window=None),
        vision_config=PixtralVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
    ),
}


def made(family):
    config = CONFIGS[family]()
    torch.manual_seed(0)
    target = Target(model_class(config).from_config(config))
    with torch.no_grad():  # norms at 1 would hide a norm that is left out
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return target


@pytest.mark.parametrize("family", CONFIGS)
def test_features_of_packed_documents_equal_those_of_each_alone(family):
    target = made(family)
    batch = packed_row((11, 37, 13), 70, 1, 4)
    packed = features(target, batch)
    start = 0
    for length in (11, 37, 13):
        tokens = batch["tokens"][start : start + length]
        states = target.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
        alone = torch.cat([states[layer + 1][0] for layer in IDS], dim=-1)
        torch.testing.assert_close(packed[start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length
    assert packed[start:].eq(0).all()


@pytest.mark.parametrize("family", CONFIGS)
def test_shape_is_that_of_the_weights(family):
    target = made(family)
    attention, layer = target.decoder.layers[0].self_attn, target.decoder.layers[0]
    assert attention.q_proj.weight.shape == (target.num_heads * target.head_dim, target.hidden_size)
    assert attention.k_proj.weight.shape == (target.num_kv_heads * target.head_dim, target.hidden_size)
    assert layer.mlp.up_proj.weight.shape == (target.intermediate_size, target.hidden_size)
    assert len(target.decoder.layers) == target.num_layers
    assert target.lm_head_weight.shape == target.embed_tokens.weight.shape == (VOCAB, target.hidden_size)
    assert target.shape.tied == (target.lm_head_weight is target.embed_tokens.weight)


def test_shape_of_a_tied_and_an_untied_target_differ_in_that():
    assert made("qwen3-tied").shape == dataclasses.replace(made("qwen3").shape, tied=True)


def test_target_ends_a_text_at_each_of_its_tokens():
    assert made("llama3").eos_token_ids == (2, 5, 7)


def test_drafter_takes_the_targets_rope_base_and_not_its_scaling():
    """Servers read a drafter's rope from the drafter's own configuration, so it need not have the target's scaling."""
    scaled = made("llama3")
    assert scaled.rope_theta == 5000.0
    drafter = Drafter(
        DrafterConfig.from_target(scaled, num_layers=1, block_size=4, num_features=2, mask_token_id=MASK_TOKEN)
    )
    cosine, sine = drafter.rope(torch.tensor([40]))
    angles = 40 * 5000.0 ** -(torch.arange(0, 16 // 2, 2) / (16 // 2))  # head_dim is 32 / 4
    torch.testing.assert_close(cosine.flatten()[:4], angles.cos())
    torch.testing.assert_close(sine.flatten()[:4], angles.sin())
    theirs, _ = scaled.decoder.rotary_emb(torch.zeros(1), torch.tensor([[40]]))
    assert not torch.allclose(theirs.flatten()[:4], angles.cos(), atol=1e-3)  # the target's is scaled


def test_mask_token_is_known_for_qwen3_and_smollm2_and_asked_for_elsewhere():
    assert TargetShape.of(known_config("Qwen/Qwen3-8B")).mask_token_id == 151669
    assert TargetShape.of(known_config("smollm2")).mask_token_id == 16
    llama = TargetShape.of(known_config("meta-llama/Llama-3.1-8B-Instruct"))
    with pytest.raises(ValueError, match="--mask-token-id"):
        DrafterConfig.from_target(llama, num_layers=1, block_size=4)


@pytest.mark.parametrize(
    ("name", "count", "tied"),
    [
        ("Qwen/Qwen3-4B", 4_022_468_096, True),
        ("Qwen/Qwen3-8B", 8_190_735_360, False),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, False),
        ("smollm2", 134_515_008, True),
    ],
)
def test_known_configurations_have_the_published_numbers_of_parameters(name, count, tied):
    config = known_config(name)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert TargetShape.of(config).tied == tied


def test_known_configurations_are_made_anew():
    known_config("Qwen/Qwen3-4B").rope_parameters["rope_theta"] = 1.0
    assert known_config("Qwen/Qwen3-4B").rope_parameters["rope_theta"] == 1e6
    assert known_config("nobody/nothing") is None


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
    torch.manual_seed(0)
    batch = packed_row((11, 7), 18, 1, 4)
    query, key, value = torch.randn(1, 4, 18, 16), torch.randn(1, 2, 18, 16), torch.randn(1, 2, 18, 16)
    by_document, _ = packed_attention(None, query, key, value, torch.tensor([11, 7]).view(1, 1, 1, -1), scaling=0.3)
    mask = document_mask(batch["document_ids"])
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**QWEN3, sliding_window=16), "over 16 tokens"),
        (Qwen2Config(**QWEN3, use_sliding_window=True, sliding_window=16, max_window_layers=2), "sliding_attention"),
        (FalconH1Config(num_hidden_layers=2), "hybrid"),
        (Qwen3Config(**QWEN3, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
)
def test_target_that_packed_documents_cannot_have_is_refused_by_its_configuration(tmp_path, config, message):
    with pytest.raises(InputError, match=message):
        TargetShape.of(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        load_target(tmp_path, "cpu", torch.float32)
    with pytest.raises(InputError, match=message):
        load_target(f"random:{tmp_path}", "cpu", torch.float32)


def test_window_over_all_positions_is_none():
    assert TargetShape.of(MistralConfig(**QWEN3, sliding_window=64, max_position_embeddings=64)).head_dim == 8


def test_packed_attention_refuses_what_it_would_leave_out():
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(None, query, query, query, torch.tensor([4]).view(1, 1, 1, 1), softcap=30.0)


@pytest.fixture
def saved(tmp_path):
    """A tiny target as a directory, with a tokenizer."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_load_target_reads_weights_and_tokenizer(saved):
    target = load_target(saved, "cpu", torch.float32)
    batch = packed_row((11, 7), 24, 1, 4)
    assert torch.equal(features(target, batch), features(tiny_target(), batch))
    assert target.tokenizer is not None


def changed_weights(directory, change):
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_load_target_refuses_files_that_lack_weights(saved):
    changed_weights(saved, lambda weights: weights.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"lack 1 of its weights, model\.layers\.3\.mlp\.up_proj"):
        load_target(saved, "cpu", torch.float32)


@pytest.mark.parametrize("harm", ["torn weights", "no weights", "no tokenizer", "unknown architecture", "no json"])
def test_load_target_names_the_model_that_transformers_cannot_load(saved, harm):
    if harm == "torn weights":
        path = saved / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "no weights":
        (saved / "model.safetensors").unlink()
    elif harm == "no tokenizer":
        for path in saved.glob("*token*"):
            path.unlink()
    elif harm == "unknown architecture":
        (saved / "config.json").write_text('{"model_type": "something-newer"}')
    else:
        (saved / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot load the target"):
        load_target(saved, "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_target_has_the_architecture_and_the_same_weights_each_time(saved, dtype):
    before = torch.get_rng_state()
    first, second = (load_target(f"random:{saved}", "cpu", dtype) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == tiny_target().shape
    assert first.tokenizer is None and first.dtype == dtype
    assert first.eos_token_ids == (2,)
    batch = packed_row((11, 7), 24, 1, 4)
    assert torch.equal(features(first, batch), features(second, batch))
    assert features(first, batch).isfinite().all() and features(first, batch)[:18].float().std() > 0.01
    alone = packed_row((11,), 11, 1, 4) | {"tokens": batch["tokens"][:11]}
    torch.testing.assert_close(features(first, batch)[:11], features(first, alone), rtol=2e-2, atol=2e-2)


def test_drafter_trains_on_a_random_target(saved, tmp_path):
    config = configuration(tmp_path, target=f"random:{saved}", max_steps=2)
    devices = topology(config)
    targets = load_targets(resolve_target(config.target), config, devices)
    assert (
        train_on(documents(4), targets, drafter_config(config, targets[devices.targets[0]].shape), config, devices) == 0
    )
    assert config.drafter_path.is_file()


def test_load_target_names_a_missing_directory(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        load_target(tmp_path / "nowhere", "cpu", torch.float32)


def test_target_of_a_model_without_head_dim_uses_hidden_over_heads():
    config = LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    config.head_dim = None
    assert Target(LlamaForCausalLM(LlamaConfig(**config.to_diff_dict()))).head_dim == 8
