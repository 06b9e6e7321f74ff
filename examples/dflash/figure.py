"""The picture of a run: loss, acceptance, accuracy, throughput, where the time went, memory.

Guarantees:
- It draws off screen, and changes no global state of matplotlib.
- A panel whose numbers are missing says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from .history import History

GIB = 2**30
SIZE_INCHES, DPI = (16, 10), 100  # 1600 x 1000 pixels
# Okabe and Ito's colours, which people tell apart whatever colours they see.
BLUE, ORANGE, GREEN, RED, GREY, SKY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8A8A8A", "#56B4E9", "#CC79A7"
TEXT, FAINT = "#303030", "#E4E4E4"
SHARES = {  # of a thread's time: what it is called, and its colour
    "busy": ("busy", BLUE),
    "wait_input": ("waits for input", ORANGE),
    "wait_room": ("waits for room", SKY),
    "wait_gate": ("waits for the device", PINK),
}
LOG_RATIO = 8  # of the largest loss to the smallest, from which on its axis is logarithmic
MANY_THREADS = 16  # above which their bars are too slim for numbers
MANY_DEVICES = 3  # from which on the fullest of the targets' and of the drafters' devices stand for all
SMOOTHED_FROM = 60  # readings, from which on a line of single readings gets a mean beside it


def figure(history: History, name: str = "") -> Figure:
    """The picture of a run.

    Args:
        history: with one reading at least.
        name: of the run, for the title.
    """
    drawn = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    drawn.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)  # type: ignore[union-attr]
    panels = (_loss, _acceptance, _slots, _throughput, _time, _memory)
    for axes, panel in zip(drawn.subplots(2, 3).flat, panels, strict=True):
        _style(axes)
        panel(axes, history)
        if not axes.has_data():
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=GREY)
            axes.set_xticks([])
            axes.set_yticks([])
    drawn.suptitle(_title(history, name), fontsize=15, color=TEXT, x=0.012, ha="left")
    return drawn


def draw(history: History, name: str, path: Path) -> None:
    """Write the picture as a PNG."""
    figure(history, name).savefig(path, format="png")


def _title(history: History, name: str) -> str:
    start: Any = next(iter(reversed(history.named("start"))), {})
    config, devices = start.get("config") or {}, start.get("devices") or {}
    parts = [f"{name}".strip(), f"step {history.readings[-1]['step']}"]
    if "target" in config:
        parts.append(f"target {config['target']}")
    if "block_size" in config:
        parts.append(f"blocks of {config['block_size']}")
    cards = sorted({text for device, text in devices.items() if device != "cpu"})
    if "targets" in start and "drafters" in start:
        parts.append(f"{len(start['targets'])} + {len(start['drafters'])} threads on {', '.join(cards) or 'the CPU'}")
    return "   ·   ".join(part for part in parts if part)


def _style(axes: Axes) -> None:
    axes.grid(True, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=10)


def _head(axes: Axes, title: str, unit: str, history: History | None = None) -> None:
    """Title and labels; with a history, steps along the x axis, and a line where the run was resumed."""
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=TEXT)
    axes.set_ylabel(unit, fontsize=11, color=TEXT)
    if history is None:
        return
    axes.set_xlabel("step", fontsize=11, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for number, step in enumerate(history.resumed):
        axes.axvline(step, color=GREY, linewidth=1, linestyle=":", label=None if number else "resumed", zorder=1)


def _line(axes: Axes, history: History, path: Sequence[str], colour: str, label: str) -> None:
    """One number over the steps; where the readings are many, faint, with their moving mean."""
    steps, values = history.series(*path)
    if not steps:
        return
    marker = "o" if len(steps) < 3 else None
    if len(steps) < SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=marker)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35, label="_readings")
    axes.plot(steps, _smoothed(values), color=colour, linewidth=1.8, label=label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a twentieth of all on either side, fewer at the ends."""
    reach = max(1, len(values) // 40)
    smooth = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        window = values[place - near : place + near + 1]
        smooth.append(sum(window) / len(window))
    return smooth


def _validated(axes: Axes, history: History, name: str) -> None:
    steps, values = history.validation(name)
    if steps:
        axes.plot(steps, values, color=ORANGE, linewidth=1.2, marker="o", markersize=6, label="validation", zorder=3)


def _legend(axes: Axes, place: str = "best", **options: Any) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(loc=place, fontsize=10, frameon=True, framealpha=0.9, edgecolor=FAINT, labelcolor=TEXT, **options)


def _loss(axes: Axes, history: History) -> None:
    _head(axes, "Loss", "weighted cross-entropy, nats a token", history)
    _line(axes, history, ("loss",), BLUE, "training")
    _validated(axes, history, "loss")
    losses = [loss for loss in history.series("loss")[1] if loss > 0]
    if losses and max(losses) > LOG_RATIO * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    _legend(axes, "upper right")


def _acceptance(axes: Axes, history: History) -> None:
    _head(axes, "Acceptance length", "tokens a target call", history)
    _line(axes, history, ("acceptance",), BLUE, "training")
    _validated(axes, history, "acceptance")
    steps, values = history.validation("acceptance")
    if not values:
        steps, values = history.series("acceptance")
    if values:
        best = max(range(len(values)), key=values.__getitem__)
        axes.plot(
            [steps[best]], [values[best]], marker="*", markersize=14, color=RED, linestyle="none", zorder=4,
            label=f"best: {values[best]:.2f} at step {steps[best]}",
        )  # fmt: skip
    _legend(axes, "lower right")


def _slots(axes: Axes, history: History) -> None:
    _head(axes, "Accuracy by drafted slot", "share of tokens that are right", history)
    series: dict[int, tuple[list[int], list[float]]] = {}
    for record in history.readings:
        for slot, share in enumerate(record.get("slot_accuracy") or (), 1):
            if share is not None:
                steps, shares = series.setdefault(slot, ([], []))
                steps.append(record["step"])
                shares.append(share)
    if not series:
        return
    most = max(series)
    colours = ListedColormap(colormaps["viridis"]([0.92 * slot / max(1, most - 1) for slot in range(most)]))
    for slot, (steps, shares) in sorted(series.items()):
        shown = _smoothed(shares) if len(shares) >= SMOOTHED_FROM else shares
        marker = "o" if len(steps) < 3 else None
        axes.plot(steps, shown, color=colours(slot - 1), linewidth=1.6, marker=marker, label=f"slot {slot}")
    key = ScalarMappable(BoundaryNorm([slot + 0.5 for slot in range(most + 1)], most), colours)
    place = axes.inset_axes((0.16, 0.94, 0.8, 0.035), zorder=5)
    bar = axes.figure.colorbar(key, cax=place, orientation="horizontal", ticks=list(series))
    bar.outline.set_visible(False)
    bar.minorticks_off()
    place.tick_params(colors=TEXT, labelsize=10, length=0, pad=2)
    axes.text(0.13, 0.957, "slot", transform=axes.transAxes, ha="right", va="center", fontsize=10, color=TEXT)
    axes.set_ylim(0, 1.2 * max(0.01, *(max(shares) for _, shares in series.values())))  # room for the key
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _throughput(axes: Axes, history: History) -> None:
    _head(axes, "Throughput", "tokens of context a second", history)
    _line(axes, history, ("tokens_per_s",), GREEN, "readings")
    rates = [record["tokens_per_s"] for record in history.warm() if record.get("tokens_per_s") is not None]
    if rates:
        middle = median(rates)
        axes.axhline(
            middle, color=GREY, linewidth=1.2, linestyle="--", label=f"median after the warm-up: {middle:,.0f}"
        )
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(axes, "lower right")


def _time(axes: Axes, history: History) -> None:
    _head(axes, "Where the time went", "")
    threads = history.shares()
    if not threads:
        return
    names = list(threads)
    starts = [0.0] * len(names)
    for key, (label, colour) in SHARES.items():
        widths = [threads[name].get(key, 0.0) for name in names]
        if not any(width >= 0.001 for width in widths):
            continue
        axes.barh(names, widths, left=starts, height=0.62, color=colour, label=label)
        for row, width in enumerate(widths):
            if width >= 0.09 and len(names) <= MANY_THREADS:
                axes.text(
                    starts[row] + width / 2, row, f"{width:.0%}", ha="center", va="center", fontsize=10,
                    color="black" if colour in (ORANGE, SKY, PINK) else "white",
                )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    device = {row: threads[name]["device_busy"] for row, name in enumerate(names) if "device_busy" in threads[name]}
    if device:  # a slim bar below, so that it hides nothing
        rows = [row + 0.4 for row in device]
        axes.barh(rows, list(device.values()), height=0.12, color="black", label="its device is busy")
    axes.grid(False, axis="y")
    if len(names) > MANY_THREADS:
        axes.tick_params(axis="y", labelsize=7)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(
        len(names) - 0.4, -0.5 - 0.3 * len(names)
    )  # the first thread on top, and room for the legend above it
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the thread's time after the warm-up", fontsize=11, color=TEXT)
    _legend(axes, "upper left", ncols=2)


def _memory(axes: Axes, history: History) -> None:
    groups = _groups(history)
    shared = any(len(devices) > 1 for devices in groups.values())
    _head(axes, "Memory of the fullest devices" if shared else "Memory", "GiB", history)
    kinds = (("allocated_bytes", "-", "in use"), ("peak_bytes", "--", "peak"), ("reserved_bytes", ":", "reserved"))
    top, num_lines = 0.0, 0
    for number, (label, devices) in enumerate(groups.items()):
        colour = GREY if devices == ["cpu"] else (BLUE, ORANGE, GREEN)[number % 3]
        for key, style, what in kinds:
            most: dict[int, float] = {}
            for device in devices:
                for step, value in zip(*history.series("memory", device, key), strict=True):
                    most[step] = max(most.get(step, 0.0), value / GIB)
            if most:
                axes.plot(
                    list(most), list(most.values()), color=colour, linestyle=style, linewidth=1.6,
                    marker="o" if len(most) < 3 else None, label=f"{label}, {what}",
                )  # fmt: skip
                top, num_lines = max(top, *most.values()), num_lines + 1
    if top:
        axes.set_ylim(0, top * (1.15 + 0.1 * math.ceil(num_lines / 2)))  # room for the legend
    _legend(axes, "upper left", ncols=2)


def _groups(history: History) -> dict[str, list[str]]:
    """The devices that share a line, by its label."""
    devices = history.devices()
    cuda = [device for device in devices if device != "cpu"]
    groups = {device: [device] for device in cuda}
    if len(cuda) >= MANY_DEVICES:
        start = next(iter(reversed(history.named("start"))), {})
        drafters = [device for device in cuda if device in (start.get("drafters") or ())]
        others = [device for device in cuda if device not in drafters]
        groups = {"drafters": drafters, "targets": others} if drafters else {"devices": others}
    return {label: members for label, members in groups.items() if members} | (
        {"process": ["cpu"]} if "cpu" in devices else {}
    )
