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

import datetime
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphsafe

from .config import InputError

ABORT_TIMEOUT_S = 30.0
TIMEOUT = datetime.timedelta(minutes=30)  # for a collective: a rank may wait long for its first features


class ReplicaLost(RuntimeError):
    """Another replica ended, so a collective with it cannot end."""


class Replica:
    """One rank. Made, used and closed in its drafter's thread.

    Args:
        rank, size: this one, and how many there are; all make theirs at the same time.
        device: the drafter's.
        store: shared by all ranks, such as ``torch.distributed.HashStore()``. Unused when alone.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = None
        self._hooks: list[Any] = []
        self._alone = size == 1
        self._aborting: threading.Thread | None = None
        if size > 1:
            if device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, rank, size)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
            self.sum(torch.zeros(1, device=device))  # connects now, not within the first step

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
        """End collectives under way on a CUDA device. Any thread. (On the CPU ``close`` ends those of the others.)

        It does not wait: NCCL's abort returns only once no graph uses the communicator, and each graph is dropped by
        its own thread.
        """
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
        self._hooks, self._group = [], None

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
                work.wait()
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
