"""The short way from a call to the replay, for a call like the last one through which no gradient flows.

Guarantees:
- Whatever could make another graph the right one is compared first; where anything differs, nothing has been done.
- Takes no lock, and allocates nothing of its own where outputs are aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from . import gate
from .call_buffers import CallBuffers
from .context import ThreadContext
from .repairs import private
from .signature import Call, copied, likeness
from .structure import Structure

MISS = object()


class _Counts(Protocol):
    replays: int


class FastPath:
    """Replays ``buffers`` for calls like ``call``, as long as ``epoch`` is that of the function.

    Attributes:
        run: ``run(args, kwargs, epoch)`` returns the result of the call, or MISS.
    """

    def __init__(self, context: ThreadContext, buffers: CallBuffers, call: Call, counts: _Counts, epoch: int) -> None:
        self.context, self.buffers = context, buffers
        self.run = _runner(context, buffers, call, counts, epoch)

    @staticmethod
    def of(context: ThreadContext, buffers: CallBuffers, call: Call, counts: _Counts, epoch: int) -> FastPath | None:
        """None where only the long way is right."""
        if buffers.graph is None or buffers.differentiates or buffers.mutated or not buffers.given:
            return None
        return FastPath(context, buffers, call, counts, epoch)


def _runner(
    context: ThreadContext, buffers: CallBuffers, call: Call, counts: _Counts, own_epoch: int
) -> Callable[[tuple[Any, ...], dict[str, Any], int], Any]:
    graph = buffers.graph
    assert graph is not None and context.stream is not None
    replay, load, grad_mode = graph.replay_at_once, buffers.inputs.load_tensors, torch.is_grad_enabled()
    stream, device_index = context.stream.cuda_stream, context.device.index
    holds, training_of, training = buffers.memory.holds, buffers.memory.training, buffers.memory.training()
    raw_stream, capturing = private.current_raw_stream, gate.capturing
    args, kwargs = call.with_tensors(call.tensors)
    has_keywords = bool(kwargs)
    alike = likeness(call, (args, kwargs) if kwargs else args, context.device)
    result = private.tree_unflatten(buffers.given, buffers.spec)
    structure, given = Structure(result), buffers.given
    copies = not buffers.alias
    # Given out each time where the caller cannot change it.
    fixed = buffers.alias and (result is given[0] or (type(result) is tuple and len(result) == len(given)))
    aged = buffers.aged

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], epoch: int) -> Any:
        tensors = alike((args, kwargs) if has_keywords else args)
        if (
            tensors is None
            or (kwargs and not has_keywords)
            or epoch != own_epoch
            or context.closed
            or raw_stream(device_index) != stream
            or capturing() is not None
            or training_of() != training
            or not holds()
        ):
            return MISS
        load(tensors, grad_mode)
        replay()
        if aged:
            increment_version(aged)
        counts.replays += 1
        if fixed:
            return result
        if copies:
            return structure.build(copied(given))
        return structure.build(given)

    return run
