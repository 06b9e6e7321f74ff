"""Tiny models and packed rows that the example's tests share."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from examples.dflash.drafter import Drafter, DrafterConfig
from examples.dflash.target import Target

VOCAB = 61
MASK_TOKEN = 60
NUM_LAYERS = 6


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """A random Llama of six layers, with grouped keys and an untied head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return Target(LlamaForCausalLM(config).to(dtype))


def tiny_qwen3(seed: int = 1) -> Target:
    """A random Qwen3 of six layers, with grouped keys."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return Target(Qwen3ForCausalLM(config))


def tiny_config(block_size: int = 4, num_layers: int = 2, num_features: int = 2, **changes: int) -> DrafterConfig:
    """A drafter for ``tiny_target``."""
    return DrafterConfig(
        hidden_size=32,
        intermediate_size=40,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=(1, 3)[:num_features],
        vocab_size=VOCAB,
        num_target_layers=NUM_LAYERS,
        **changes,
    )


def random_drafter(seed: int = 0, **kwargs: int) -> Drafter:
    """A drafter whose weights are all random, norms too, and large enough to make differences visible."""
    drafter = Drafter(tiny_config(**kwargs))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter


def packed_row(
    lengths: tuple[int, ...], num_tokens: int, num_anchors: int, block_size: int, seed: int = 0
) -> dict[str, Tensor]:
    """A batch of documents of random tokens; every token but a document's first two is supervised."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    document_ids = torch.full((num_tokens,), -1)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    loss_mask = torch.zeros(num_tokens, dtype=torch.bool)
    start = 0
    for index, length in enumerate(lengths):
        row = slice(start, start + length)
        tokens[row] = torch.randint(3, VOCAB - 1, (length,), generator=generator)
        document_ids[row], positions[row] = index, torch.arange(length)
        loss_mask[start + 2 : start + length] = True
        start += length
    eligible = torch.nonzero(loss_mask[:-1] & loss_mask[1:]).flatten()
    picked = eligible[torch.randperm(len(eligible), generator=generator)[:num_anchors]].sort().values
    anchors = torch.zeros(num_anchors, dtype=torch.int64)
    anchors[: len(picked)] = picked
    return {
        "tokens": tokens,
        "document_ids": document_ids,
        "positions": positions,
        "loss_mask": loss_mask,
        "anchors": anchors,
        "anchor_valid": torch.arange(num_anchors) < len(picked),
    }
