"""What a run measures: accumulated on the device, read every N steps, and reported.

Guarantees:
- Between two readings nothing waits for the device.
- Each reading is one line of JSON in the run's ``metrics.jsonl``, flushed at once, whatever else shows it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .loss import Loss

NUM_SCALARS = 4  # weighted sum, weight, tokens, blocks; then per slot: correct, total, accepted


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


class Silent:
    """Stands in for a ``Reporter`` in the processes that do not speak."""

    def say(self, text: str) -> None: ...

    def advance(self, step: int) -> None: ...

    def report(self, record: Mapping[str, Any]) -> None: ...

    def event(self, event: str, **values: Any) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Shows a run's progress and writes its metrics. Used by one thread at a time.

    Args:
        path: the JSON lines file; it is begun anew, unless a run is resumed.
        num_steps: of the run.
        tensorboard: write for TensorBoard as well, beside ``path``.
        live: a progress display that redraws itself; None: where standard output is a terminal.
        resume_step: steps that are done; what the file holds of later ones will be trained again, and is cut.
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
        self._file = path.open("w" if resume_step is None else "a", encoding="utf-8")
        self._num_steps = num_steps
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(path.parent))
        self._progress: Any = None
        if sys.stdout.isatty() if live is None else live:
            self._start_display()

    def _start_display(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(bar_width=14),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._task = self._progress.add_task("training", total=self._num_steps, text="warming up")
        self._progress.start()

    def say(self, text: str) -> None:
        """A line for people."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def advance(self, step: int) -> None:
        """``step`` steps are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def report(self, record: Mapping[str, Any]) -> None:
        """Write one reading, and show it."""
        self._file.write(json.dumps({"time": time.time(), **record}) + "\n")
        self._file.flush()
        text = (
            f"loss {record['loss']:.3f}  acceptance {record['acceptance']:.2f}  {record['tokens_per_s']:.0f} tokens/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], text=text)
        else:
            busy = f"drafter busy {record['drafter_busy']:.0%}"
            print(f"step {record['step']}/{self._num_steps}  {text}  {busy}", flush=True)
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name, value, record["step"])

    def event(self, event: str, **values: Any) -> None:
        """Write what happened, as one line."""
        self._file.write(json.dumps({"time": time.time(), "event": event, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the display and the files. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._file.close()
