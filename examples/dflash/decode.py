"""Decoding with the target: batched over prompts, key/value caches with a position pointer a row.

The slot of a token in the cache is its position. A query at position p sees slots 0..p, so a rejected token needs no
clean-up: it is past its row's position, hence masked, and written over by the token that takes its place.

Guarantees:
- Rows are independent: a batch gives what each prompt alone gives, to rounding.
- Shapes depend on the batch and the number of tokens fed, never on how far a row has come.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import Target

_CHECK_EVERY = 16  # steps between two looks from the host at whether all rows have ended
_VISIBLE_STEP = 32  # attention reads the cache up to the next multiple of this


class SlotCache:
    """Keys and values of every layer, written at given positions. What transformers asks of a cache, and no more."""

    is_compileable = False

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        self.keys: dict[int, Tensor] = {}  # a layer: [R, S, heads, D]
        self.values: dict[int, Tensor] = {}
        self.positions: Tensor | None = None  # [R, N], of the tokens being fed
        self.visible = num_slots

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [R, heads, N, D] at ``positions``; all visible slots come back, [R, heads, visible, D]."""
        if layer not in self.keys:
            shape = (self.num_rows, self.num_slots, keys.shape[1], keys.shape[3])
            self.keys[layer], self.values[layer] = keys.new_zeros(shape), values.new_zeros(shape)
        rows = torch.arange(self.num_rows, device=keys.device)[:, None]
        self.keys[layer][rows, self.positions] = keys.transpose(1, 2)
        self.values[layer][rows, self.positions] = values.transpose(1, 2)
        return (
            self.keys[layer][:, : self.visible].transpose(1, 2),
            self.values[layer][:, : self.visible].transpose(1, 2),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # positions and mask are always given, so nothing is derived from it

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.num_rows = len(rows)
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = tensor[rows]


@dataclass
class Step:
    """What the target says to the tokens fed.

    Attributes:
        logits: [R, N, V], of the token after each; [R, 1, V] after a prefill.
        features: [R, N, K*H], the layers' outputs side by side; None where none were asked for.
    """

    logits: Tensor
    features: Tensor | None


class TargetDecoder:
    """The target with a cache for one batch of rows.

    Args:
        target: the target.
        num_rows: R.
        max_length: longest row, prompt included.
        layer_ids: layers whose outputs every step returns.
    """

    def __init__(self, target: Target, num_rows: int, max_length: int, layer_ids: Sequence[int] = ()) -> None:
        self.target = target
        self.max_length = max_length
        self.layer_ids = tuple(layer_ids)
        self._cache = SlotCache(num_rows, max_length)
        # transformers renames the argument between versions
        named = inspect.signature(target.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Step:
        """Read the prompts.

        Args:
            tokens: [R, P], padded on the right.
            lengths: [R], at least 1.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden, features = self._forward(tokens, positions, tokens.shape[1])
        rows = torch.arange(len(tokens), device=tokens.device)
        return Step(self._head(hidden[rows, lengths - 1])[:, None], features)

    def step(self, tokens: Tensor, positions: Tensor, max_position: int) -> Step:
        """Feed [R, N] tokens at ``positions``, each row's consecutive; ``max_position`` is their maximum or more."""
        hidden, features = self._forward(tokens, positions, max_position + 1)
        return Step(self._head(hidden), features)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self._cache.keep(rows)

    def _forward(self, tokens: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        visible = min(-(-length // _VISIBLE_STEP) * _VISIBLE_STEP, self.max_length)
        self._cache.positions, self._cache.visible = positions, visible
        slots = torch.arange(visible, device=tokens.device)
        mask = slots <= positions[:, None, :, None]
        collected: dict[int, Tensor] = {}
        handles = [
            self.target.decoder.layers[layer].register_forward_hook(_collector(layer, collected))
            for layer in self.layer_ids
        ]
        try:
            out = self.target.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **{self._cache_argument: self._cache},
            )
        finally:
            for handle in handles:
                handle.remove()
        features = torch.cat([collected[layer] for layer in self.layer_ids], dim=-1) if self.layer_ids else None
        return out.last_hidden_state, features

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.target.lm_head_weight)


def _collector(layer: int, collected: dict[int, Tensor]) -> Any:
    def collect(module: Any, args: Any, output: Any) -> None:
        collected[layer] = output[0] if isinstance(output, tuple) else output

    return collect


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Prompts as [R, P], padded on the right, and their lengths [R]."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    rows = [list(prompt) + [0] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)


@dataclass
class Decoded:
    """Answers of a batch.

    Attributes:
        answers: a prompt's tokens, up to and with the first end-of-text.
        gaps: [R, max_new_tokens] float32: how far the best token's logit was above the second's.
        tops: [R, max_new_tokens] float32: the best logit.
        num_calls: passes of the target over the batch, the prefill included.
    """

    answers: list[list[int]]
    gaps: Tensor
    tops: Tensor
    num_calls: int


@torch.inference_mode()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stop: threading.Event | None = None,
) -> Decoded:
    """The target's own answers to a batch of prompts, one token a pass.

    Args:
        target: the target.
        prompts: token ids; rows of similar length waste least.
        max_new_tokens: longest answer.
        temperature: 0 is greedy.
        generator: draws the tokens where temperature > 0; on the target's device.
        stop: once set, the answers end where they are.
    """
    tokens, lengths = pad_prompts(prompts, target.device)
    longest = tokens.shape[1]
    decoder = TargetDecoder(target, len(prompts), longest + max_new_tokens)
    ends = torch.tensor(target.eos_token_ids or (-1,), device=target.device)
    out = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=target.device)
    gaps, tops = torch.zeros_like(out, dtype=torch.float32), torch.zeros_like(out, dtype=torch.float32)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)

    logits = decoder.prefill(tokens, lengths).logits[:, 0]
    num_calls = 1
    look_every = 1 if target.device.type == "cpu" else _CHECK_EVERY
    for index in range(max_new_tokens):
        best, ids = logits.float().topk(2, dim=-1)
        gaps[:, index], tops[:, index] = best[:, 0] - best[:, 1], best[:, 0]
        chosen = ids[:, 0] if temperature == 0 else _sample(logits, temperature, generator)
        out[:, index] = chosen
        ended |= torch.isin(chosen, ends)
        if index + 1 == max_new_tokens or (stop is not None and stop.is_set()):
            break
        if index % look_every == look_every - 1 and bool(ended.all()):
            break
        logits = decoder.step(chosen[:, None], (lengths + index)[:, None], longest + index).logits[:, 0]
        num_calls += 1
    answers = [cut_at_end(row, target.eos_token_ids) for row in out[:, : index + 1].tolist()]
    return Decoded(answers, gaps.cpu(), tops.cpu(), num_calls)


def merge_decoded(parts: Sequence[Decoded]) -> Decoded:
    """Parts of a batch as one."""
    return Decoded(
        answers=[answer for part in parts for answer in part.answers],
        gaps=torch.cat([part.gaps for part in parts]),
        tops=torch.cat([part.tops for part in parts]),
        num_calls=sum(part.num_calls for part in parts),
    )


def cut_at_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first end-of-text."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    probabilities = (logits.float() / temperature).softmax(-1)
    return probabilities.multinomial(1, generator=generator)[:, 0]
