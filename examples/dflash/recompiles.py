"""A recompile after the warm-up, told to people: what was compiled anew, why, and what they can do.

Guarantees:
- It ends the run with an InputError, and it is in the run's metrics as an event with the failed guards.
- Any other error is noted as an event too, and raised as it is.

The torch fact this rests on: under ``torch.compiler.set_stance("fail_on_recompile")`` a call that fits no compiled form
raises a RuntimeError, whose text names the function and, where there is a compiled form, each guard that failed.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import graphsafe

from .config import InputError
from .metrics import Reporter, Silent

MAX_REASONS = 5  # that are printed; the event has all
_DETECTED = "Detected recompile when torch.compile stance is 'fail_on_recompile'"
_FUNCTION = re.compile(r"filename: '(?P<file>.*?)', function name: '(?P<function>.*?)', line number: (?P<line>\d+)")
_GUARD = re.compile(r"^\s*- \d+/\d+(?:_\d+)?: (?P<guard>.*)$", re.MULTILINE)  # - 0/1: what did not hold
_COMMENT = re.compile(r"\s{2,}#.*$")  # the line of torch's source that made the guard
_WORKER = re.compile(r"In worker '(?P<thread>.*?)'")


@dataclass(frozen=True)
class Recompile:
    """What was to be compiled after the warm-up.

    Attributes:
        function, file, line: as torch names it; the line is where it begins. None: this torch does not say.
        reasons: guards that did not hold, one for each compiled form; none where there was no form yet.
        caller: the code outside of torch that called it.
        thread: in which it happened.
    """

    function: str | None
    file: str | None
    line: int | None
    reasons: tuple[str, ...]
    caller: str | None
    thread: str | None

    def __str__(self) -> str:
        what = f"{self.function}() in {Path(self.file or '').name}, line {self.line}" if self.function else "A function"
        where = f", called by {self.caller}," if self.caller else ""
        who = f" by the thread {self.thread}" if self.thread else ""
        if self.reasons:
            shown = [f"  {reason}" for reason in self.reasons[:MAX_REASONS]]
            if len(self.reasons) > MAX_REASONS:
                shown.append(f"  and {len(self.reasons) - MAX_REASONS} more")
            why = "It fits none of its compiled forms, because of what differs from each:\n" + "\n".join(shown)
        else:
            why = (
                "Torch names no guard that failed: it had no compiled form to compare this call with, or this version "
                "of torch does not say."
            )
        return (
            f"{what}{where} had to be compiled anew after the warm-up{who}. {why}\n"
            "Shapes and settings are fixed for a run, so none is due; it would hold up all threads, again and again "
            "perhaps, and so it ends the run. What it has saved is kept.\n"
            "Where the code is yours, keep what is named above from changing between steps; TORCH_LOGS=recompiles "
            "shows more. Until then --step eager trains with next to nothing compiled."
        )


def find_recompile(error: BaseException) -> Recompile | None:
    """The recompile that an error, or the first such of a group, is about."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := find_recompile(inner))), None)
    text = str(error)
    if not isinstance(error, RuntimeError) or _DETECTED not in text:
        return None
    named = _FUNCTION.search(text)
    worker = _WORKER.search("\n".join(getattr(error, "__notes__", ())))
    reasons = (_COMMENT.sub("", match["guard"]).strip() for match in _GUARD.finditer(text))
    return Recompile(
        function=named["function"] if named else None,
        file=named["file"] if named else None,
        line=int(named["line"]) if named else None,
        reasons=tuple(dict.fromkeys(reasons)),
        caller=_caller(error),
        thread=worker["thread"] if worker else None,
    )


def _caller(error: BaseException) -> str | None:
    """The innermost code of an error's traceback that is neither torch's nor graphsafe's."""
    libraries = tuple(str(Path(module.__file__).parent) + os.sep for module in (torch, graphsafe) if module.__file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(libraries):
            return f"{frame.name}() in {Path(frame.filename).name}, line {frame.lineno}"
    return None


@contextmanager
def errors_noted(reporter: Reporter | Silent) -> Iterator[None]:
    """Note the error that ends the block as an event of the run, a recompile with its reasons.

    Raises:
        InputError: in place of torch's error for a recompile.
    """
    try:
        yield
    except BaseException as exc:
        recompile = find_recompile(exc)
        if recompile is not None:
            with suppress(OSError):
                reporter.event("recompile", **asdict(recompile))
            raise InputError(str(recompile)) from exc
        with suppress(OSError):  # a full disk may be that very error
            reporter.event("error", kind=type(exc).__name__, text=str(exc).split("\n", 1)[0])
        raise
