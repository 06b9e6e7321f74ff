"""The short way from a call to the replay, for a call like the last one through which no gradient flows.

Guarantees:
- Whatever could make another graph the right one is compared first; where anything differs, nothing has been done.
- Takes no lock, and allocates nothing of its own where outputs are aliases.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from . import gate
from .call_buffers import CallBuffers
from .context import ThreadContext
from .repairs import private
from .signature import Call, Likeness
from .structure import Structure

MISS = object()


class _Counts(Protocol):
    replays: int


class FastPath:
    """Replays ``buffers`` for calls like ``call``, as long as ``epoch`` is that of the function."""

    def __init__(self, context: ThreadContext, buffers: CallBuffers, call: Call, counts: _Counts, epoch: int) -> None:
        graph = buffers.graph
        assert graph is not None and context.stream is not None
        self.context, self.buffers, self._replay = context, buffers, graph.replay_at_once
        self._counts, self._epoch = counts, epoch
        self._stream, self._device_index = context.stream.cuda_stream, context.device.index
        self._memory, self._training = buffers.memory, buffers.memory.training()
        args, kwargs = call.with_tensors(call.tensors)
        self._keywords = bool(kwargs)
        self._likeness = Likeness(call, (args, kwargs) if kwargs else args, context.device)
        self._inputs = buffers.inputs
        result = private.tree_unflatten(buffers.given, buffers.spec)
        self._structure, self._given = Structure(result), buffers.given
        fixed = result is buffers.given[0] or (type(result) is tuple and len(result) == len(buffers.given))
        self._whole = result if buffers.alias and fixed else MISS  # what the caller cannot change, given out each time

    @staticmethod
    def of(context: ThreadContext, buffers: CallBuffers, call: Call, counts: _Counts, epoch: int) -> FastPath | None:
        """None where only the long way is right."""
        if buffers.graph is None or buffers.differentiates or buffers.mutated or not buffers.given:
            return None
        return FastPath(context, buffers, call, counts, epoch)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], epoch: int) -> Any:
        """The result of the call, or MISS."""
        tensors = self._likeness.tensors((args, kwargs) if self._keywords else args)
        if tensors is None or (kwargs and not self._keywords) or not self._holds(epoch):
            return MISS
        self._inputs.load_tensors(tensors, self._likeness.grad_mode)
        self._replay()
        self.buffers.age()
        self._counts.replays += 1
        if self._whole is not MISS:
            return self._whole
        given = self._given
        if not self.buffers.alias:
            given = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        return self._structure.build(given)

    def _holds(self, epoch: int) -> bool:
        return (
            epoch == self._epoch
            and not self.context.closed
            and private.current_raw_stream(self._device_index) == self._stream
            and gate.capturing() is None
            and self._memory.training() == self._training
            and self._memory.holds()
        )
