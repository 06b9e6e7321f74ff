"""A captured graph: its replay, its end, and what it keeps alive.

Guarantees:
- It belongs to the thread that captured it, and dies with that thread's context.
- It is destroyed by its own thread, outside captures, neither by the garbage collector nor by a dropped reference.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from . import gate, walk
from .context import ThreadContext
from .errors import GraphsafeError
from .recording import OperatorRecorder
from .repairs.rng_positions import Position


class OpenSession(Protocol):
    """A capture in progress."""

    @property
    def is_open(self) -> bool: ...

    def put_back(self) -> object: ...


class Graph:
    """What ``capture()`` recorded. It belongs to the thread that captured it and dies with that thread's context.

    Attributes:
        name: of what was captured, for reports.
        pool: handle of its memory pool; None on the CPU.
        pool_shared: whether the pool was made for other graphs too.
        num_bytes: that the allocator reserved while it was captured; 0 on the CPU, and where a shared pool had room.
            What unmanaged threads reserved meanwhile counts too.
        num_replays: how often it was replayed.
        forward_offset: of the context's generator, where the forward began whose backward this is.
    """

    def __init__(
        self,
        context: ThreadContext,
        pool: tuple[int, int] | None = None,
        *,
        name: str = "graph",
        pool_shared: bool = False,
    ) -> None:
        self._raw: torch.cuda.CUDAGraph | None = None  # first: __del__ reads it
        self.name, self.pool, self.pool_shared = name, pool, pool_shared
        self.num_bytes = self.num_replays = self.forward_offset = 0
        self._context = context
        self._ident = threading.get_ident()
        self._session: OpenSession | None = None  # while it is captured
        self._recorder: OperatorRecorder | None = None
        # (generator state, where it begins, how far a replay moves it where that is known)
        self._states: list[tuple[torch.Generator, Position, int | None]] = []
        self._end: Position | None = None  # where a replay leaves the context's generator; None: as it leaves the state
        self._seed: int | None = None
        self._draws: bool | None = None  # None: not known before the first replay
        self._kept: list[Any] = []
        context.register(self)

    def replay(self) -> None:
        """Run the captured work again, on the current stream.

        Raises:
            WrongThreadError: called from another thread than the one that captured.
            GraphsafeError: the graph was reset, its context has ended, or nothing was captured.
        Thread safety: the capturing thread only; replays of other threads run beside it. No lock on CUDA.
        Sync: none.
        """
        if threading.get_ident() != self._ident:
            self._context.check_thread("A graph of the context")
        raw = self._raw
        if raw is None:
            self._replay_on_cpu()
            return
        if gate.capturing() is not None:
            raise GraphsafeError(
                "A graph was replayed inside a capture. Replay it outside, or call its function inside."
            )
        if self._draws is False:
            raw.replay()
        else:
            self._replay_drawing(raw)
        self._context.counters.replays += 1
        self.num_replays += 1

    def replay_at_once(self) -> None:
        """``replay()`` of a graph that the caller knows to be alive, this thread's, and outside a capture."""
        if self._draws is False and self._raw is not None:
            self._raw.replay()
            self._context.counters.replays += 1
            self.num_replays += 1
        else:
            self.replay()

    def _replay_drawing(self, raw: torch.cuda.CUDAGraph) -> None:
        # The graph draws from states of its own, which take the context's place in its sequence before every replay and
        # move the context on by as much as they drew.
        ours, states = self._context.generator, self._states
        seed, offset = ours.initial_seed(), ours.get_offset()
        begins = [(self.forward_offset if at.of_forward else offset) + at.offset for _, at, _ in states]
        for (state, _, _), begin in zip(states, begins, strict=True):
            if seed != self._seed:
                state.manual_seed(seed)
            state.set_offset(begin)
        self._seed = seed
        raw.replay()
        if self._draws is None:
            drawn = [state.get_offset() - begin for (state, _, _), begin in zip(states, begins, strict=True)]
            self._draws = any(drawn)
            expected = [count for _, _, count in states]
            if self._end is not None and drawn != expected:
                raise GraphsafeError(
                    f"A captured call drew {drawn} random numbers a thread between its random states, and {expected} "
                    "in the eager call before. It must draw alike in every call."
                )
        ours.set_offset(states[0][0].get_offset() if self._end is None else offset + self._end.offset)

    def _replay_on_cpu(self) -> None:
        recorder = self._recorder
        if recorder is None:
            raise GraphsafeError(
                "This graph holds nothing to replay: it was reset, its capture failed, or its context has ended. "
                "Capture it again inside a thread context."
            )
        with self._context.seat(exclusive=recorder.draws):
            recorder.replay()
        self._context.counters.replays += 1
        self.num_replays += 1

    def reset(self) -> None:
        """Drop what was captured and free its memory; the tensors it kept alive are let go.

        Raises:
            WrongThreadError: called from another thread than the one that captured.
            GraphsafeError: it is being captured.
        """
        if threading.get_ident() != self._ident and not self._context.closed:
            self._context.check_thread("A graph of the context")
        if self._session is not None and self._session.is_open:
            raise GraphsafeError("A graph was reset inside its own capture. Leave the block first.")
        self.close()

    @property
    def closed(self) -> bool:
        """Whether there is nothing to replay: it was reset, its capture failed, or its context has ended."""
        return self._raw is None and self._recorder is None

    def close(self) -> None:
        raw, self._raw, self._recorder = self._raw, None, None
        kept, self._kept = self._kept, []
        session, self._session = self._session, None
        self._context.unregister(self)
        own = threading.get_ident() == self._ident
        if session is not None and own:  # the context ends around an open block
            session.put_back()
        if raw is None:
            return
        self._context.graveyard.append((raw, kept))
        if own and gate.capturing() is None:
            self._context.drain()  # else the context's own thread does it, outside captures

    def __del__(self) -> None:
        if self._raw is not None:
            self.close()

    def keep(self, *roots: Any) -> None:
        """Keep alive every tensor that ``roots`` reach now."""
        self._kept.extend(walk.tensors(*roots))
