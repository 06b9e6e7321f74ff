"""What a place at a gate allows, and what is counted there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
