"""The ways to run a training step, which of them must agree, and at which batch size a graph stops paying.

Guarantees:
- A way with eager's own kernels agrees only to the bit, unless eager itself does not repeat to the bit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from .supervised import Result

PAYS = 1.05  # a graph pays where eager takes at least this many times as long
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-3}  # relative, of a loss, where the kernels are others
Groups = dict[tuple[str, int | None], dict[str, Result]]  # by case and batch, then by way


@dataclass(frozen=True)
class Way:
    """How a step is run.

    Attributes:
        graph: what captures it: "none", or one of the branches of ``make_step``.
        mode: of torch.compile; None: eager kernels.
        ours: whether graphsafe runs it, in a context.
    """

    graph: str = "none"
    mode: str | None = None
    ours: bool = False


WAYS = {
    "eager": Way(),
    "eager again": Way(),  # whether eager repeats itself to the bit
    "compile": Way(mode="default"),
    "reduce-overhead": Way(mode="reduce-overhead"),
    "max-autotune-no-cudagraphs": Way(mode="max-autotune-no-cudagraphs"),
    "max-autotune": Way(mode="max-autotune"),
    "CUDAGraph": Way("by hand"),
    "make_graphed_callables": Way("torch"),
    "CudaGraphModule": Way("tensordict"),
    "graphed": Way("graphed", ours=True),
    "TrainStep": Way("TrainStep", ours=True),
    "CUDAGraph + compile": Way("by hand", "default"),
    "graphed + compile": Way("graphed", "default", ours=True),
    "TrainStep + compile": Way("TrainStep", "default", ours=True),
}
CPU_WAYS = ("eager", "eager again", "CUDAGraph", "graphed", "TrainStep")  # without a compiler
SWEEP_WAYS = ("eager", "CUDAGraph", "TrainStep")


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    if len(values) < 2:
        return {"median": values[0], "p10": values[0], "p90": values[0]}
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def check(found: dict[str, Result]) -> dict[str, dict[str, Any]]:
    """Compare each way with the one it must agree with.

    Returns, by way: the other way, the tolerance (0.0: to the bit), whether the bits are equal, the largest relative
    difference of a loss, and whether that agrees.
    """
    checked: dict[str, dict[str, Any]] = {}
    eager = found.get("eager", {})
    if "losses" not in eager:
        return checked
    again = found.get("eager again", {})
    repeats = all(again[key] == eager[key] for key in ("losses", "weights")) if "losses" in again else None
    for name, result in found.items():
        if name == "eager" or "losses" not in result:
            continue
        dtype = result["dtypes"][0]
        exact = WAYS[name].mode is None and repeats is not False and name != "eager again"
        # Compiled kernels are the same ones in several ways, but chosen by timing: the bits are told, not asked for.
        reference = "eager" if WAYS[name].mode is None or "losses" not in found.get("compile", {}) else "compile"
        if name == "compile":
            reference = "eager"
        other = found[reference]
        pairs = list(zip(result["losses"], other["losses"], strict=True))
        differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        worst = 1e30 if any(map(math.isnan, differences)) else min(max(differences), 1e30)  # JSON has no infinity
        bitwise = result["losses"] == other["losses"] and result["weights"] == other["weights"]
        tolerance = 0.0 if exact else TOLERANCES[dtype]
        agrees = bitwise if exact else worst <= tolerance
        checked[name] = {
            "with": reference,
            "tolerance": tolerance,
            "bitwise": bitwise,
            "max_relative": worst,
            "agrees": agrees,
        }
    return checked


def break_even(points: list[tuple[int, float]]) -> dict[str, int | None]:
    """Of (batch size, eager time over graph time): up to which batch the graph pays, and from which on it does not."""
    ordered = sorted(points)
    up_to, stops = None, None
    for batch, ratio in ordered:
        if ratio >= PAYS:
            up_to, stops = batch, None
        elif stops is None:
            stops = batch
    return {"pays_up_to": up_to, "stops_at": stops}


def collect(groups: Groups, config: dict[str, Any]) -> dict[str, Any]:
    """The record, and its tables in print."""
    cases: list[dict[str, Any]] = []
    ratios: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (case, batch), found in groups.items():
        checks = check(found)
        eager = found.get("eager", {})
        faster = {w: eager["row_ms"] / r["row_ms"] for w, r in found.items() if "ms" in r and "ms" in eager}
        cases.append({"case": case, "batch": batch, "results": found, "checks": checks, "times_as_fast": faster})
        for way, ratio in faster.items():
            if batch is not None and way != "eager":
                ratios.setdefault((case, way), []).append((batch, ratio))
        for way, one in checks.items():
            bits = "to the bit" if one["bitwise"] else f"within {one['max_relative']:.1e}"
            verdict = "agrees" if one["agrees"] else f"DOES NOT AGREE (tolerance {one['tolerance']})"
            print(f"{case:17} {batch or '-':>6} {way:27} {verdict} with {one['with']}, {bits}", flush=True)
    sweeps = [{"case": c, "way": w, "points": p, **break_even(p)} for (c, w), p in ratios.items()]
    for sweep in sweeps:
        row = "  ".join(f"{batch}: {ratio:.2f}" for batch, ratio in sweep["points"])
        print(f"{sweep['case']:17} {sweep['way']:20} times as fast as eager by batch  {row}", flush=True)
        print(f"{'':38} pays up to batch {sweep['pays_up_to']}, no longer from {sweep['stops_at']}", flush=True)
    verdicts = [one["agrees"] for case in cases for one in case["checks"].values()]
    return {
        "benchmark": "steps",
        "configuration": config,
        "agree": all(verdicts) if verdicts else None,  # None: nothing was compared
        "failed": [
            [case, batch, w] for (case, batch), found in groups.items() for w, r in found.items() if "error" in r
        ],
        "cases": cases,
        "sweeps": sweeps,
    }
