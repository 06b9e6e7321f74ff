"""Has graphs run on their context's own stream, whichever stream is current.

Guarantees:
- The work follows what the caller's stream holds, and the caller's stream follows the work: graphs of one context share
  memory, so they must never run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .context import ThreadContext
from .repairs import private


def on_own_stream(context: ThreadContext, run: Callable[[], Any]) -> Any:
    """``run()`` on the context's stream. Returns its result, a pytree."""
    if context.stream is None or is_own_stream(context):
        return run()
    callers = torch.cuda.current_stream(context.device)
    context.stream.wait_stream(callers)
    try:
        with torch.cuda.stream(context.stream):
            result = run()
    finally:
        callers.wait_stream(context.stream)
    for leaf in private.tree_flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(callers)
    return result


def is_own_stream(context: ThreadContext) -> bool:
    """Whether the context's stream is the current one of its CUDA device."""
    assert context.stream is not None
    return private.current_raw_stream(context.device.index) == context.stream.cuda_stream
