"""The wall-clock of ways of decoding, each in graphsafe Workers of its own.

Guarantees:
- What is captured or loaded once is captured and loaded before the clock starts.
- A way leaves neither graphs nor caches behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import graphsafe as gs

from .data import Prompt
from .devices import cores_shared_out
from .stepping import BatchedDecoder
from .target import Target

Found = TypeVar("Found")


@dataclass(frozen=True)
class Clock:
    """How long a way of decoding took.

    Attributes:
        seconds: for all prompts, in batches.
        graphed: whether it ran as CUDA graphs.
        num_single, single_seconds: for the first prompts one at a time: how many, and how long.
    """

    seconds: float = 0.0
    graphed: bool = False
    num_single: int = 0
    single_seconds: float = 0.0


@dataclass(frozen=True)
class Clocks:
    """Times ways of decoding over the same prompts, each in threads of its own: a lane each takes its share of a batch.

    Attributes:
        prompts: in the order of their lengths.
        batch_size: prompts of a batch.
        num_lanes: threads.
        num_single: of the prompts, to be timed one at a time too.
    """

    device: torch.device
    prompts: list[Prompt]
    batch_size: int
    num_lanes: int
    num_single: int

    def time(self, make: Callable[[int], BatchedDecoder[Any, Found]]) -> tuple[list[tuple[list[Prompt], Found]], Clock]:
        """Shares of batches and what was found for them, and how long that took: the slowest lane's seconds.

        Args:
            make: a decoder for batches of so many prompts.
        """
        shares: list[list[list[Prompt]]] = [[] for _ in range(self.num_lanes)]
        for start in range(0, len(self.prompts), self.batch_size):
            batch = self.prompts[start : start + self.batch_size]
            size = -(-len(batch) // self.num_lanes)
            for lane, first in enumerate(range(0, len(batch), size)):
                shares[lane].append(batch[first : first + size])
        done = self._run(make, [share for share in shares if share])
        found = [pair for pairs, _, _ in done for pair in pairs]
        seconds, graphed = max(seconds for _, seconds, _ in done), all(captures > 0 for _, _, captures in done)
        single = [[prompt] for prompt in self.prompts[: self.num_single]]
        if not single:
            return found, Clock(seconds, graphed)
        ((_, single_seconds, _),) = self._run(make, [single])
        return found, Clock(seconds, graphed, len(single), single_seconds)

    def _run(
        self, make: Callable[[int], BatchedDecoder[Any, Found]], shares: list[list[list[Prompt]]]
    ) -> list[tuple[list[tuple[list[Prompt], Found]], float, int]]:
        with gs.WorkerGroup() as group:
            workers = [
                group.spawn(_decode_lane, make, share, group.stop, device=self.device, name=f"decode-{index}")
                for index, share in enumerate(shares)
            ]
        return [worker.result() for worker in workers]


def _decode_lane(
    make: Callable[[int], BatchedDecoder[Any, Found]], batches: list[list[Prompt]], stop: threading.Event
) -> tuple[list[tuple[list[Prompt], Found]], float, int]:
    """One lane's batches and what was found, the seconds that took once all was captured, and how much was captured."""
    decoder = make(max(map(len, batches)))
    try:
        decoder.warm_up([prompt.tokens for batch in batches for prompt in batch])
        began = time.perf_counter()
        found = [(batch, decoder.decode([prompt.tokens for prompt in batch], stop=stop)) for batch in batches]
        return found, time.perf_counter() - began, decoder.num_captures
    finally:
        decoder.close()


@contextmanager
def lanes(target: Target, num_prompts: int) -> Iterator[int]:
    """How many threads decode: one on a GPU, one for each core on CPU, among which the cores are shared out."""
    num_lanes = min(torch.get_num_threads(), num_prompts) if target.device.type == "cpu" else 1
    with cores_shared_out(num_lanes):
        yield num_lanes
