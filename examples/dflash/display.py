"""The live display of a training run on a terminal: a progress bar, and what the last readings say.

Guarantees:
- It fits the terminal's width and shows less where that is narrow; a terminal that is resized is drawn anew.
- It is drawn by a thread of its own twice a second, from the last reading; adding one costs microseconds.
- ``stop`` and ``give_up`` leave the cursor as it was.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

GIB = 2**30
DRAWS_PER_S = 2  # each draw holds the interpreter for some milliseconds
HISTORY = 400  # readings that the sparkline goes back
MAX_THREADS = 12  # that have a row
MAX_DEVICES = 2  # whose memory is shown
WIDE = 72  # columns, from which on threads show their waits
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_SHOW_CURSOR = "\x1b[?25h"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Values as a row of bars at most ``width`` wide, from the least to the greatest; each bar is a mean of several."""
    if not values or width < 1:
        return ""
    num_bars = min(width, len(values))
    edges = [round(i * len(values) / num_bars) for i in range(num_bars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if ascii_only else _BARS
    if high <= low:
        return bars[len(bars) // 2] * num_bars
    return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


class Display:
    """Progress and the last readings. Methods may be called while it is drawn.

    Args:
        num_steps, completed: of the run, and those done before.
        console: where to draw; None: standard output.
    """

    def __init__(self, num_steps: int, completed: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=num_steps, completed=completed)
        self._acceptance: deque[float] = deque(maxlen=HISTORY)
        self._best = 0.0
        self._last: Mapping[str, Any] | None = None
        self._validation: Mapping[str, Any] | None = None
        self._checkpoint: Mapping[str, Any] | None = None
        self._live = Live(_Drawn(self), console=self.console, refresh_per_second=DRAWS_PER_S)

    @staticmethod
    def suits_terminal() -> bool:
        """Whether standard output is a terminal on which lines can be drawn anew."""
        if sys.stdout is None or sys.stdout.closed or not sys.stdout.isatty():
            return False
        return not Console().is_dumb_terminal

    def start(self) -> None:
        """Draw from now on."""
        self._live.start()

    def stop(self) -> None:
        """Draw once more, and leave the terminal."""
        self._live.stop()

    def give_up(self) -> None:
        """Leave a terminal that fails, without a word from it."""
        with suppress(Exception):
            self._live.stop()
        with suppress(Exception):  # stop may have failed before it came to the cursor
            if self.console.is_terminal:
                self.console.file.write(_SHOW_CURSOR)
                self.console.file.flush()

    def say(self, text: str) -> None:
        """A line above."""
        self.console.print(text, highlight=False, markup=False)

    def advance(self, step: int) -> None:
        """``step`` steps are done."""
        self._progress.update(self._task, completed=step)

    def add(self, record: Mapping[str, Any]) -> None:
        """Show a reading or an event from now on."""
        event = record.get("event")
        if event == "validation":
            self._validation = record
        elif event == "checkpoint":
            self._checkpoint = record
        elif event is None:
            self._last = record
            acceptance = record.get("acceptance")
            if isinstance(acceptance, int | float):
                self._acceptance.append(acceptance)
                self._best = max(self._best, acceptance)
            self.advance(record["step"])

    def rows(self, width: int, *, ascii_only: bool = False) -> Group:
        """All that is drawn, for a terminal of this width."""
        parts: list[RenderableType] = [self._progress.get_renderable()]
        if self._last is None:
            parts.append(Text("warming up: compiling and loading", style="dim", no_wrap=True, overflow="ellipsis"))
        else:
            parts.append(self._numbers(self._last, width, ascii_only))
            if self._last.get("threads"):
                parts.append(_threads(self._last["threads"], width, ascii_only))
        return Group(*parts)

    def _numbers(self, record: Mapping[str, Any], width: int, ascii_only: bool) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)

        def add(name: str, text: str) -> None:
            if text:
                table.add_row(name, Text(text))

        loss = _number(record, "loss", ".3f")
        norm, lr = _number(record, "grad_norm", ".2f"), _number(record, "lr", ".2e")
        add("loss", loss + (f"   gradient norm {norm}" if norm else "") + (f"   lr {lr}" if lr else ""))
        acceptance = _number(record, "acceptance", ".2f")
        bars = sparkline(list(self._acceptance), max(0, min(40, width - 42)), ascii_only=ascii_only)
        add("acceptance", f"{acceptance}   best {self._best:.2f}   {bars}".rstrip() if acceptance else "")
        add("by slot", " ".join(f"{share:.0%}" for share in record.get("slot_accuracy") or ()))
        if self._validation is not None:
            measured = [
                f"{name} {text}" for name in ("acceptance", "loss") if (text := _number(self._validation, name, ".3f"))
            ]
            add("validation", f"{'   '.join(measured)}   at step {self._validation.get('step')}")
        if self._checkpoint is not None:
            add("checkpoint", f"step {self._checkpoint.get('step')}")
        add("tokens/s", _number(record, "tokens_per_s", ",.0f"))
        add("memory", _memory(record.get("memory") or {}))
        counts = [("captures", "captures"), ("replays", "replays"), ("compiles", "compiles")]
        counts += [("recompiles", "RECOMPILES")] if record.get("recompiles") else []
        add("graphs", "   ".join(f"{record[key]:,} {name}" for key, name in counts if key in record))
        return table


class _Drawn:
    """The display as something rich can draw; what goes wrong in it becomes one line, not an end."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            rows = self._display.rows(options.max_width, ascii_only=options.ascii_only)
            yield from console.render(rows, options)
        except Exception as exc:
            yield Text(f"no display: {exc}", no_wrap=True, overflow="ellipsis")


def _number(record: Mapping[str, Any], name: str, form: str) -> str:
    value = record.get(name)
    return format(value, form) if isinstance(value, int | float) else ""


def _memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    """The fullest CUDA devices, and the process."""
    fullest = sorted((name for name in memory if name != "cpu"), key=lambda name: -memory[name]["peak_bytes"])
    names = {name: name for name in fullest[:MAX_DEVICES]} | ({"cpu": "process"} if "cpu" in memory else {})
    return "   ".join(
        f"{label} {memory[name]['allocated_bytes'] / GIB:.1f} GiB, peak {memory[name]['peak_bytes'] / GIB:.1f}"
        for name, label in names.items()
    )


def _threads(threads: Mapping[str, Mapping[str, float]], width: int, ascii_only: bool) -> Table:
    """A row a thread: how busy it was, and what it waited for."""
    wide = width >= WIDE
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", no_wrap=True)
    for title in ("busy", *(("device", "waits: input", "room", "gate") if wide else ())):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row("thread", "", *(Text(str(column.header), style="dim") for column in table.columns[2:]))
    for name in list(threads)[:MAX_THREADS]:
        shares = threads[name]
        cells = [_share(shares, "busy")]
        if wide:
            cells += [_share(shares, key) for key in ("device_busy", "wait_input", "wait_room", "wait_gate")]
        table.add_row(name, _bar(shares.get("busy", 0.0), ascii_only), *cells)
    if len(threads) > MAX_THREADS:
        table.add_row(f"and {len(threads) - MAX_THREADS} more")
    return table


def _share(shares: Mapping[str, float], name: str) -> str:
    return f"{shares[name]:.0%}" if name in shares else ""


def _bar(share: float, ascii_only: bool) -> Text:
    full = round(10 * min(1.0, max(0.0, share)))
    on, off = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble((on * full, "green"), (off * (10 - full), "dim"))
