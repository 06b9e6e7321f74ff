"""Speculative decoding: a drafter proposes a block, the target verifies it in one pass, the longest right prefix stays.

Guarantees:
- Greedy and lossless: what is committed is what the target says to the tokens before it, whatever was drafted. A bad
  drafter costs time and nothing else.
- Each row of a batch accepts its own number of tokens; rows that have ended are dropped from the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .decode import TargetDecoder, cut_at_end, pad_prompts
from .drafter import Drafter
from .target import Target

Accept = Callable[[Tensor, Tensor], Tensor]


class Drafting(Protocol):
    """What proposes blocks: a drafter model, prompt lookup, or a test's oracle. It serves one batch at a time.

    R rows, B = ``block_size``: a block is the last known token and B - 1 drafted ones.
    """

    block_size: int
    layer_ids: tuple[int, ...]  # the target's layers whose outputs it reads

    def start(
        self, prompts: Sequence[Sequence[int]], first: Tensor, max_length: int, features: Tensor | None, valid: Tensor
    ) -> None:
        """A new batch: prompts, the token after each [R], and features [R, P, K*H] of the prompts where ``valid``."""

    def propose(self, last: Tensor, positions: Tensor) -> Tensor:
        """Draft [R, B - 1] tokens to follow ``last`` [R], which is at ``positions`` [R]."""

    def observe(self, committed: Tensor, features: Tensor | None, positions: Tensor, valid: Tensor) -> None:
        """A round's outcome, each [R, B] and of use where ``valid``: the tokens committed, and of the tokens that were
        fed for them, one place earlier, positions and features."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""


class ModelDrafting:
    """A DFlash drafter with its cache of the context's keys and values."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.block_size = drafter.config.block_size
        self.layer_ids = drafter.config.target_layer_ids
        self._drafter, self._target = drafter, target

    def start(
        self, prompts: Sequence[Sequence[int]], first: Tensor, max_length: int, features: Tensor | None, valid: Tensor
    ) -> None:
        assert features is not None
        self._cache = self._drafter.new_cache(len(prompts), max_length, features.device, features.dtype)
        positions = torch.arange(features.shape[1], device=features.device).expand_as(valid)
        self._drafter.extend(self._cache, features, positions, valid)

    def propose(self, last: Tensor, positions: Tensor) -> Tensor:
        slots = torch.arange(self.block_size, device=last.device)
        masked = torch.full((len(last), self.block_size - 1), self._drafter.config.mask_token_id, device=last.device)
        embeddings = self._target.embed_tokens(torch.cat([last[:, None], masked], dim=1))
        hidden = self._drafter.draft(self._cache, embeddings, positions[:, None] + slots)
        logits = torch.nn.functional.linear(hidden[:, 1:], self._target.lm_head_weight)
        return logits.argmax(-1)

    def observe(self, committed: Tensor, features: Tensor | None, positions: Tensor, valid: Tensor) -> None:
        assert features is not None
        self._drafter.extend(self._cache, features, positions, valid)

    def keep(self, rows: Tensor) -> None:
        cache = self._cache
        cache.keys = [keys[rows] for keys in cache.keys]
        cache.values = [values[rows] for values in cache.values]
        cache.lengths = cache.lengths[rows]


def accept_longest_prefix(drafts: Tensor, posterior: Tensor) -> Tensor:
    """How many drafts [R, B - 1] are what the target says, counted up to the first that is not.

    Args:
        posterior: [R, B], the target's token after each of the block's.
    """
    return (drafts == posterior[:, :-1]).cumprod(dim=1).sum(dim=1)


@dataclass
class Speculated:
    """Answers of a batch, and what they cost.

    Attributes:
        answers: a prompt's tokens, up to and with the first end-of-text.
        num_rounds: a prompt's number of verifying passes; the prefill, which gives the first token, comes on top.
        accepted: how often a round committed i tokens, at index i.
    """

    answers: list[list[int]]
    num_rounds: list[int]
    accepted: list[int]


def merge_speculated(parts: Sequence[Speculated]) -> Speculated:
    """Parts of a batch as one."""
    return Speculated(
        answers=[answer for part in parts for answer in part.answers],
        num_rounds=[rounds for part in parts for rounds in part.num_rounds],
        accepted=[sum(counts) for counts in zip(*(part.accepted for part in parts), strict=True)],
    )


@torch.inference_mode()
def speculate(
    target: Target,
    drafting: Drafting,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    accept: Accept = accept_longest_prefix,
    stop: threading.Event | None = None,
) -> Speculated:
    """Answer a batch of prompts greedily, a drafted block a pass.

    Args:
        target, drafting: the verifier and the proposer.
        prompts: token ids.
        max_new_tokens: longest answer.
        accept: how many drafts to accept; a test passes a wrong one.
        stop: once set, the answers end where they are.
    """
    device, block_size = target.device, drafting.block_size
    tokens, lengths = pad_prompts(prompts, device)
    max_length = tokens.shape[1] + max_new_tokens + block_size
    decoder = TargetDecoder(target, len(prompts), max_length, drafting.layer_ids)
    slots = torch.arange(block_size, device=device)

    read = decoder.prefill(tokens, lengths)
    last, positions = read.logits[:, 0].argmax(-1), lengths
    is_prompt = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    drafting.start(prompts, last, max_length, read.features, is_prompt)
    answers = [[token] for token in last.tolist()]
    num_rounds, accepted = [0] * len(prompts), [0] * (block_size + 1)
    rows = list(range(len(prompts)))  # the prompt of each row of the batch
    while True:
        open_rows = [
            row
            for row, prompt in enumerate(rows)
            if answers[prompt][-1] not in target.eos_token_ids and len(answers[prompt]) < max_new_tokens
        ]
        if not open_rows or (stop is not None and stop.is_set()):
            return Speculated(answers, num_rounds, accepted)
        if len(open_rows) < len(rows):
            kept = torch.tensor(open_rows, device=device)
            decoder.keep(kept)
            drafting.keep(kept)
            last, positions = last[kept], positions[kept]
            rows = [rows[row] for row in open_rows]

        drafts = drafting.propose(last, positions)
        block_positions = positions[:, None] + slots
        furthest = max(len(prompts[prompt]) + len(answers[prompt]) for prompt in rows) + block_size - 1
        said = decoder.step(torch.cat([last[:, None], drafts], dim=1), block_positions, furthest)
        posterior = said.logits.argmax(-1)
        num_right = accept(drafts, posterior)[:, None]
        committed = torch.where(slots < num_right, torch.nn.functional.pad(drafts, (0, 1)), posterior)
        valid = slots <= num_right
        drafting.observe(committed, said.features, block_positions, valid)
        last = committed.gather(1, num_right)[:, 0]
        positions = positions + num_right[:, 0] + 1

        for prompt, row, count in zip(rows, committed.tolist(), (num_right[:, 0] + 1).tolist(), strict=True):
            before = len(answers[prompt])
            answers[prompt] = cut_at_end(answers[prompt] + row[:count], target.eos_token_ids)[:max_new_tokens]
            num_rounds[prompt] += 1
            accepted[len(answers[prompt]) - before] += 1
