"""Passes of the target over the next tokens of a batch, with a cache that stays in place, as CUDA graphs.

The slot of a token in the cache is its position. A query at position p sees slots 0..p, so a rejected token needs no
clean-up: it is past its row's position, hence masked, and written over by the token that takes its place.

Guarantees:
- Rows are independent: a batch gives what each prompt alone gives, to rounding.
- Shapes depend on the batch, the number of tokens fed and a few visible lengths, never on how far a row has come: a
  pass can be captured, and one graph a visible length serves all batches of the same number of rows.
- A step that cannot be captured runs eagerly, with one warning, and gives the same.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

import graphsafe as gs

from .target import Target

NUM_WARMUPS = 2  # eager steps of a visible length, before it is captured
MAX_VISIBLE_LENGTHS = 16
_VISIBLE_STEP = {
    "cpu": 32,
    "cuda": 128,
}  # attention reads the cache up to the next multiple: less work, or fewer graphs
_PREFILL_STEP = {"cpu": 1, "cuda": 16}  # prompts are padded to a multiple: attention kernels want aligned masks


class SlotCache:
    """Keys and values of every layer. Its tensors are made by the first pass, and stay."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        self.keys: dict[int, Tensor] = {}  # a layer: [R, S, heads, D]
        self.values: dict[int, Tensor] = {}

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.num_rows = len(rows)
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = tensor[rows]


class _Pass:
    """One pass over a SlotCache: what transformers asks of a cache, and no more."""

    is_compileable = False

    def __init__(self, cache: SlotCache, positions: Tensor, visible: int) -> None:
        self._cache, self._positions, self._visible = cache, positions, visible
        self._rows = torch.arange(cache.num_rows, device=positions.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [R, heads, N, D] at the positions [R, N]; all visible slots come back, [R, heads, visible, D]."""
        return self._written(self._cache.keys, layer, keys), self._written(self._cache.values, layer, values)

    def _written(self, store: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        if layer not in store:
            store[layer] = new.new_zeros(self._cache.num_rows, self._cache.num_slots, new.shape[1], new.shape[3])
        store[layer][self._rows, self._positions] = new.transpose(1, 2)
        return store[layer][:, : self._visible].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # positions and mask are always given, so nothing is derived from it


@dataclass
class Said:
    """What the target says to the tokens fed.

    Attributes:
        logits: [R, N, V], of the token after each; [R, 1, V] after a prefill.
        features: [R, N, K*H], the layers' outputs side by side; None where none were asked for.
    """

    logits: Tensor
    features: Tensor | None


class TargetDecoder:
    """The target with a cache for one batch of rows after the other.

    Args:
        target: the target.
        num_rows: R.
        max_length: longest row, prompt included.
        layer_ids: layers whose outputs every pass returns.
        visible_step: visible lengths are multiples of it; None: by the device.
    """

    def __init__(
        self,
        target: Target,
        num_rows: int,
        max_length: int,
        layer_ids: Sequence[int] = (),
        visible_step: int | None = None,
    ) -> None:
        step = visible_step or _VISIBLE_STEP[target.device.type]
        self._visible_step = _rounded_up(-(-max_length // MAX_VISIBLE_LENGTHS), step)
        self.max_length = _rounded_up(max_length, step)
        self.layer_ids = tuple(layer_ids)
        self._target = target
        self._cache = SlotCache(num_rows, self.max_length)
        self._num_groups = target.num_heads // target.num_kv_heads
        # transformers renames the argument between versions
        named = inspect.signature(target.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Said:
        """Read the prompts.

        Args:
            tokens: [R, P], padded on the right.
            lengths: [R], at least 1.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden, features = self._forward(tokens, positions, tokens.shape[1])
        rows = torch.arange(len(tokens), device=tokens.device)
        return Said(self._head(hidden[rows, lengths - 1])[:, None], features)

    def step(self, tokens: Tensor, positions: Tensor, visible: int) -> Said:
        """Feed [R, N] tokens at ``positions``, each row's consecutive. Can be captured.

        Args:
            visible: from ``visible_length`` of the furthest position and one, or more.
        """
        hidden, features = self._forward(tokens, positions, visible)
        return Said(self._head(hidden), features)

    def visible_length(self, length: int) -> int:
        """The least visible length that covers ``length`` slots."""
        return min(_rounded_up(length, self._visible_step), self.max_length)

    def visible_lengths(self, first: int) -> list[int]:
        """All that rows of ``first`` tokens and more may need."""
        starts = range(self.visible_length(first), self.max_length + self._visible_step, self._visible_step)
        return list(dict.fromkeys(min(start, self.max_length) for start in starts))

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self._cache.keep(rows)

    def _forward(self, tokens: Tensor, positions: Tensor, visible: int) -> tuple[Tensor, Tensor | None]:
        target = self._target
        features = torch.empty(
            tokens.numel(), len(self.layer_ids), target.hidden_size, dtype=target.dtype, device=tokens.device
        )
        with target.collecting({layer: features[:, place] for place, layer in enumerate(self.layer_ids)}):
            out = target.decoder(
                input_ids=tokens,
                position_ids=positions.expand_as(tokens),
                attention_mask=self._mask(positions, visible),
                use_cache=True,
                **{self._cache_argument: _Pass(self._cache, positions, visible)},
            )
        return out.last_hidden_state, features.view(*tokens.shape, -1) if self.layer_ids else None

    def _mask(self, positions: Tensor, visible: int) -> Tensor:
        """[R or 1, 1, groups * N, visible] for ``grouped_attention``."""
        hidden = torch.arange(visible, device=positions.device) > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._target.dtype, device=positions.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat(1, 1, self._num_groups, 1)

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._target.lm_head_weight)


class _Held:
    """A step that its graphs reach by way of this object, so that ``Steps.close`` can let it go at once."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self.step: Callable[..., Tensor] | None = step
        self.__qualname__ = step.__qualname__  # for messages

    def __call__(self, *args: int) -> Tensor:
        assert self.step is not None
        return self.step(*args)


class Steps:
    """A step of decoding: a CUDA graph for each set of arguments, or eager.

    Args:
        step: takes numbers alone, works in place on tensors that stay where they are, and returns a small tensor. (It
            is copied out, so that all the graphs can share one pool.)
        graphed: whether to capture it. The calling thread then needs a graphsafe context.
        max_graphs: sets of arguments.
    """

    def __init__(self, step: Callable[..., Tensor], graphed: bool, max_graphs: int = MAX_VISIBLE_LENGTHS) -> None:
        self._held = _Held(step)
        self._graphed = gs.graphed(self._held, num_warmup_iters=NUM_WARMUPS, max_graphs=max_graphs) if graphed else None

    @property
    def num_captures(self) -> int:
        """Graphs so far; 0 once the step was found not to be one."""
        return 0 if self._graphed is None else self._graphed.stats().captures

    def __call__(self, *args: int) -> Tensor:
        if self._graphed is not None:
            try:
                result: Tensor = self._graphed(*args)
                return result
            except gs.CaptureError as exc:  # nothing has run
                warnings.warn(f"Decoding goes on without CUDA graphs, which is slower: {exc}", stacklevel=2)
                self._graphed.close()
                self._graphed = None
        return self._held(*args)

    def close(self) -> None:
        """Let the graphs and the step go."""
        if self._graphed is not None:
            self._graphed.close()
            self._graphed = None
        self._held.step = None


class Rows(Protocol):
    """The rows of a batch on the device."""

    decoder: TargetDecoder

    def rewind(self) -> None:
        """To where a step is harmless: to before the first token."""


R = TypeVar("R", bound=Rows)
Found = TypeVar("Found")


class BatchedDecoder(Generic[R, Found]):
    """Answers batch after batch.

    With graphs, all batches are padded to ``num_rows`` and share caches and graphs; without, each has caches of its own
    size. Used by one thread, which with graphs needs a graphsafe context on the target's device.

    Args:
        target: the target.
        max_new_tokens: longest answer.
        num_rows: prompts of the largest batch.
        max_prompt: longest prompt.
        graphed: run the steps as graphs; None: on CUDA.
        visible_step: see ``TargetDecoder``.
    """

    _warm_up_arguments: tuple[int, ...] = ()  # of a step, after the visible length

    def __init__(
        self,
        target: Target,
        max_new_tokens: int,
        *,
        num_rows: int,
        max_prompt: int,
        graphed: bool | None = None,
        visible_step: int | None = None,
    ) -> None:
        self._target, self._max_new_tokens, self._visible_step = target, max_new_tokens, visible_step
        self._num_rows, self._max_prompt = num_rows, max_prompt
        self._graphed = target.device.type == "cuda" if graphed is None else graphed
        self._shared: tuple[R, Steps] | None = None

    def decode(self, prompts: Sequence[Sequence[int]], *, stop: threading.Event | None = None) -> Found:
        """Answer a batch of prompts, token ids; once ``stop`` is set, the answers end where they are."""
        raise NotImplementedError

    def _make(self, num_rows: int, max_prompt: int) -> tuple[R, Steps]:
        """The state of so many rows, and the steps that work on it."""
        raise NotImplementedError

    @property
    def num_captures(self) -> int:
        """Graphs so far; 0 where the steps cannot be captured."""
        return 0 if self._shared is None else self._shared[1].num_captures

    @torch.inference_mode()
    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Capture what greedy answers to batches of these prompts need, and on CUDA load the kernels."""
        if not self._graphed and self._target.device.type == "cpu":
            return
        first, at_once = prompts[: self._num_rows], threading.Event()
        at_once.set()
        self.decode(first, stop=at_once)
        if self._graphed:
            rows, steps = self._rows_for(first)
            for visible in rows.decoder.visible_lengths(min(map(len, prompts)) + 1):
                for _ in range(NUM_WARMUPS + 1):
                    rows.rewind()
                    steps(visible, *self._warm_up_arguments)

    def close(self) -> None:
        """Let graphs and caches go."""
        if self._shared is not None:
            self._shared[1].close()
            self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows_for(self, prompts: Sequence[Sequence[int]]) -> tuple[R, Steps]:
        if not self._graphed:
            return self._make(len(prompts), max(map(len, prompts)))
        if self._shared is None:
            self._shared = self._make(self._num_rows, self._max_prompt)
        return self._shared


def pad_prompts(
    prompts: Sequence[Sequence[int]], device: torch.device, num_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Prompts as [R, P], padded on the right, and their lengths [R]; rows that are missing hold one token."""
    rows = [*prompts, *([[0]] * ((num_rows or len(prompts)) - len(prompts)))]
    lengths = [len(prompt) for prompt in rows]
    width = _rounded_up(max(lengths), _PREFILL_STEP[device.type])
    padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in rows]
    return torch.tensor(padded, device=device), torch.tensor(lengths, device=device)


def is_any_of(tokens: Tensor, ids: Tensor) -> Tensor:
    """Which of the tokens are among ``ids`` [n]."""
    return (tokens[..., None] == ids).any(-1)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
