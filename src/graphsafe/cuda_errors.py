"""The CUDA errors that threads saw of late, for a capture that another thread broke.

Guarantees:
- Only errors that come from CUDA are noted, each once, as text: nothing that an error holds is kept alive.
- At most ``MAX_NOTES`` are kept; noting never raises and never waits for a device.

Importing it plugs it into the repairs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from .errors import GraphsafeError
from .failures import code_line, first_line, thread_name
from .repairs.hooks import hooks

MAX_NOTES = 64
_SIGNS = ("CUDA", "cuda", "cuDNN", "cuBLAS", "NCCL", "graph capture")  # in the text of an error that comes from CUDA
_MARK = "_noted_by_graphsafe"


@dataclass(frozen=True)
class Note:
    """What one thread saw.

    Attributes:
        time_s: when it was noted, by ``time.monotonic()``.
        ident, thread: of the thread.
        text: the error's first line, and the user's line where it is known.
    """

    time_s: float
    ident: int
    thread: str
    text: str

    def __str__(self) -> str:
        return f"{self.thread!r}: {self.text}"


_lock = threading.Lock()  # guards the notes; taken alone, as itself: an interrupt could leave a condition half taken
_changed = threading.Condition(_lock)
_notes: deque[Note] = deque(maxlen=MAX_NOTES)


def from_cuda(error: object) -> bool:
    """Whether an error comes from CUDA or a library on top of it."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is not None and isinstance(error, kind):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, GraphsafeError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def note(error: object) -> None:
    """Note an error of this thread, if it comes from CUDA and was not noted before."""
    try:
        if error is None or not from_cuda(error) or getattr(error, _MARK, False):
            return
        assert isinstance(error, BaseException)
        setattr(error, _MARK, True)
        where = code_line(error)
        text = f"{type(error).__name__}: {first_line(error)}" + (f" The line: {where[0]}." if where else "")
        found = Note(time.monotonic(), threading.get_ident(), thread_name(), text)
    except Exception:  # an error that cannot even be printed
        return
    with _lock:
        _notes.append(found)
        _changed.notify_all()


def seen_since(start_s: float, *, wait_s: float = 0.0) -> list[Note]:
    """What other threads than this one saw from ``start_s`` on, oldest first.

    Args:
        start_s: by ``time.monotonic()``.
        wait_s: how long to wait for a note where there is none yet.
    """
    me, deadline = threading.get_ident(), time.monotonic() + wait_s

    def found() -> list[Note]:
        return [one for one in _notes if one.time_s >= start_s and one.ident != me]

    with _lock:
        _changed.wait_for(found, max(0.0, deadline - time.monotonic()))
        return found()


hooks.saw_error = note
