"""The whole pipeline with --step eager, compile and graph: reader, target, drafter, on the same data.

    python -m benchmarks.bench_pipeline --preset smollm2 --token-budget 4096 --num-anchors 128 --steps 200

Each way is ``train`` in a process of its own with an --out of its own. The target is the preset's architecture with
random weights and the data random tokens, unless --target and --data name others. What is reported comes from the run's
metrics.jsonl, after a warm-up: tokens/s (median and quartiles of the readings), the share of the time that drafters
and their devices are busy, memory, and the time from the process's start to the first step. The losses of all ways must
agree. The last line is JSON. Options that this command does not know go to ``train``, to all ways alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .pipeline_runs import (
    GIBIBYTE,
    add_options,
    agreement,
    losses,
    mean_share,
    place_for_runs,
    prepare,
    readings,
    run,
    spread,
)


def summarize(result: dict[str, Any], num_warmup: int) -> dict[str, Any]:
    """Of a run's readings, those after the warm-up; of an error, the error."""
    if "error" in result:
        return {"error": result["error"]}
    logged = readings(result["records"])
    warm = [record for record in logged if record["step"] > num_warmup]
    if len(warm) < 2:
        return {"error": f"{len(warm)} readings after the warm-up: take more --steps, or a lower --log-every"}
    last = logged[-1]
    return {
        **spread(record["tokens_per_s"] for record in warm),
        "drafter_busy": statistics.mean(record["drafter_busy"] for record in warm),
        "drafter_device_busy": mean_share(warm, "drafter", "device_busy"),
        "target_device_busy": mean_share(warm, "target", "device_busy"),
        "peak_gib": last["memory_bytes"] / GIBIBYTE,
        "first_step_s": logged[0]["time"] - result["began"],
        "wall_s": result["wall_s"],
        "recompiles": last["recompiles"],
        "captures": last["captures"],
        "losses": losses(logged),
    }


def show(way: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{way:8} failed: {result['error']}"
    quartiles = "quartiles {:,.0f} and {:,.0f}".format(*result["quartiles"])
    return (
        f"{way:8} {result['tokens_per_s']:10,.0f} tokens/s ({quartiles}, of {result['num_readings']} readings)  "
        f"drafter busy {result['drafter_busy']:.0%}, devices: drafter {result['drafter_device_busy']:.0%}, "
        f"target {result['target_device_busy']:.0%}  peak {result['peak_gib']:.2f} GiB  "
        f"first step after {result['first_step_s']:.1f} s"
    )


def describe(results: dict[str, dict[str, Any]], dtype: str) -> dict[str, Any]:
    """Ratios to eager, and whether the losses agree."""
    found: dict[str, Any] = {"results": results}
    eager = results.get("eager", {}).get("tokens_per_s")
    if eager:
        found["times_as_fast_as_eager"] = {
            way: result["tokens_per_s"] / eager for way, result in results.items() if "tokens_per_s" in result
        }
    found |= agreement(results, dtype)
    found["failed"] = sorted(way for way, result in results.items() if "error" in result)
    return found


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="smollm2")
    parser.add_argument("--steps", type=int, default=200)
    add_options(parser)
    parser.add_argument("--seconds-limit", type=float, default=180.0, help="for each way")
    parser.add_argument("--out", type=Path, help="where the runs stay; a temporary directory, unless given")
    known, others = parser.parse_known_args(arguments)
    return known, [option for option in others if option != "--"]


def measure(arguments: argparse.Namespace, others: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run all ways, one after the other, and print each."""
    options, config, data = prepare(arguments, others, directory)
    results = {}
    for way in arguments.ways:
        done = run(way, [*options, *data], directory / way, arguments.seconds_limit)
        results[way] = summarize(done, arguments.warmup)
        print(show(way, results[way]), flush=True)
    found = describe(results, config.dtype)
    for way, ratio in found.get("times_as_fast_as_eager", {}).items():
        if way != "eager":
            print(f"{way} is {ratio:.2f} times as fast as eager")
    if found["losses_apart"] is not None:
        verdict = "they agree" if found["losses_agree"] else "they DO NOT AGREE"
        print(f"largest relative difference of losses: {found['losses_apart']}; {verdict}")
    return {"options": options, **found}


def main() -> int:
    arguments, others = parse()
    with place_for_runs(arguments.out) as directory:
        found = measure(arguments, others, directory)
    print(json.dumps(found), flush=True)
    return 0 if found["losses_agree"] and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
