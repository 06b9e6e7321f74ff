"""Prompt lookup: drafts what followed the last n tokens where they came up before. It costs nothing and needs no model.

The bar that a trained drafter has to clear: on answers that repeat their prompt, or themselves, it does well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_NGRAM = 3


class History:
    """One row's tokens, and where each n-gram of them was last followed by something."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = len(self.tokens)
            for size in range(1, min(MAX_NGRAM, place) + 1):
                self._followed[tuple(self.tokens[place - size :])] = place
            self.tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest suffix found; none if there is none."""
        for size in range(min(MAX_NGRAM, len(self.tokens)), 0, -1):
            place = self._followed.get(tuple(self.tokens[-size:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class LookupDrafting:
    """Prompt lookup as a ``speculate.Drafting``."""

    layer_ids: tuple[int, ...] = ()
    on_host = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def start(
        self, prompts: Sequence[Sequence[int]], first: Tensor, max_length: int, features: Tensor | None, valid: Tensor
    ) -> None:
        self._rows = [History([*prompt, token]) for prompt, token in zip(prompts, first.tolist(), strict=True)]
        self._ended = [False] * len(prompts)

    def propose(self, last: Tensor, positions: Tensor, visible: int) -> Tensor:
        count = self.block_size - 1
        drafts = [[] if ended else row.draft(count) for row, ended in zip(self._rows, self._ended, strict=True)]
        # Token 0 where nothing was found: a guess as good as any, and the target decides.
        return torch.tensor([draft + [0] * (count - len(draft)) for draft in drafts], device=last.device)

    def observe(self, committed: Tensor, features: Tensor | None, positions: Tensor, valid: Tensor) -> None:
        counts = valid.sum(1).tolist()
        for row, tokens, count in zip(self._rows, committed.tolist(), counts, strict=True):
            row.extend(tokens[:count])
        self._ended = [count == 0 for count in counts]  # an open row always gains a token

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self._rows, self._ended = [self._rows[row] for row in kept], [self._ended[row] for row in kept]
