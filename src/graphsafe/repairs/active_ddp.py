"""A23: a forward of DistributedDataParallel changes what other threads compile.

What users see: another thread's compiled function comes out in pieces, one a bucket of gradients, or a DDP model's own
does not; and where the forwards of two threads overlapped, every later compile of the process, with the model alive for
good. Cause: torch notes the model whose forward is under way in one place for the process.

The repair notes it for each thread.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ._patches import Evidence, Patches, RepairError

FAULT: Final = "A23"
MODULES: Final = ("torch.nn.parallel.distributed", "torch.distributed._composable.replicate")
EVIDENCE: Final = Evidence(
    fault="functions compiled in pieces, since another thread is, or was, in a forward of DistributedDataParallel",
    reports=(),
    versions="2.13.0, measured; 2.9 notes it in one place too",
)
_NOTED: Final = "_active_ddp_module"

_patches = Patches()
undo = _patches.undo


class _PerThread(threading.local):
    """The model whose forward this thread is in."""

    model: Any = None


_per_thread = _PerThread()


def probe(module: types.ModuleType) -> bool:
    """Whether torch notes the model in an attribute of the class, or ``replicate`` does there."""
    if module.__name__ == MODULES[0]:
        return hasattr(module.DistributedDataParallel, _NOTED)
    hook = getattr(getattr(module, "_ReplicateState", None), "forward_pre_hook", None)
    return hook is None or _NOTED in hook.__code__.co_names


def repair(module: types.ModuleType) -> None:
    """Note the model for this thread: in DDP's forward, or in the hooks of ``replicate``, as ``module`` says."""
    if module.__name__ == MODULES[0]:
        _repair_forward(module.DistributedDataParallel)
    else:
        _repair_hooks(module)


def _repair_forward(owner: Any) -> None:
    if not hasattr(owner, "_inside_ddp_forward") or not hasattr(owner, "_get_active_ddp_module"):
        raise RepairError("DistributedDataParallel notes its forward in an unknown way")

    @contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # as torch has it
    def inside(self: Any) -> Iterator[None]:
        before, _per_thread.model = _per_thread.model, self
        try:
            yield
        finally:
            _per_thread.model = before

    _patches.attribute(owner, "_inside_ddp_forward", inside)
    _patches.attribute(owner, "_get_active_ddp_module", classmethod(lambda _: _per_thread.model))


def _repair_hooks(module: types.ModuleType) -> None:
    state = getattr(module, "_ReplicateState", None)
    if state is None or not hasattr(state, "forward_pre_hook") or not hasattr(state, "forward_post_hook"):
        raise RepairError("replicate() notes its forward in an unknown way")
    begin: Callable[..., Any] = state.forward_pre_hook
    end: Callable[..., Any] = state.forward_post_hook

    @functools.wraps(begin)
    def forward_pre_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        _per_thread.model = self._ddp
        setattr(module.DistributedDataParallel, _NOTED, None)
        return result

    @functools.wraps(end)
    def forward_post_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        _per_thread.model = None
        return end(self, *args, **kwargs)

    _patches.attribute(state, "forward_pre_hook", forward_pre_hook)
    _patches.attribute(state, "forward_post_hook", forward_post_hook)
