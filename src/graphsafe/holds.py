"""What a place at a gate allows, and what is counted and told of it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum
from types import FrameType


class Kind(Enum):
    """What a hold allows: SHARED seats go together, EXCLUSIVE and CAPTURE are alone on the device."""

    SHARED = "a shared seat"
    EXCLUSIVE = "an exclusive seat"
    CAPTURE = "a capture"


@dataclass
class Counters:
    """What one context did. Written by its own thread alone, read by anyone."""

    captures: int = 0
    failed_captures: int = 0
    replays: int = 0
    eager_steps: int = 0
    mismatches: int = 0
    wait_s: float = 0.0

    def add(self, other: Counters) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def nothing() -> None:
    """What a hold calls where its owner wants nothing called."""


def stack_lines(frame: FrameType | None) -> list[str]:
    """The stack of a thread that is at ``frame``, for a report."""
    return [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]
