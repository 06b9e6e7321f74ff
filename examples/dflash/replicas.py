"""Drafter replicas: each drafter thread is one rank of a process group that lives in this process.

Guarantees:
- A step's loss is divided by the sum of weights of all replicas, and its gradients are summed over them, so R replicas
  train as one drafter would on all R rows.
- A rank never skips a collective: one whose batch is all padding takes part with zeros.
- On CUDA collectives are enqueued (NCCL) and can be captured. On the CPU (Gloo) the host waits, without a seat.
- When a rank ends early the others do not wait for it: ``close`` and ``abort`` break what they wait in, which raises
  ReplicaLost there.

The torch fact this rests on: a group made from a store in each thread needs no process of its own, and a gradient's
post-accumulate hook runs in the thread that runs backward, which a context confines to its own.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphsafe

from .config import InputError

Found = TypeVar("Found")

ABORT_TIMEOUT_S = 30.0
_LEAVE_S = 5.0  # for a group without a collective under way to end
_LOOK_S = 1.0  # between two looks at whether a wait is given up
_POLL_S = 0.02  # between two looks at who has come
TIMEOUT = datetime.timedelta(minutes=30)  # for a collective: a rank may wait long for its first features


class ReplicaLost(RuntimeError):
    """Another replica ended, so a collective with it cannot end."""


def wait_for(work: Any, given_up: Callable[[], bool]) -> None:
    """Wait on the host for a Gloo collective.

    Args:
        work: the collective.
        given_up: looked at now and then.
    Raises:
        ReplicaLost: the wait is given up.
        RuntimeError: the collective failed.
    """
    while True:
        try:
            work.wait(datetime.timedelta(seconds=_LOOK_S))
            return
        except RuntimeError:
            if work.is_completed():  # it failed; else the wait's time is over
                raise
            if given_up():
                raise ReplicaLost("The wait for another replica was given up.") from None


def attempt(function: Callable[[], Found], given_up: Callable[[], bool]) -> Found:
    """What ``function`` returns, or raises. It runs in a thread of its own, which is left behind once the wait is given
    up: what connects, or asks a store whose host is frozen, cannot be broken off.

    Raises:
        ReplicaLost: the wait is given up.
    """
    outcome: Future[Found] = Future()

    def body() -> None:
        try:
            outcome.set_result(function())
        except BaseException as exc:
            outcome.set_exception(exc)

    threading.Thread(target=body, name="attempt", daemon=True).start()
    while not wait([outcome], _POLL_S).done:
        if given_up():
            raise ReplicaLost("The wait for another replica was given up.")
    return outcome.result()


def gather(store: Any, size: int, given_up: Callable[[], bool]) -> None:
    """Wait until ``size`` have come here, each with this store, since making a group cannot be given up.

    Raises:
        ReplicaLost: the wait is given up.
    """
    store.add("arrived", 1)
    while store.add("arrived", 0) < size:
        if given_up():
            raise ReplicaLost("The wait for the other replicas was given up.")
        time.sleep(_POLL_S)


def connect(store: Any, rank: int, size: int, given_up: Callable[[], bool]) -> Any:
    """A Gloo group of all who come here with this store.

    Raises:
        ReplicaLost: the wait for them is given up.
        RuntimeError: they cannot be reached.
    """

    def make() -> Any:
        gather(store, size, given_up)
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    return attempt(make, given_up)


def leave(groups: list[Any], stuck: bool) -> None:
    """Empty a list that holds the last reference to a Gloo group: others that wait for this rank see it leave.

    Args:
        stuck: a collective is still under way, for which the group's end would wait. It then stays until the process
            ends. (A thread that waited for it could return while Python ends, which torch answers with an abort.)
    """
    if stuck:
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        groups.clear()
        return
    leaving = threading.Thread(target=groups.clear, name="left-group", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)


class Replica:
    """One rank. Made, used and closed in its drafter's thread.

    Args:
        rank, size: this one, and how many there are; all make theirs at the same time.
        device: the drafter's.
        store: shared by all ranks, such as ``torch.distributed.HashStore()``. Unused when alone.
        given_up: once it is set, waits for other replicas end in ReplicaLost (on CUDA see ``abort``).
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Any, given_up: threading.Event | None = None
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = None
        self._hooks: list[Any] = []
        self._alone = size == 1
        self._stuck = False  # a collective on the CPU was given up
        self._aborting: threading.Thread | None = None
        self._given_up = threading.Event() if given_up is None else given_up
        if size > 1:
            try:
                self._connect(store)
                self.sum(torch.zeros(1, device=device))  # connects now, not within the first step
            except BaseException:
                self.close()
                raise

    def _connect(self, store: Any) -> None:
        lost = self._given_up.is_set
        try:
            with graphsafe.current_context(self.device).released():
                if self.device.type == "cuda":
                    attempt(lambda: gather(store, self.size, lost), lost)
                else:
                    self._group = connect(store, self.rank, self.size, lost)
        except ReplicaLost:
            raise
        except RuntimeError as exc:
            raise ReplicaLost(f"Replica {self.rank} of {self.size} does not reach the others: {exc}") from exc
        if self.device.type == "cuda":
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all replicas, as a new tensor; no gradient flows. Every replica must call it.

        Sync: none on CUDA; on the CPU the host waits for the other replicas.
        Raises:
            ReplicaLost: another replica ended.
        """
        total = tensor.detach().clone()
        self._all_reduce(total)
        return total

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this replica sums with no other: each value is its own sum. For a trial step."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on, have each backward sum the gradients over all replicas, once the last of them has arrived.

        Every backward must reach all of ``parameters``.
        """
        trained = list(parameters)
        if self.size == 1:
            return
        arrived: list[nn.Parameter] = []

        def hook(parameter: nn.Parameter) -> None:
            arrived.append(parameter)
            if len(arrived) == len(trained):
                arrived.clear()
                if not self._alone:
                    self._sum_into([p.grad for p in trained if p.grad is not None])

        self._hooks += [p.register_post_accumulate_grad_hook(hook) for p in trained]

    def abort(self) -> None:
        """End collectives under way. Any thread. (On the CPU this rank's own; ``close`` ends those of the others.)

        It does not wait: NCCL's abort returns only once no graph uses the communicator, and each graph is dropped by
        its own thread.
        """
        self._given_up.set()
        group = self._group
        if group is not None and self.device.type == "cuda" and self._aborting is None:
            self._aborting = threading.Thread(target=group.abort, name=f"abort-{self.rank}", daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Leave the group: others that wait for this rank get ReplicaLost. The rank's own thread, its graphs gone.

        On CUDA all ranks are to leave together, none with a collective under way: one reads the others' memory.
        """
        for hook in self._hooks:
            hook.remove()
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_TIMEOUT_S)
        groups, self._hooks, self._group = [self._group], [], None
        if self.device.type != "cuda":
            leave(groups, self._stuck)

    def _sum_into(self, gradients: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._all_reduce(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def _all_reduce(self, tensor: Tensor) -> None:
        if self._alone:
            return
        if self._group is None:
            raise ReplicaLost("This replica has left the group.")
        try:
            work = self._group.allreduce([tensor])
            if self.device.type == "cuda":
                work.wait()  # the stream waits, not the host
                return
            with graphsafe.current_context(self.device).released():
                wait_for(work, self._given_up.is_set)
        except ReplicaLost:
            self._stuck = True
            raise
        except (dist.DistError, RuntimeError) as exc:
            if isinstance(exc, graphsafe.GraphsafeError | torch.OutOfMemoryError):
                raise
            raise ReplicaLost(f"Replica {self.rank} of {self.size} lost another one in a collective: {exc}") from exc


def check_replica_devices(devices: Sequence[torch.device]) -> None:
    """Raise InputError where two replicas share a CUDA device: NCCL takes one rank a device."""
    shared = sorted({str(device) for device in devices if device.type == "cuda" and devices.count(device) > 1})
    if shared:
        raise InputError(
            f"--drafters names {', '.join(shared)} more than once, but a CUDA device takes one drafter. To use it "
            "better, raise --token-budget and --num-anchors instead."
        )
