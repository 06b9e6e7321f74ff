"""Why a capture failed: the operation, the line of the user's code, the likely cause and the cure."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from typing import NoReturn

import torch

from .errors import CaptureError

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NOT_THE_USERS = (_OURS, _TORCH, "<frozen ", "<eval_with_key")  # the last: code that torch.fx makes

HOST_READ = (
    "The host reads a value that the device computes (.item(), bool(), int(), a branch on a tensor): a replay would go "
    "on with the old value. Keep the value on the device (torch.where, masks), or read it after the step."
)
DATA_SHAPE = (
    "The shape of the result depends on data: a replay would keep the old shape. Use a fixed size: "
    "graphsafe.padding.fixed_nonzero or random_topk, torch.nonzero_static, a mask in place of boolean indexing."
)
UNKNOWN_RNG = (
    "Random numbers come from a generator that the capture does not know: every replay would repeat them. "
    "Draw from the default generator, which is the context's meanwhile."
)
_CURES: tuple[tuple[str, str], ...] = (
    ("offset increment outside graph capture", UNKNOWN_RNG),
    ("generator", UNKNOWN_RNG),
    ("not permitted when stream is capturing", HOST_READ),
    ("previous error during capture", "Another operation broke the capture before this line, or another thread "
     "synchronised the device: graphsafe.install() makes torch.cuda.synchronize() wait for captures."),
    ("dependency created on uncaptured work", "The block waits for a stream or an event that is not part of the "
     "capture. Do hand-overs between streams before or after it."),
)  # fmt: skip


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_THE_USERS) and f"{os.sep}contextlib.py" not in filename


def users_line() -> tuple[str | None, str | None]:
    """``file:line`` and source of the innermost frame that is neither torch's nor ours, of the running code."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_users(filename):
            return f"{filename}:{frame.f_lineno}", linecache.getline(filename, frame.f_lineno).strip() or None
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def code_line(exc: BaseException) -> tuple[str, str | None] | None:
    """``file:line`` and source of the innermost frame of a traceback that is neither torch's nor ours."""
    found = None
    for frame, line in traceback.walk_tb(exc.__traceback__):
        filename = frame.f_code.co_filename
        if _is_users(filename):
            found = (f"{filename}:{line}", linecache.getline(filename, line).strip() or None)
    return found


def explain(exc: BaseException, where: tuple[str, str | None] | None) -> CaptureError:
    """The CaptureError for an error that torch raised because of a capture."""
    text = str(exc)
    first = text.strip().split("\n")[0]
    cure = next((cure for sign, cure in _CURES if sign in text.lower()), None)
    if where is None:
        where_text, operation = None, None
        cure = cure or (
            "The line is not known: an error was swallowed inside the block, or another thread synchronised the "
            "device. Run the block on a CPU context to have the operation named."
        )
    else:
        where_text, operation = where
    error = CaptureError(f"The CUDA graph capture failed: {first}.", operation, where_text, cure)
    error.foreign = "previous error during capture" in text
    return error


def refuse(operation: str, what: str, cure: str) -> NoReturn:
    """Raise the CaptureError, with the user's line."""
    location, line = users_line()
    raise CaptureError(what, operation if line is None else f"{operation} in `{line}`", location, cure)
