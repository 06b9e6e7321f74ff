"""Step markers of one's own thread: where an iteration begins for CUDA graph trees (``mode="reduce-overhead"``).

Guarantees:
- A mark begins a step of the calling thread; other threads' steps go on. Torch's own counter is one for the process and
  unlocked; the first mark repairs that (see repairs/step_markers.py).
- Importing this module, and marking in a program that compiles nothing, load neither torch._dynamo nor torch._inductor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .repairs import step_markers

T = TypeVar("T")


def mark_step_begin() -> None:
    """Mark that this thread begins a new iteration: what compiled code returned in the last one may be overwritten.

    As ``torch.compiler.cudagraph_mark_step_begin``, for the calling thread alone. A no-op where torch lacks markers.

    Thread safety: any thread. Sync: none.
    """
    step_markers.mark_step_begin()


@contextmanager
def step() -> Iterator[None]:
    """A block that is one step of this thread: ``mark_step_begin()`` on entry, nothing on exit."""
    step_markers.mark_step_begin()
    yield


def steps(iterable: Iterable[T]) -> Iterator[T]:
    """Iterate over ``iterable``, marking a step right after each item arrives, before the loop's body runs."""
    for item in iterable:
        step_markers.mark_step_begin()
        yield item
