"""A tokenizer of characters with a chat template, small data files, and a target that counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.dflash.config import PRESETS, Config
from examples.dflash.target import Target

EOS = 2
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .?:\n"


class CharTokenizer:
    """Renders ``u:...\\n`` and ``a:...<e>\\n``; a token a character, ids from 3, and <e> is 2."""

    eos_token = "<e>"

    def __init__(self, chat_template: str | None = "built in") -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        text = "".join(
            f"a:{message['content']}<e>\n" if message["role"] == "assistant" else f"u:{message['content']}\n"
            for message in messages
        )
        return text + ("a:" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        pieces = text.split(self.eos_token)
        ids = [3 + CHARACTERS.index(character) for character in pieces[0]]
        for piece in pieces[1:]:
            ids += [EOS] + [3 + CHARACTERS.index(character) for character in piece]
        return SimpleNamespace(input_ids=ids)

    def get_vocab(self):
        return {self.eos_token: EOS, **{character: 3 + index for index, character in enumerate(CHARACTERS)}}

    def decode(self, ids, skip_special_tokens=False):
        shown = {EOS: "" if skip_special_tokens else "<e>"}
        return "".join(
            shown.get(token, CHARACTERS[token - 3] if 3 <= token < 3 + len(CHARACTERS) else "?") for token in ids
        )


def conversation(*contents: str) -> dict[str, object]:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write_lines(path: Path, lines: list[object]) -> Path:
    """Strings as they are, everything else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def tiny_run(directory: Path, lines: list[object], **options: object) -> Config:
    """A configuration for tiny models, with its data written."""
    data = write_lines(directory / "data.jsonl", lines)
    settings = {"num_held_out": 1, "token_budget": 64, "num_anchors": 8, "max_new_tokens": 12, "block_size": 4}
    settings |= {"data": data, "out": directory / "run", "decode_batch": 3, "min_acceptance": 1.0} | options
    return dataclasses.replace(PRESETS["demo"], **settings)


def counting_target(modulus: int = 61, vocabulary: int | None = None) -> Target:
    """A Llama that says (v + 1) mod ``modulus`` after v: its layers add nothing, its head is shifted by one."""
    vocabulary = vocabulary or modulus
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.arange(modulus)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64)[:vocabulary])
        model.lm_head.weight.zero_()
        model.lm_head.weight[(tokens + 1) % modulus] = torch.eye(64)[tokens]
    return Target(model, CharTokenizer())
