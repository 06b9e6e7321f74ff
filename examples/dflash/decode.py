"""Decoding with the target: many prompts at once, one token a pass, greedily or by drawing.

Guarantees:
- Rows are independent: a batch gives what each prompt alone gives, to rounding. A draw depends on the row's seed and
  the token's place, not on the batch, the thread or the device.
- Tokens are chosen, written and counted on the device; the host looks every few steps at whether all rows have ended.
- On CUDA the step is a graph for each of a few visible lengths, and serves batch after batch of one shape.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .stepping import MAX_VISIBLE_LENGTHS, BatchedDecoder, Steps, TargetDecoder, is_any_of, pad_prompts
from .target import Target

LOOP_NGRAM = 8
LOOP_SHARE = 0.2
_CHECK_EVERY = 16  # steps between two looks from the host at whether all rows have ended


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


class _Rows:
    """The rows of a batch on the device, and the step that gives each its next token. All tensors stay in place."""

    def __init__(
        self, target: Target, num_rows: int, max_length: int, max_new_tokens: int, visible_step: int | None
    ) -> None:
        device = target.device
        self.decoder = TargetDecoder(target, num_rows, max_length, visible_step=visible_step)
        self.ends = torch.tensor(target.eos_token_ids or (-1,), device=device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.last)  # of ``last``
        self.index = torch.zeros((), dtype=torch.int64, device=device)  # tokens each row has so far
        self.ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.out = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)
        self.gaps, self.tops = (torch.zeros_like(self.out, dtype=torch.float32) for _ in range(2))
        self.noise = torch.zeros_like(self.out, dtype=torch.float64)  # uniform in [0, 1)
        self.temperature = torch.ones((), device=device)

    def begin(self, tokens: Tensor, lengths: Tensor, num_real: int, drawn: bool) -> None:
        """Read the prompts and choose the first tokens; rows from ``num_real`` on are none."""
        self.rewind()
        for store in (self.out, self.gaps, self.tops):
            store.zero_()
        self.ended.copy_(torch.arange(len(lengths), device=lengths.device) >= num_real)
        logits = self.decoder.prefill(tokens, lengths).logits[:, 0]
        self.positions.copy_(lengths)
        self._choose(logits, drawn)

    def rewind(self) -> None:
        """To where no row has a token."""
        self.index.zero_()
        self.positions.zero_()

    def step(self, visible: int, drawn: bool) -> Tensor:
        """Another token for each row. Returns how many rows have not ended [1]."""
        logits = self.decoder.step(self.last[:, None], self.positions[:, None], visible).logits[:, 0]
        self.positions.add_(1)
        self._choose(logits, drawn)
        return (~self.ended).sum(dim=0, keepdim=True)

    def _choose(self, logits: Tensor, drawn: bool) -> None:
        logits = logits.float()
        place = self.index.expand(len(logits), 1)
        best = logits.argmax(-1, keepdim=True)
        top = logits.gather(1, best)
        second = logits.scatter(1, best, float("-inf")).amax(-1, keepdim=True)
        chosen = draw(logits, self.temperature, self.noise.gather(1, place)) if drawn else best
        for store, value in ((self.out, chosen), (self.gaps, top - second), (self.tops, top)):
            store.scatter_(1, place, value)
        self.last.copy_(chosen[:, 0])
        self.ended.logical_or_(is_any_of(self.last, self.ends))
        self.index.add_(1)


class BatchDecoder(BatchedDecoder[_Rows, Decoded]):
    """Lets the target answer batch after batch, alone: see ``BatchedDecoder``."""

    _warm_up_arguments = (False,)  # greedy

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop: threading.Event | None = None,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
    ) -> Decoded:
        """Answer a batch of prompts.

        Args:
            prompts: token ids; rows of similar length waste least.
            stop: once set, the answers end where they are.
            temperature: 0 is greedy.
            seeds: of each prompt's draws, where temperature > 0.
        """
        rows, steps = self._rows_for(prompts)
        tokens, lengths = pad_prompts(prompts, self._target.device, len(rows.last))
        drawn = temperature > 0
        if drawn:
            assert seeds is not None
            rows.temperature.fill_(temperature)
            rows.noise[: len(prompts)] = uniform_noise(seeds, self._max_new_tokens).to(rows.noise.device)
        rows.begin(tokens, lengths, len(prompts), drawn)
        look_every = 1 if self._target.device.type == "cpu" else _CHECK_EVERY
        longest, num_tokens = max(map(len, prompts)), 1
        num_open = (~rows.ended).sum(dim=0, keepdim=True)
        while num_tokens < self._max_new_tokens and not (stop is not None and stop.is_set()):
            if num_tokens % look_every == 0 and int(num_open) == 0:
                break
            num_open = steps(rows.decoder.visible_length(longest + num_tokens), drawn)
            num_tokens += 1
        answers = [
            cut_at_end(row, self._target.eos_token_ids) for row in rows.out[: len(prompts), :num_tokens].tolist()
        ]
        gaps, tops = (values[: len(prompts)].to("cpu", copy=True) for values in (rows.gaps, rows.tops))
        return Decoded(answers, gaps, tops, num_tokens)

    def _make(self, num_rows: int, max_prompt: int) -> tuple[_Rows, Steps]:
        max_length = max_prompt + self._max_new_tokens
        rows = _Rows(self._target, num_rows, max_length, self._max_new_tokens, self._visible_step)
        return rows, Steps(rows.step, self._graphed, 2 * MAX_VISIBLE_LENGTHS)  # greedy and drawn


def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    stop: threading.Event | None = None,
    graphed: bool = False,
) -> Decoded:
    """The target's own answers to one batch of prompts: see ``BatchDecoder``."""
    longest = max(map(len, prompts))
    with BatchDecoder(target, max_new_tokens, num_rows=len(prompts), max_prompt=longest, graphed=graphed) as decoder:
        return decoder.decode(prompts, temperature=temperature, seeds=seeds, stop=stop)


def uniform_noise(seeds: Sequence[int], count: int) -> Tensor:
    """[R, count] float64 in [0, 1) on the CPU: a row for each seed, whatever the others."""
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


def draw(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Token ids [R, 1] from softmax(logits / temperature), by inversion: the first whose cumulated share exceeds noise.

    Args:
        logits: [R, V].
        noise: [R, 1] float64 in [0, 1).
    """
    # float64: in float32 the sums round by more than the rarest tokens' shares
    shares = (logits / temperature).softmax(-1, dtype=torch.float64).cumsum(-1)
    below = shares <= noise * shares[:, -1:]
    return below.sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)


def cut_at_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first end-of-text."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def loops(answer: Sequence[int]) -> bool:
    """Whether at least ``LOOP_SHARE`` of the answer's 8-grams came up in it before."""
    grams = [tuple(answer[start : start + LOOP_NGRAM]) for start in range(len(answer) - LOOP_NGRAM + 1)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) >= LOOP_SHARE
