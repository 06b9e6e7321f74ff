"""What happened in a run, from its ``metrics.jsonl``: readings and events in order, and what can be asked of them.

Guarantees:
- It takes what is there: of a run that was killed, resumed or is still running, whatever its version had measured.
- Of steps that were trained again after a resume, the last training counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .metrics import up_to

WARMUP_SHARE = 0.1  # of the readings, the first ones, that say little about speed: something is compiled, captured

Record = Mapping[str, Any]


@dataclass
class History:
    """A run's records in order, superseded ones left out.

    Attributes:
        readings: of rising steps.
        events: of all attempts.
        resumed: steps after which the run went on.
        seconds: that it trained, all attempts together.
    """

    readings: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, records: Sequence[Record]) -> History:
        """Sort records out. A reading that does not come after the one before it means that the run went on anew."""
        history = cls()
        kept: list[Record] = []
        last_s = 0.0
        for record in records:
            step = record.get("step")
            event = record.get("event")
            if event == "resume" and isinstance(step, int):
                history.seconds, last_s = history.seconds + last_s, 0.0
                history.resumed.append(step)
                kept = list(up_to(kept, step))
            if event is None and isinstance(step, int):
                former = max((r["step"] for r in kept if "event" not in r), default=-1)
                if step <= former:
                    kept = list(up_to(kept, step - 1))
                elapsed_s = record.get("elapsed_s")
                if isinstance(elapsed_s, int | float):
                    if elapsed_s < last_s:  # a clock that began anew, without a word of it
                        history.seconds += last_s
                    last_s = elapsed_s
            if event is not None or isinstance(step, int):
                kept.append(record)
        history.seconds += last_s
        history.readings = [record for record in kept if "event" not in record]
        history.events = [record for record in kept if "event" in record]
        return history

    def series(self, *path: str) -> tuple[list[int], list[float]]:
        """Steps and values of a number in the readings that have it: ``series("memory", "cpu", "peak_bytes")``."""
        return _series(self.readings, *path)

    def validation(self, name: str) -> tuple[list[int], list[float]]:
        """The same of a number in the validations."""
        return _series(self.named("validation"), name)

    def named(self, event: str) -> list[Record]:
        """The events of that name."""
        return [record for record in self.events if record["event"] == event]

    def warm(self) -> list[Record]:
        """The readings after the warm-up."""
        skipped = max(1, round(WARMUP_SHARE * len(self.readings)))
        return self.readings[skipped:] or self.readings

    def devices(self) -> list[str]:
        """The devices whose memory was read, CUDA devices first."""
        names = {name for record in self.readings for name in record.get("memory") or {}}
        return sorted(names, key=lambda name: (name == "cpu", name))

    def shares(self) -> dict[str, dict[str, float]]:
        """By thread, the mean of each share over the readings after the warm-up, weighted by their time."""
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        before = 0.0
        chosen = {id(record) for record in self.warm()}
        for record in self.readings:
            elapsed_s = value_of(record, "elapsed_s")
            weight = 1.0 if elapsed_s is None else max(elapsed_s - before, 1e-9)
            before = elapsed_s or 0.0
            if id(record) in chosen:
                for thread, shares in (record.get("threads") or {}).items():
                    for name, share in shares.items():
                        found.setdefault(thread, {}).setdefault(name, []).append((share, weight))
        return {thread: {name: _mean(pairs) for name, pairs in shares.items()} for thread, shares in found.items()}


def value_of(record: Record, *path: str) -> float | None:
    """The number at a path of names in a record, if it is there."""
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


def _series(records: Sequence[Record], *path: str) -> tuple[list[int], list[float]]:
    pairs = [(record["step"], value) for record in records if (value := value_of(record, *path)) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
