"""Draw a stretch of a Chrome trace: what each CUDA stream of a GPU ran, and when.

python -m benchmarks.draw_trace trace.json timeline.png --start-ms 20 --length-ms 30
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}


def read_streams(path: Path) -> dict[int, list[tuple[float, float]]]:
    """Start and length in ms of all that each stream ran, from the first one's start; the busiest stream first."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in KINDS]
    if not events:
        raise SystemExit(f"{path} holds nothing that a GPU ran.")
    first = min(event["ts"] for event in events)
    streams: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        streams[event["args"]["stream"]].append(((event["ts"] - first) / 1e3, event["dur"] / 1e3))
    return dict(sorted(streams.items(), key=lambda item: -sum(length for _, length in item[1])))


def draw(streams: dict[int, list[tuple[float, float]]], path: Path, start_ms: float, length_ms: float) -> None:
    """One lane a stream."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.8 * len(streams)), layout="constrained")
    for lane, (_stream, ran) in enumerate(streams.items()):
        shown = [(at - start_ms, dur) for at, dur in ran if start_ms <= at + dur and at <= start_ms + length_ms]
        axes.broken_barh(shown, (lane - 0.4, 0.8), facecolors=f"C{lane}", linewidth=0)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.set_xlim(0, length_ms)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--start-ms", type=float, default=0.0)
    parser.add_argument("--length-ms", type=float, default=30.0)
    arguments = parser.parse_args()
    draw(read_streams(arguments.trace), arguments.picture, arguments.start_ms, arguments.length_ms)


if __name__ == "__main__":
    main()
