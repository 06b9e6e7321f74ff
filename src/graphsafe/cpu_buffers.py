"""CallBuffers on the CPU: one call under a capture's checks, then the function again, on the static inputs.

Guarantees:
- The capturing call refuses what a GPU's capture would, and then nothing has changed.
- Aliases of outputs really are overwritten by the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import gate, walk
from .bridge import Gradients, differentiate, forget_casts, sequence_number
from .call_buffers import BackwardGraph, CallBuffers, HeldGradients, Pattern
from .capture import checked_on_cpu
from .memory import Memory, refuse_rebound
from .repairs import private
from .repairs.rng_positions import Trace
from .signature import Call


class CpuBuffers(CallBuffers):
    """See ``CallBuffers``."""

    def _capture(self, call: Call, trace: Trace | None) -> Any:
        before, memory = walk.tensors(self._roots), Memory(*self._roots)
        gradients = HeldGradients(before)
        # What is trained is another thread's too, perhaps; a forward does not change it.
        values = [(x, x.clone()) for x in before if x.layout is torch.strided and not x.requires_grad]
        watched = [x for x in (*self._given, *before) if not x.is_inference()]
        versions = [x._version for x in watched]
        forget_casts("cpu")
        since = sequence_number() if torch.is_grad_enabled() else 0
        args, kwargs = call.with_tensors(self._given)
        drawn = self.context.rng_state()
        try:
            with checked_on_cpu(self.context):
                result = self._fn(*args, **kwargs)
            gradients.check()
            refuse_rebound(memory)
            self._note(call, result, since, before)
            self._note_changes([x for x, v in zip(watched, versions, strict=True) if x._version != v], before)
        except BaseException:
            self.context.set_rng_state(drawn)
            gradients.restore()
            with torch.no_grad():
                for tensor, value in values:
                    if not torch.equal(tensor, value):  # not every operator that writes says so by its version
                        tensor.copy_(value)
            raise
        if self.alias:  # what is given out is no part of the call's own history
            self.static = [x.clone() if any(x is made for made in self._made) else x for x in self.static]
            self._made = self.aged = [x for x in self.static if not x.is_inference()]
        self._changed = []  # running the function says so itself
        return self._finish(call, self.leaves)

    def replay(self, call: Call, *, loaded: bool = False) -> Any:
        self.inputs.load(call)
        forget_casts("cpu")
        args, kwargs = call.with_tensors(self._given)
        with self.context.seat(exclusive=self._draws):
            result = self._fn(*args, **kwargs)
        leaves, self.spec = private.tree_flatten(result)
        self._crossing = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not torch.is_grad_enabled():
            self._crossing = []
        self.context.counters.replays += 1
        if not self.memory.holds():  # what the run itself has put into a container
            self.memory = Memory(*self._roots)
        return self._finish(call, leaves)

    def _finish(self, call: Call, leaves: list[Any]) -> Any:
        inner = [leaves[i] for i in self._crossing]
        self.copy_back(call)
        tensors = [x.detach() for x in leaves if isinstance(x, torch.Tensor)]
        if self.alias and len(tensors) == len(self.static):
            with torch.no_grad():
                for index, (held, value) in enumerate(zip(self.static, tensors, strict=True)):
                    if any(held is made for made in self._made) and held.shape == value.shape:
                        held.copy_(value)
                    else:
                        self.static[index] = value
            self.generation += 1
            left = iter(self.static)
            leaves = [next(left) if isinstance(x, torch.Tensor) else x for x in leaves]
        return self._give_out(call, leaves, (), self._differentiate_on_cpu, inner)

    def _differentiate_on_cpu(
        self, inner: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]
    ) -> Gradients:
        self.context.check_thread("A backward through a graph of the context")
        pattern: Pattern = (tuple(gradient is not None for gradient in gradients), needed, private.keeps_graph())
        sources = [*self._wanted(), *self._sources]
        if pattern in self._backwards or gate.capturing() is not None:
            with self.context.seat(exclusive=self._draws):
                return differentiate(inner, sources, gradients, needed)
        with checked_on_cpu(self.context):
            found = differentiate(inner, sources, gradients, needed)
        self._backwards[pattern] = BackwardGraph()
        return found
