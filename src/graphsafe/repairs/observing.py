"""What torch says only under private names to those who look on while code runs: which backward, node and entry it is.

Guarantees:
- Nothing here changes torch; ``compiled_runs_eagerly`` changes what the running thread alone sees.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_node() -> tuple[str, int] | None:
    """Name and sequence number of the node whose backward this thread runs, if it does."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else (str(node.name()), int(node._sequence_nr()))


def next_sequence_number() -> int:
    """The sequence number of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def backward_code() -> types.CodeType | None:
    """The code of the function through which every backward of Python's enters the engine, as it is now."""
    entry: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    return getattr(entry, "__code__", None)


class _EagerMode:
    """What stands for the fake mode of a trace, and says that it runs a kernel: nothing is compiled inside one."""

    in_kernel_invocation = True
    shape_env = None

    def __enter__(self) -> _EagerMode:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


@contextmanager
def compiled_runs_eagerly() -> Iterator[None]:
    """Have this thread's compiled functions run eagerly, in a dispatch mode, where torch makes an error of that.

    Torch refuses a ``fullgraph=True`` call that compiles nothing. (Seen in 2.13 to 2.15.)
    """
    frames, guards = torch._C._dynamo.eval_frame, torch._guards
    if not (hasattr(frames, "set_fullgraph_compiled_frame_count") and hasattr(guards, "TracingContext")):
        yield
        return
    local: Any = guards._TLS
    before = getattr(local, "tracing_context", None)
    local.tracing_context = guards.TracingContext(_EagerMode())  # type: ignore[arg-type]
    try:
        yield
    finally:
        local.tracing_context = before
