"""``report``: a run's metrics as a picture and a summary, from the files in its directory alone.

    python -m examples.dflash report --out runs/mine

Guarantees:
- It reads what is there: a run that was killed, resumed, is still running, or was written by an older version.
- Nothing is written but ``report.png``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from .config import Config, InputError
from .history import History, Record, value_of
from .metrics import read_records

GIB = 2**30
WAITED = {"wait_input": "input", "wait_room": "room", "wait_gate": "the device"}


def summary(history: History, evaluation: Record | None = None) -> list[tuple[str, str]]:
    """The run in lines: what, and how much."""
    rows = [_progress(history)]
    _, loss = history.series("loss")
    if loss:
        rows.append(("loss", f"{loss[-1]:.3f} at the end, {min(loss):.3f} at best"))
    for name, (steps, values) in (
        ("acceptance length", history.series("acceptance")),
        ("validation", history.validation("acceptance")),
    ):
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            rows.append((name, f"{values[-1]:.2f} at the end, {values[best]:.2f} at best (step {steps[best]})"))
    slots = [share for share in (history.readings[-1].get("slot_accuracy") or ()) if share is not None]
    if slots:
        rows.append(("accuracy by slot", " ".join(f"{share:.0%}" for share in slots)))
    rates = [rate for record in history.warm() if (rate := value_of(record, "tokens_per_s")) is not None]
    if rates:
        rows.append(("throughput", f"{median(rates):,.0f} tokens/s (median after the warm-up)"))
    for thread, shares in history.shares().items():
        waits = [f"{share:.0%} for {what}" for kind, what in WAITED.items() if (share := shares.get(kind, 0)) >= 0.005]
        device = f", device {shares['device_busy']:.0%}" if "device_busy" in shares else ""
        waited = f"; waited {', '.join(waits)}" if waits else ""
        rows.append((thread, f"busy {shares.get('busy', 0):.0%}{device}{waited}"))
    for device in history.devices():
        peak = max(history.series("memory", device, "peak_bytes")[1], default=0.0)
        name = "memory of the process" if device == "cpu" else f"memory on {device}"
        rows.append((name, f"{peak / GIB:.2f} GiB at most"))
    last = history.readings[-1]
    if "compiles" in last:
        counts = (f"{last.get(name, 0):,} {name}" for name in ("captures", "replays", "compiles"))
        rows.append(("graphs", ", ".join(counts)))
    recompiles = [_recompile(record) for record in history.named("recompile")]
    number = max(len(recompiles), int(max(history.series("recompiles")[1], default=0)))
    rows.append(("recompiles", "; ".join([f"{number} after the warm-up", *recompiles]) if number else "none"))
    rows += [("error", f"{e.get('kind')} at step {e.get('step')}: {e.get('text')}") for e in history.named("error")]
    return rows + (_evaluated(evaluation) if evaluation else [])


def _progress(history: History) -> tuple[str, str]:
    step = history.readings[-1]["step"]
    planned = [record["num_steps"] for record in history.named("start") if "num_steps" in record]
    text = f"{step} of {planned[-1]} steps" if planned else f"{step} steps"
    text += f" in {_duration(history.seconds)}" if history.seconds else ""
    text += f", resumed after step {', '.join(map(str, history.resumed))}" if history.resumed else ""
    endings = [record["event"] for record in history.events if record["event"] in ("start", "resume", "stop", "end")]
    states = {"stop": ", stopped early", "start": ", not ended", "resume": ", not ended"}
    return "training", text + (states.get(endings[-1], "") if endings else "")


def _recompile(record: Record) -> str:
    reasons = record.get("reasons") or ["no reason given"]
    return f"{record.get('function')} at step {record.get('step')}: {reasons[0]}"


def _evaluated(evaluation: Record) -> list[tuple[str, str]]:
    rows = []
    acceptance = value_of(evaluation, "acceptance")
    if acceptance is not None:
        lossless = {True: ", lossless", False: ", NOT lossless"}.get(evaluation.get("lossless"), "")  # type: ignore[arg-type]
        passed = {True: "; passed", False: "; failed"}.get(evaluation.get("passed"), "")  # type: ignore[arg-type]
        if passed == "; failed" and evaluation.get("lossless"):
            passed = "; less than was asked for"
        rows.append(("evaluate", f"acceptance length {acceptance:.2f}{lossless}{passed}"))
    for way, scores in evaluation.items():
        saved = value_of(scores, "all", "calls_saved") if isinstance(scores, Mapping) else None
        if saved is not None:
            length, seconds = value_of(scores, "all", "acceptance"), value_of(scores, "seconds")
            time = "" if seconds is None else f", {seconds:.1f} s"
            rows.append((f"  {way}", f"acceptance length {length:.2f}, {saved:.1%} of target calls saved{time}"))
    alone = value_of(evaluation, "target_alone", "seconds")
    return [*rows, ("  target alone", f"{alone:.1f} s")] if alone is not None else rows


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _read_evaluation(path: Path) -> Record | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def report(config: Config) -> int:
    """The command: draw ``report.png`` and print the summary.

    Raises:
        InputError: there are no metrics, or there is no matplotlib.
    """
    path = config.out / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"There is no {path}. Run train first, with the same --out.")
    history = History.of(read_records(path))
    if not history.readings:
        raise InputError(f"{path} holds no reading yet. The first one comes with the first step.")
    try:
        from .figure import draw
    except ImportError as exc:
        raise InputError(f'The picture needs matplotlib ({exc}): pip install -e ".[dflash]"') from exc
    picture = config.out / "report.png"
    draw(history, str(config.out), picture)
    table = Table(title=f"{config.out}", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary(history, _read_evaluation(config.out / "evaluation.json")):
        table.add_row(name, text)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"The picture is {picture}.", soft_wrap=True)
    return 0
