"""Chat templates of the shapes that real models have, and tokenizers made in memory."""

from __future__ import annotations

import functools
import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Each has generation marks; ``unmarked`` takes them out.

CHATML = """
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""A default system prompt; the mark ends with the end token."""

WIDE_CHATML = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{% generation %}{{ '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The mark takes in the header before the answer and the newline after it."""

LLAMA3 = """
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content | trim }}{% endgeneration %}{{ '<|eot_id|>' }}
{%- else -%}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
"""A beginning-of-text token, no newline after a turn; the mark leaves the end token out."""

QWEN3 = """
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set said = message.content -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{% generation %}
{%- if loop.index0 > ns.last_user and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{% endgeneration %}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Drops the thinking of turns before the last message of the user; tools, and calls of them."""

PHI3 = """
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' -}}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""
"""A turn ends with another token than the text, which the template ends as well."""

R1 = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{% generation %}{{ message.content.split('</think>')[-1] + '<|end|>' }}{% endgeneration %}
{%- else -%}{{ '<|user|>' + message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}
"""
"""Drops the thinking of every answer, the last included, but prompts for it."""

PLAIN = """
{%- for message in messages -%}
{{- message.role + ': ' -}}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""
"""No end token at all."""

_SPECIALS = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_SPECIALS += ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<|mask|>"]


def unmarked(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


@functools.cache
def _bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=_SPECIALS)
    texts = ["You help the user with an answer to a question.\n\nassistant\n\n<think>\n\n</think>\n\n"] * 4
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def bpe_tokenizer(template: str | None, eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen, Llama 3 and SmolLM have; newlines merge with each other."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe()), bos_token="<|begin|>", eos_token=eos_token
    )
    tokenizer.chat_template = template
    return tokenizer


def spacing_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Puts a space before what it is given, as SentencePiece models such as Llama 2 do. A token a character."""
    characters = sorted(set("▁abcdefghijklmnopqrstuvwxyz:?.0123456789\n"))
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *characters, "▁a", "▁y"])}
    merges = [("▁", "a"), ("▁", "y")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def supervised_texts(tokenizer: Any, tokens: list[int], mask: list[bool]) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    for place, (token, flag) in enumerate(zip(tokens, mask, strict=True)):
        if flag and not (place and mask[place - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]
