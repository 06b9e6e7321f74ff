"""Several processes, on one host or many, that train one drafter together: what they agree on, and who is still there.

    torchrun --nproc-per-node 2 -m examples.dflash train --targets cuda:0,cuda:1 --drafters cuda:2,cuda:3 ...

torchrun says who is who and gives a store. ``--targets`` and ``--drafters`` name the devices of a host; its processes
share them out. Every drafter thread of every process is one rank of one group.

Guarantees:
- A process that ends with an error, is killed, or is not heard of for ``--peer-timeout-s`` ends all others, with an
  error that names it. None waits for it longer than that.
- A stop is agreed on: all processes read the same number of rounds.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as _rendezvous

from .config import InputError
from .pipeline import Topology
from .replicas import ReplicaLost, attempt, connect, leave, wait_for

_TIMEOUT = datetime.timedelta(minutes=30)  # for others to load their models; the dead are noticed sooner
_BEAT_S = 1.0
_POLL_S = 0.1
_ENDED, _FAILED = "ended", "failed "


class PeerLost(RuntimeError):
    """Another process of the run has failed or is gone."""


def end_process(code: int) -> NoReturn:
    """End this process with an exit status. One of several ends at once: all is written and the others have been told,
    and a thread of Gloo or of the store that is still inside torch while Python ends would make torch abort.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _meet(store: Any, rank: int, size: int) -> str:
    """A name for this start of all processes, once every one of them is there.

    torchrun may give a restarted run the store of the run before, with all that was written into it. So process 0 calls
    with a word that was never used, the others answer it, each with its own, and it says whose answers it has heard:
    who finds its own word among them knows that the call is of this start.

    Raises:
        PeerLost: not all have come in time.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + _TIMEOUT.total_seconds()
    answers: dict[int, str] = {0: word}
    if rank == 0:
        store.set("call", word)
    while time.monotonic() < deadline:
        call = store.get("call").decode() if store.check(["call"]) else ""
        if rank == 0:
            for other in range(1, size):
                if other not in answers and store.check([f"{word}/{other}"]):
                    answers[other] = store.get(f"{word}/{other}").decode()
            if len(answers) == size:
                store.set(f"{word}/all", " ".join(answers[other] for other in range(size)))
                return word
        elif call:
            store.set(f"{call}/{rank}", word)
            heard = store.get(f"{call}/all").decode().split() if store.check([f"{call}/all"]) else []
            if len(heard) == size and heard[rank] == word:
                return call
        time.sleep(_POLL_S)
    raise PeerLost(f"Of {size} processes not all have come within {_TIMEOUT}; process {rank} has.")


class Processes:
    """This process among those of the run. Made and closed by the main thread.

    Args:
        rank, size: this one's, and how many there are.
        local_rank, local_size: the same among those of this host.
        store: shared by all; None where there is one process.
        timeout_s: silence after which another process is taken for dead.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        store: Any = None,
        timeout_s: float = 60,
    ) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self._timeout_s = timeout_s
        self._store: Any = dist.HashStore() if store is None else store
        self._group: Any = None
        self._stuck = False  # an agreement was given up
        self._broken_off: str | None = None
        self._seen: dict[int, tuple[str, float]] = {}  # of each other process: its last beat, and when it was new
        self._lost: str | None = None
        self._on_loss: list[Callable[[], object]] = []
        self._lock = threading.Lock()  # guards the two above; taken alone
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if size > 1:
            self._announce("0")
            self._watcher = threading.Thread(target=self._watch, name="peers", daemon=True)
            self._answered_s = time.monotonic()
            self._watcher.start()
            threading.Thread(target=self._watch_store, name="peers-store", daemon=True).start()

    @classmethod
    def join(cls, timeout_s: float) -> Processes:
        """This process, as torchrun's environment describes it; the only one where there is no such environment.

        Raises:
            InputError: the environment is incomplete, or the store is not reached.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        try:
            store, rank, size = next(iter(_rendezvous("env://", timeout=_TIMEOUT)))
            local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        except (KeyError, ValueError, RuntimeError) as exc:
            raise InputError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but this process cannot join the others ({exc}). Start it "
                "with torchrun, or unset WORLD_SIZE."
            ) from exc
        prefix = _meet(store, rank, size)
        return cls(rank, size, local_rank, local_size, dist.PrefixStore(prefix, store), timeout_s)

    def share(self, devices: Topology) -> Topology:
        """This process's part of its host's devices.

        Raises:
            InputError: they cannot be shared out evenly.
        """
        return Topology(
            self._part(devices.targets, "--targets"),
            self._part(devices.drafters, "--drafters"),
        )

    def _part(self, devices: Sequence[torch.device], option: str) -> tuple[torch.device, ...]:
        count, rest = divmod(len(devices), self.local_size)
        if rest or not count:
            raise InputError(
                f"{option} names {len(devices)} devices, which the {self.local_size} processes of this host cannot "
                "share evenly. Name as many for each, or start fewer processes (--nproc-per-node)."
            )
        return tuple(devices[self.local_rank * count :][:count])

    def store(self, purpose: str) -> Any:
        """A store for one thread of each process, apart from those of other purposes.

        Raises:
            PeerLost: the store is gone.
        """
        store = self._store if self.size == 1 else self._asked(self._store.clone)
        return dist.PrefixStore(purpose, store)

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        """A text that process 0 makes, for all. Main thread.

        Raises:
            PeerLost: process 0 failed, or is gone.
        """
        if self.size == 1:
            return make()
        store = self.store("first")
        if self.rank == 0:
            text = make()
            store.set(name, text)
            return text
        store.set_timeout(_TIMEOUT)
        return str(self._asked(lambda: store.get(name)).decode())

    def agree(self, number: int, given_up: Callable[[], bool] = lambda: False) -> int:
        """The largest of the numbers that all processes give, each the same number of times. One thread of each.

        Args:
            given_up: looked at now and then: whether to wait for the others no more.
        Raises:
            PeerLost: another process failed, or is gone, or the wait is given up.
        """
        if self.size == 1:
            return number
        value = torch.tensor([number])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX

        def ends() -> bool:
            return self._lost is not None or given_up()

        try:
            if self._group is None:
                self._group = connect(self.store("agree"), self.rank, self.size, ends)
            wait_for(self._group.allreduce([value], options), ends)
        except RuntimeError as exc:
            self._stuck = isinstance(exc, ReplicaLost)
            if given_up():
                raise PeerLost("The wait for the other processes was given up.") from exc
            raise self.explain() from exc
        return int(value)

    def leave_agreement(self) -> None:
        """No more of ``agree``: others that wait for it get PeerLost. Its thread."""
        groups, self._group = [self._group], None
        leave(groups, self._stuck)

    def on_loss(self, function: Callable[[], object]) -> None:
        """Have ``function`` called, in another thread, once another process is lost; at once if it is."""
        with self._lock:
            lost = self._lost is not None
            if not lost:
                self._on_loss.append(function)
        if lost:
            function()

    @property
    def lost(self) -> str | None:
        """Which other process is lost, and why; None: none is."""
        return self._lost

    def check(self) -> None:
        """Raise PeerLost if another process is lost."""
        if self._lost is not None:
            raise PeerLost(self._lost)

    def explain(self) -> PeerLost:
        """The error for a collective that failed: what is known of the others, once there has been time to hear it."""
        deadline = time.monotonic() + 3 * _BEAT_S
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        silent = [str(rank) for rank, (_, at) in list(self._seen.items()) if time.monotonic() - at > 2 * _BEAT_S]
        who = f"Process {' and '.join(silent)}, which is silent now," if silent else "Another process of the run"
        return PeerLost(self._lost or f"{who} broke off: it was killed, or its host is gone.")

    def break_off(self, reason: str) -> None:
        """Have ``close`` tell the others that this process has left them in the middle of the run."""
        self._broken_off = reason

    def close(self, error: BaseException | None = None) -> None:
        """Tell the others that this process is done, or why it failed, and wait until they are done too. Idempotent."""
        if self._watcher is None or self._ended.is_set():
            return
        reason = self._broken_off if error is None else f"{type(error).__name__}: {str(error)[:500]}"
        deadline = time.monotonic() + 2 * _BEAT_S
        try:
            state = _ENDED if reason is None else f"{_FAILED}{reason}"
            attempt(lambda: self._announce(state), lambda: time.monotonic() > deadline)
            if reason is None:  # the store may live in this process
                while self._lost is None and self._watcher.is_alive():
                    self._watcher.join(_POLL_S)
            elif self.rank == 0:  # likewise: let the others read it
                time.sleep(2 * _BEAT_S)
        except RuntimeError:  # the store is gone
            pass
        self._ended.set()
        self._watcher.join(2 * _BEAT_S)

    def _is_lost(self) -> bool:
        return self._lost is not None

    def _announce(self, state: str) -> None:
        self._store.set(f"state/{self.rank}", state)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The store's answer, or PeerLost where another process is lost meanwhile or there is no store any more."""
        try:
            return attempt(question, self._is_lost)
        except ReplicaLost:
            raise PeerLost(self._lost) from None
        except RuntimeError as exc:
            self.check()
            raise PeerLost(f"The run's store gives no answer ({exc}): is process 0 there?") from exc

    def _watch(self) -> None:
        """Tell the others that this process lives, and see whether they do, until all have ended."""
        store = self._store.clone()
        beats = dist.PrefixStore("beats", store)
        waiting_for = [rank for rank in range(self.size) if rank != self.rank]
        seen = self._seen
        seen.update({rank: ("", time.monotonic()) for rank in waiting_for})
        beat = 0
        while waiting_for and not self._ended.wait(min(_BEAT_S, self._timeout_s / 4)):
            try:
                beat += 1
                beats.set(str(self.rank), str(beat))
                for rank in list(waiting_for):
                    state = store.get(f"state/{rank}").decode() if store.check([f"state/{rank}"]) else ""
                    if state == _ENDED:
                        waiting_for.remove(rank)
                        del seen[rank]
                        continue
                    if state.startswith(_FAILED):
                        return self._lose(f"Process {rank} failed: {state[len(_FAILED) :]}")
                    heard = beats.get(str(rank)).decode() if beats.check([str(rank)]) else ""
                    if heard != seen[rank][0]:
                        seen[rank] = heard, time.monotonic()
                    elif time.monotonic() - seen[rank][1] > self._timeout_s:
                        return self._lose(
                            f"Process {rank} has not been heard of for {self._timeout_s:.0f} s (--peer-timeout-s): "
                            "it was killed, its host is gone, or it hangs."
                        )
                self._answered_s = time.monotonic()
            except RuntimeError as exc:
                if not self._ended.is_set():
                    self._lose(f"The run's store is gone ({exc}): process 0's host or the launcher has ended.")
                return

    def _watch_store(self) -> None:
        """See whether the store answers: a question to one whose host is frozen, or cut off, waits for ever."""
        while self._watcher is not None and self._watcher.is_alive() and not self._ended.wait(_POLL_S):
            if time.monotonic() - self._answered_s > self._timeout_s + _BEAT_S:
                return self._lose(
                    f"The run's store has not answered for {self._timeout_s:.0f} s (--peer-timeout-s): the host of "
                    "process 0 or of the launcher is gone, or it hangs."
                )

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            functions, self._on_loss = self._on_loss, []
        for function in functions:
            function()
