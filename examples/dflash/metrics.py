"""What a run measures: accumulated on the device, read every N steps, and reported.

Guarantees:
- Between two readings nothing waits for the device.
- Each reading, and each event of the run, is one line of JSON in its ``metrics.jsonl``, flushed at once, whatever else
  shows it.
- A run that is resumed goes on in the same file, without what it is about to measure again.
- What is shown never ends a run: a terminal that fails or goes away is left alone from then on.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .display import Display
from .files import replace_file
from .loss import Loss

NUM_SCALARS = 4  # weighted sum, weight, tokens, blocks; then per slot: correct, total, accepted
MEASURED_EVENTS = ("validation", "checkpoint")  # of a step; a run that is resumed before it has them again


def measure(loss: Loss, num_tokens: Tensor) -> Tensor:
    """One float32 tensor [4 + 3 * (B - 1)] of all that a step measured. Sums, so replicas and steps add up."""
    scalars = torch.stack([loss.weighted_sum.detach(), loss.weight, num_tokens.float(), loss.counts.blocks])
    return torch.cat([scalars, loss.counts.correct, loss.counts.total, loss.counts.accepted])


def summarize(measured: Sequence[float]) -> dict[str, Any]:
    """The metrics in a sum of ``measure``'s tensors.

    Returns:
        loss; acceptance: expected tokens a target call, 1 + the drafted ones that the target would keep;
        slot_accuracy: of each drafted slot; tokens: of context, padding aside; blocks: with a label.
    """
    weighted_sum, weight, tokens, blocks = measured[:NUM_SCALARS]
    slots = (len(measured) - NUM_SCALARS) // 3
    correct, total, accepted = (measured[NUM_SCALARS + i * slots :][:slots] for i in range(3))
    return {
        "loss": weighted_sum / weight if weight else 0.0,
        "acceptance": 1 + sum(accepted) / blocks if blocks else 1.0,
        "slot_accuracy": [c / t if t else 0.0 for c, t in zip(correct, total, strict=True)],
        "tokens": int(tokens),
        "blocks": int(blocks),
    }


class Meter:
    """Sums what steps measured, in float64 on the device, until it is read."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._sum = torch.zeros(NUM_SCALARS + 3 * (block_size - 1), dtype=torch.float64, device=device)

    def add(self, measured: Tensor) -> None:
        """Sync: none."""
        self._sum += measured

    def take(self) -> Tensor:
        """The sum since the last time, on the device, and start anew."""
        taken = self._sum.clone()
        self._sum.zero_()
        return taken


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``. Lines that are no whole record, as a killed run's last, are left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def up_to(records: Sequence[Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    """What stays of a run's records where it goes on after ``step``: all but what was measured at later steps."""

    def later(record: Mapping[str, Any]) -> bool:
        measured = "event" not in record or record["event"] in MEASURED_EVENTS
        return measured and isinstance(record.get("step"), int) and record["step"] > step

    return [record for record in records if not later(record)]


class Silent:
    """Stands in for a ``Reporter`` in the processes that do not speak."""

    step = 0

    def say(self, text: str) -> None: ...

    def advance(self, step: int) -> None: ...

    def report(self, record: Mapping[str, Any]) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Shows a run's progress and writes its metrics.

    Args:
        path: the JSON lines file.
        num_steps: of the run.
        tensorboard: write for TensorBoard as well, beside ``path``.
        live: a progress display that redraws itself; None: where standard output is a terminal.
        resume_step: go on after this step in a file that is there; None: begin it anew.

    Attributes:
        step: the last step that was reported.

    Thread safety: any thread may ``say`` something or note an event; one reports and advances.
    """

    def __init__(
        self,
        path: Path,
        num_steps: int,
        *,
        tensorboard: bool = False,
        live: bool | None = None,
        resume_step: int | None = None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[Mapping[str, Any]] = []
        if resume_step is not None and path.is_file():
            kept = up_to(read_records(path), resume_step)
        self._path = path
        text = "".join(json.dumps(record) + "\n" for record in kept)
        with _named(path):
            replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()  # guards the file, for a line each; taken alone
        self._num_steps, self.step = num_steps, resume_step or 0
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(path.parent), purge_step=None if resume_step is None else resume_step + 1)
        self._display: Display | None = None
        self._prints = True
        if Display.suits_terminal() if live is None else live:
            self._display = Display(num_steps, self.step)
            for record in kept:
                self._show(lambda display, record=record: display.add(record))  # type: ignore[misc]
            self._show(Display.start)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._display is not None:
            self._show(lambda display: display.say(text))
        else:
            self._print(text)

    def advance(self, step: int) -> None:
        """``step`` steps are done."""
        self.step = step
        self._show(lambda display: display.advance(step))

    def event(self, name: str, **fields: Any) -> None:
        """Write that something happened: start, resume, validation, checkpoint, recompile, stop, error or end.

        Args:
            fields: what JSON can hold. ``step`` is the last one reported, unless it is given.
        """
        record: dict[str, Any] = {"event": name, "step": self.step, **fields}
        self._write(record)
        self._show(lambda display: display.add(record))
        if name == "validation":
            self._write_scalars({f"validation/{key}": fields[key] for key in fields if key != "step"}, record["step"])

    def report(self, record: Mapping[str, Any]) -> None:
        """Write one reading, and show it."""
        self.step = record["step"]
        self._write(record)
        if self._display is not None:
            self._show(lambda display: display.add(record))
        else:
            self._print(
                f"step {record['step']}/{self._num_steps}  loss {record['loss']:.3f}  acceptance "
                f"{record['acceptance']:.2f}  {record['tokens_per_s']:.0f} tokens/s  drafter busy "
                f"{record['drafter_busy']:.0%}"
            )
        self._write_scalars(record, record["step"])

    def close(self) -> None:
        """End the display and the files. Idempotent."""
        self._show(Display.stop)
        self._display = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with suppress(OSError):  # what could not be written has been said
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_finite({"time": time.time(), **record}), allow_nan=False) + "\n"
        with self._lock, _named(self._path):
            self._file.write(line)
            self._file.flush()

    def _write_scalars(self, record: Mapping[str, Any], step: int) -> None:
        if self._writer is not None:
            for name, value in flatten(record):
                if name != "step":
                    self._writer.add_scalar(name, value, step)

    def _show(self, change: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            change(self._display)
        except Exception as exc:  # whatever a terminal does
            display, self._display = self._display, None
            display.give_up()
            self._write({"event": "display", "step": self.step, "text": f"switched off: {type(exc).__name__}: {exc}"})

    def _print(self, text: str) -> None:
        if self._prints:
            try:
                print(text, flush=True)
            except (OSError, ValueError):  # whoever read it has gone
                self._prints = False


def flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a record by name: ``threads/drafter-0/busy``; items of a list are numbered from 1."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}/")
        elif isinstance(value, list | tuple):
            yield from flatten({str(number): item for number, item in enumerate(value, 1)}, f"{name}/")
        elif isinstance(value, int | float):
            yield name, value


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an OSError of the block say which file it is about, as that of a full disk does not."""
    try:
        yield
    except OSError as exc:
        exc.filename = exc.filename or str(path)
        raise
