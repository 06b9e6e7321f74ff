"""Speculative decoding: a drafter proposes a block, the target verifies it in one pass, the longest right prefix stays.

Guarantees:
- Greedy and lossless: what is committed is what the target says to the tokens before it, whatever was drafted. A bad
  drafter costs time and nothing else.
- Each row of a batch accepts its own number of tokens, on the device; rows that have ended change nothing any more.
- On CUDA a round is one graph, drafting included, for each of a few visible lengths. Only a drafter that works on the
  host (prompt lookup) waits for the device every round.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode import cut_at_end
from .drafter import ContextCache, Drafter
from .stepping import BatchedDecoder, Steps, TargetDecoder, is_any_of, pad_prompts
from .target import Target

_CHECK_EVERY = 4  # rounds between two looks from the host: how many rows are open, and how far the furthest has come

Accept = Callable[[Tensor, Tensor], Tensor]


class Drafting(Protocol):
    """What proposes blocks: a drafter model, prompt lookup, or a test's oracle. It serves one batch at a time.

    R rows, B = ``block_size``: a block is the last known token and B - 1 drafted ones.
    """

    block_size: int
    layer_ids: tuple[int, ...]  # the target's layers whose outputs it reads
    on_host: bool  # whether propose and observe read tensors from the host; else they are captured

    def start(
        self, prompts: Sequence[Sequence[int]], first: Tensor, max_length: int, features: Tensor | None, valid: Tensor
    ) -> None:
        """A new batch: prompts, the token after each [R], and features [R, P, K*H] of the prompts where ``valid``.

        Where rows and ``max_length`` are as before, tensors that ``propose`` and ``observe`` work on stay in place.
        """

    def propose(self, last: Tensor, positions: Tensor, visible: int) -> Tensor:
        """Draft [R, B - 1] tokens to follow ``last`` [R], which is at ``positions`` [R], each below ``visible``."""

    def observe(self, committed: Tensor, features: Tensor | None, positions: Tensor, valid: Tensor) -> None:
        """A round's outcome, each [R, B] and of use where ``valid``: the tokens committed, and of the tokens that were
        fed for them, one place earlier, positions and features. Nothing of a row that has ended is valid."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""


class ModelDrafting:
    """A DFlash drafter with its cache of the context's keys and values."""

    on_host = False

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.block_size = drafter.config.block_size
        self.layer_ids = drafter.config.target_layer_ids
        self._drafter, self._target = drafter, target
        self._cache: ContextCache | None = None

    def start(
        self, prompts: Sequence[Sequence[int]], first: Tensor, max_length: int, features: Tensor | None, valid: Tensor
    ) -> None:
        assert features is not None
        cache = self._cache
        if cache is None or (len(cache.lengths), cache.max_context) != (len(prompts), max_length):
            cache = self._drafter.new_cache(len(prompts), max_length, features.device, features.dtype)
            self._cache = cache
        for tensor in (*cache.keys, *cache.values, cache.lengths):
            tensor.zero_()
        positions = torch.arange(features.shape[1], device=features.device).expand_as(valid)
        self._drafter.extend(cache, features, positions, valid)

    def propose(self, last: Tensor, positions: Tensor, visible: int) -> Tensor:
        cache = self._cache
        assert cache is not None
        seen = dataclasses.replace(  # what lies further is empty
            cache,
            keys=[keys[:, :, :visible] for keys in cache.keys],
            values=[values[:, :, :visible] for values in cache.values],
        )
        slots = torch.arange(self.block_size, device=last.device)
        block = torch.where(slots == 0, last[:, None], self._drafter.config.mask_token_id)
        hidden = self._drafter.draft(seen, self._target.embed_tokens(block), positions[:, None] + slots)
        return F.linear(hidden[:, 1:], self._target.lm_head_weight).argmax(-1)

    def observe(self, committed: Tensor, features: Tensor | None, positions: Tensor, valid: Tensor) -> None:
        assert features is not None and self._cache is not None
        self._drafter.extend(self._cache, features, positions, valid)

    def keep(self, rows: Tensor) -> None:
        cache = self._cache
        assert cache is not None
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


class _Rows:
    """The rows of a batch on the device, and the round that gives each a block. ``keep`` alone moves its tensors."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        accept: Accept,
        num_rows: int,
        max_length: int,
        max_new_tokens: int,
        visible_step: int | None,
    ) -> None:
        device = target.device
        self.decoder = TargetDecoder(target, num_rows, max_length, drafting.layer_ids, visible_step)
        self.drafting, self.accept, self.max_new_tokens = drafting, accept, max_new_tokens
        self.ends = torch.tensor(target.eos_token_ids or (-1,), device=device)
        self.slots = torch.arange(drafting.block_size, device=device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions, self.counts = torch.zeros_like(self.last), torch.zeros_like(self.last)  # of last; of answers
        self.num_rounds = torch.zeros_like(self.last)
        self.ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.out = torch.zeros(num_rows, max_new_tokens + 1, dtype=torch.int64, device=device)  # the last: no answer's
        self.accepted = torch.zeros(drafting.block_size + 1, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(num_rows, drafting.block_size - 1, dtype=torch.int64, device=device)
        self.committed = torch.zeros(num_rows, drafting.block_size, dtype=torch.int64, device=device)
        self.valid = torch.zeros_like(self.committed, dtype=torch.bool)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts and take the target's first token for each. Rows without a prompt have ended."""
        tokens, lengths = pad_prompts(prompts, self.ends.device, len(self.last))
        for tensor in (self.num_rounds, self.accepted):
            tensor.zero_()
        read = self.decoder.prefill(tokens, lengths)
        self.last.copy_(read.logits[:, 0].argmax(-1))
        self.positions.copy_(lengths)
        self.counts.fill_(1)
        self.out[:, 0] = self.last
        is_row = torch.arange(len(lengths), device=lengths.device) < len(prompts)
        self.ended.copy_(~is_row | is_any_of(self.last, self.ends) | (self.max_new_tokens == 1))
        is_prompt = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        padded = [*prompts, *([[0]] * (len(lengths) - len(prompts)))]
        self.drafting.start(padded, self.last, self.decoder.max_length, read.features, is_prompt)

    def rewind(self) -> None:
        """To where a round changes nothing that counts."""
        self.ended.fill_(True)
        self.positions.zero_()

    def round(self, visible: int) -> Tensor:
        """Draft, verify and commit. Returns how many rows are open, and the largest position of their last tokens."""
        if not self.drafting.on_host:
            self.drafts.copy_(self.drafting.propose(self.last, self.positions, visible))
        block_positions = self.positions[:, None] + self.slots
        said = self.decoder.step(torch.cat([self.last[:, None], self.drafts], dim=1), block_positions, visible)
        posterior = said.logits.argmax(-1)
        num_right = self.accept(self.drafts, posterior)[:, None]
        self.committed.copy_(torch.where(self.slots < num_right, F.pad(self.drafts, (0, 1)), posterior))
        self.valid.copy_((self.slots <= num_right) & ~self.ended[:, None])
        if not self.drafting.on_host:
            self.drafting.observe(self.committed, said.features, block_positions, self.valid)
        self._commit(num_right)
        return self.look()

    def look(self) -> Tensor:
        """How many rows are open, and the largest position of their last tokens [2]."""
        return torch.stack([(~self.ended).sum(), self.positions.masked_fill(self.ended, 0).amax()])

    def _commit(self, num_right: Tensor) -> None:
        """Write down what the answers gain: up to the first end-of-text and the longest answer."""
        block_size, was_open = len(self.slots), ~self.ended
        ends = torch.where(self.valid & is_any_of(self.committed, self.ends), self.slots, block_size).amin(1)
        gained = torch.minimum(self.valid.sum(1), ends + 1).minimum(self.max_new_tokens - self.counts)
        is_gained = self.slots < gained[:, None]
        self.out.scatter_(
            1, torch.where(is_gained, self.counts[:, None] + self.slots, self.max_new_tokens), self.committed
        )
        self.counts.add_(gained)
        self.num_rounds.add_(was_open)
        self.accepted.scatter_add_(0, gained, was_open.long())
        self.ended.logical_or_((ends < block_size) | (self.counts >= self.max_new_tokens))
        self.last.copy_(torch.where(self.ended, self.last, self.committed.gather(1, num_right)[:, 0]))
        self.positions.add_(torch.where(self.ended, 0, num_right[:, 0] + 1))

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        for name in ("last", "positions", "counts", "num_rounds", "ended", "out", "drafts", "committed", "valid"):
            setattr(self, name, getattr(self, name)[rows])
        self.decoder.keep(rows)
        self.drafting.keep(rows)


class SpeculativeDecoder(BatchedDecoder[_Rows, Speculated]):
    """Answers batch after batch greedily, a drafted block a pass: see ``BatchedDecoder``.

    Without graphs, rows that have ended are dropped from the batch.

    Args:
        target, drafting: the verifier and the proposer.
        accept: how many drafts to accept; a test passes a wrong one.
        **options: of ``BatchedDecoder``.
    """

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        max_new_tokens: int,
        *,
        accept: Accept = accept_longest_prefix,
        **options: Any,
    ) -> None:
        super().__init__(target, max_new_tokens, **options)
        self._drafting, self._accept = drafting, accept

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], *, stop: threading.Event | None = None) -> Speculated:
        """Answer a batch of prompts.

        Args:
            prompts: token ids.
            stop: once set, the answers end where they are.
        """
        rows, steps = self._rows_for(prompts)
        rows.begin(prompts)
        look_every = _look_every(self._target, self._drafting)
        block_size, eos = self._drafting.block_size, self._target.eos_token_ids
        answers: list[list[int]] = [[] for _ in prompts]
        num_rounds = [0] * len(prompts)
        places = list(range(len(prompts)))  # the prompt of each row

        def note() -> None:
            found = zip(places, rows.out.tolist(), rows.counts.tolist(), rows.num_rounds.tolist(), strict=False)
            for place, tokens, count, rounds in found:
                answers[place], num_rounds[place] = cut_at_end(tokens[:count], eos), rounds

        seen, num_since = rows.look(), 0
        num_open, furthest = seen.tolist()
        while num_open and not (stop is not None and stop.is_set()):
            if not self._graphed and num_since == 0 and num_open < len(rows.last):
                note()
                kept = (~rows.ended).nonzero()[:, 0]
                rows.keep(kept)
                places = [places[row] for row in kept.tolist()]
            if self._drafting.on_host:
                rows.drafts.copy_(self._drafting.propose(rows.last, rows.positions, rows.decoder.max_length))
            seen = steps(rows.decoder.visible_length(furthest + (num_since + 1) * block_size))
            if self._drafting.on_host:
                self._drafting.observe(rows.committed, None, rows.positions[:, None] + rows.slots, rows.valid)
            num_since += 1
            if num_since == look_every:
                num_open, furthest = seen.tolist()
                num_since = 0
        note()
        return Speculated(answers, num_rounds, rows.accepted.tolist())

    def _make(self, num_rows: int, max_prompt: int) -> tuple[_Rows, Steps]:
        max_length = max_prompt + self._max_new_tokens + self._drafting.block_size
        rows = _Rows(
            self._target,
            self._drafting,
            self._accept,
            num_rows,
            max_length,
            self._max_new_tokens,
            self._visible_step,
        )
        return rows, Steps(rows.round, self._graphed)


def _look_every(target: Target, drafting: Drafting) -> int:
    """Rounds between two looks from the host."""
    return 1 if target.device.type == "cpu" or drafting.on_host else _CHECK_EVERY


def speculate(
    target: Target,
    drafting: Drafting,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    accept: Accept = accept_longest_prefix,
    stop: threading.Event | None = None,
    graphed: bool = False,
) -> Speculated:
    """Answer one batch of prompts greedily, a drafted block a pass: see ``SpeculativeDecoder``."""
    longest = max(map(len, prompts))
    with SpeculativeDecoder(
        target, drafting, max_new_tokens, num_rows=len(prompts), max_prompt=longest, accept=accept, graphed=graphed
    ) as decoder:
        return decoder.decode(prompts, stop=stop)
