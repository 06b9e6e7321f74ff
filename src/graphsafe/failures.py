"""Why a capture failed: the operation, the line of the user's code, the likely cause and the cure."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch

from .errors import CaptureError, GraphsafeError, GraphsafeWarning

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_NOT_THE_USERS = (_OURS, _TORCH, "<frozen ", "<eval_with_key")  # the last: code that torch.fx makes

HOST_READ = (
    "The host reads a value that the device computes (.item(), bool(), int(), a branch on a tensor): a replay would go "
    "on with the old value. Keep the value on the device (torch.where, masks), or read it after the step."
)
UNKNOWN_RNG = (
    "Random numbers come from a generator that the capture does not know: every replay would repeat them. "
    "Draw from the default generator, which is the context's meanwhile."
)
DEEP_BACKWARD = (
    "Torch moves a backward nested deeper than 60 to another thread, which has neither this capture nor its context. "
    "Nest fewer: torch.utils.checkpoint with use_reentrant=False nests none, and neither does a backward that calls no "
    "torch.autograd.grad or backward itself."
)
_INVALIDATED = "previous error during capture"  # what is said of a capture that something broke before
_OUTSIDE = ("offset increment outside graph capture", "not in capture mode")  # of a generator's state
_CURES: tuple[tuple[str, str], ...] = (
    ("offset increment outside graph capture", UNKNOWN_RNG),
    ("generator", UNKNOWN_RNG),
    ("not permitted when stream is capturing", HOST_READ),
    (_INVALIDATED, "Another operation broke the capture before this line, or another thread "
     "synchronised the device: graphsafe.install() makes torch.cuda.synchronize() wait for captures."),
    ("dependency created on uncaptured work", "The block waits for a stream or an event that is not part of the "
     "capture. Do hand-overs between streams before or after it."),
    ("unjoined work", "The block sent work to another stream and did not wait for it. End with "
     "torch.cuda.current_stream().wait_stream(other)."),
    ("legacy stream", "The block uses CUDA's legacy default stream. Run it on the context's stream, which is current."),
    ("merge of two independent capture", "The block waits for a stream that another thread captures. Do hand-overs "
     "between threads before or after it."),
    ("last recorded in a capturing stream", "An event that was recorded inside the capture was queried or waited for "
     "by the host. Record another one after the replay."),
)  # fmt: skip


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor ours nor Python's own."""
    if filename.startswith(_LIBRARY):  # a virtual environment may put packages below it
        return "-packages" in filename and not filename.startswith(_NOT_THE_USERS)
    return not filename.startswith(_NOT_THE_USERS)


def users_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame that is neither torch's nor ours, from ``frame`` (None: the running code) outwards."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def warn(text: str) -> None:
    """A GraphsafeWarning that points at the user's line."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, GraphsafeWarning, stacklevel=level)


def users_line() -> tuple[str | None, str | None]:
    """``file:line`` and source of ``users_frame()``."""
    frame = users_frame()
    if frame is None:
        return None, None
    filename = frame.f_code.co_filename
    return f"{filename}:{frame.f_lineno}", linecache.getline(filename, frame.f_lineno).strip() or None


def code_line(exc: BaseException) -> tuple[str, str | None] | None:
    """``file:line`` and source of the innermost frame of a traceback that is neither torch's nor ours."""
    found = None
    for frame, line in traceback.walk_tb(exc.__traceback__):
        filename = frame.f_code.co_filename
        if is_users(filename):
            found = (f"{filename}:{line}", linecache.getline(filename, line).strip() or None)
    return found


def first_line(exc: BaseException) -> str:
    """The first line of an error's text."""
    return str(exc).strip().split("\n")[0]


def thread_name() -> str:
    """This thread's name. Unlike threading.current_thread() it makes no object up for a thread that Python lacks."""
    ident = threading.get_ident()
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), f"thread {ident}")


def _speaks(exc: BaseException) -> bool:
    """Whether an error may be what torch or CUDA says of a capture."""
    known = not isinstance(exc, torch.OutOfMemoryError | GraphsafeError)
    return isinstance(exc, RuntimeError) and known and "captur" in str(exc)


def _behind(exc: BaseException, outer: BaseException | None) -> list[BaseException]:
    """An error, and those that it was raised from, newest first, up to one that was there before."""
    found: list[BaseException] = []
    pending: BaseException | None = exc
    while pending is not None and pending is not outer and pending not in found:
        found.append(pending)
        pending = pending.__cause__ or pending.__context__
    return found


def culprit(
    exc: BaseException, broken: bool, from_cuda: Callable[[object], bool], outer: BaseException | None = None
) -> BaseException | None:
    """The error that says why a capture failed whose block raised ``exc``; None: ``exc`` has nothing to do with it.

    Args:
        broken: whether CUDA had invalidated the capture.
        from_cuda: whether an error comes from CUDA.
        outer: the error that was being handled when the capture began.
    """
    if not isinstance(exc, RuntimeError) or isinstance(exc, torch.OutOfMemoryError | GraphsafeError):
        return None
    if not broken:
        return exc if _speaks(exc) else None
    speaking = [error for error in _behind(exc, outer) if _speaks(error)]
    if speaking:
        return speaking[-1]  # the oldest: what came later follows from it
    return exc if from_cuda(exc) else None


def explain(exc: BaseException, where: tuple[str, str | None] | None, *, begun: bool = True) -> CaptureError:
    """The CaptureError for an error that torch raised because of a capture.

    Args:
        where: the user's line and its source, where it is known.
        begun: False where no line of the block has run, so that none of it can be to blame.
    """
    text = str(exc).lower()
    cure = next((cure for sign, cure in _CURES if sign in text), None)
    if where is None:
        where_text, operation = None, None
        cure = cure or (
            "The line is not known: an error was swallowed inside the block, or another thread synchronised the "
            "device. Run the block on a CPU context to have the operation named."
        )
    else:
        where_text, operation = where
    what = f"The CUDA graph capture failed: {first_line(exc)}."
    error = CaptureError(what, operation, where_text, cure, thread=thread_name())
    error.foreign = _INVALIDATED in text or (not begun and "captur" in text)
    return error


def may_be_foreign(error: CaptureError) -> bool:
    """Whether another thread broke the capture if there is one that saw an error meanwhile."""
    return error.foreign or any(sign in error.what.lower() for sign in _OUTSIDE)


def refuse(operation: str, what: str, cure: str) -> NoReturn:
    """Raise the CaptureError, with the user's line."""
    location, line = users_line()
    named = operation if line is None else f"{operation} in `{line}`"
    raise CaptureError(what, named, location, cure, thread=thread_name())
