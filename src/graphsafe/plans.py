"""What each thread knows of a graphed function's signatures, and the counts of all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .call_buffers import CallBuffers
from .context import ThreadContext
from .draws import Draws
from .errors import GraphsafeError
from .fast_path import FastPath
from .leaf_owners import Leaves
from .repairs.rng_positions import Trace
from .signature import Call


@dataclass
class GraphedStats:
    """Counts of one graphed function, over all threads.

    Attributes:
        captures: of signatures and of further buffers for calls in flight, backward graphs not counted.
        replays, eager_calls: how calls were served, capturing calls among the replays.
        mismatches: calls of a signature that was new to their thread, its first excepted.
        num_graphs: alive now, backward graphs too.
        num_bytes: that their captures added to CUDA graph pools.
    """

    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    mismatches: int = 0
    num_graphs: int = 0
    num_bytes: int = 0

    def add(self, other: GraphedStats) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(eq=False)
class Plan:
    """What a thread knows of one signature."""

    summary: str
    admitted: bool
    calls: int = 0
    draws: bool | None = None
    leaves: Leaves | None = None  # that gradients reach, as of the last eager call
    trace: Trace | None = None  # what an eager call does with the random state, on CUDA
    compiles: int = 0  # captures given up because a compile started
    stale: int = 0  # captures in a row that were of no use
    used: bool = False  # since the last capture
    crowded: bool = False
    buffers: dict[tuple[int, ...], list[CallBuffers]] = field(default_factory=dict)

    def drop(self) -> None:
        """Let the graphs go, and what was learnt from the calls before them."""
        for some in self.buffers.values():
            for one in some:
                one.close()
        self.buffers.clear()
        self.draws = self.leaves = None


class State:
    """One thread's graphs of one function, in one context."""

    def __init__(self, context: ThreadContext, epoch: int, on_close: Callable[[State], None], draws: Draws) -> None:
        self.context, self.epoch, self.on_close, self.draws = context, epoch, on_close, draws
        self.plans: dict[object, Plan] = {}
        self.counts = GraphedStats()
        self.warned = False
        self.modules: list[torch.nn.Module] | None = None

    def drop(self) -> None:
        for plan in self.plans.values():
            plan.drop()
        self.plans.clear()
        self.draws.forget()
        self.warned, self.modules = False, None

    def close(self) -> None:
        """The context ends, in its thread: drop everything, which its pools hold."""
        self.drop()
        self.on_close(self)

    def live(self) -> list[CallBuffers]:
        return [one for plan in tuple(self.plans.values()) for some in tuple(plan.buffers.values()) for one in some]


class PerThread(threading.local):
    """This thread's states, and the short ways of its last signatures."""

    def __init__(self) -> None:
        self.states: dict[ThreadContext, State] = {}
        self.fast: list[FastPath] = []


def check_aliases(call: Call) -> None:
    """Raise where an input is an alias of an output that a later call has overwritten."""
    for index, tensor in enumerate(call.tensors):
        mark = getattr(tensor, "_graphsafe_alias", None) or getattr(tensor._base, "_graphsafe_alias", None)
        if mark is not None and mark[0].generation != mark[1]:
            raise GraphsafeError(
                f"Input {index} is an output of an earlier call that a later one has overwritten (outputs='alias'). "
                "clone() it before that call, or use outputs='copy'."
            )
