"""Architectures of some targets, by the names that the Hub has for them.

A run's plan, its smoke test and measurements with random weights need a target's shape and not its weights; for these
they need no network either.

Guarantees:
- What is written here is what the published config.json says, as far as it decides shapes, numbers and positions.
- Nothing is fetched.

Sources: config.json of each model; arXiv 2505.09388, table 1, for Qwen3.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen3Config

SMOLLM2 = "smollm2"

_QWEN3: dict[str, Any] = dict(
    vocab_size=151936,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    bos_token_id=151643,
    eos_token_id=[151645, 151643],
)
_LLAMA31: dict[str, Any] = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    tie_word_embeddings=False,
)
_SMOLLM2: dict[str, Any] = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=True,
)
_KNOWN: dict[str, tuple[type, dict[str, Any]]] = {
    "Qwen/Qwen3-4B": (
        Qwen3Config,
        _QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    ),
    "Qwen/Qwen3-8B": (
        Qwen3Config,
        _QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, _LLAMA31),
    SMOLLM2: (LlamaConfig, _SMOLLM2),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (LlamaConfig, _SMOLLM2),
}

KNOWN_NAMES = tuple(_KNOWN)


def known_config(name: str) -> Any | None:
    """The transformers configuration of a target of that name, made anew; None for one that is not known."""
    if name not in _KNOWN:
        return None
    kind, settings = _KNOWN[name]
    return kind(**{key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()})
