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
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.dflash.config import Config
from examples.dflash.metrics import read_records
from examples.dflash.plan import read_shape

WAYS = ("eager", "compile", "graph")
GIBIBYTE = 2**30
TOLERANCES = {"float32": 2e-3, "bfloat16": 2e-2}  # of a reading's loss, relative
ROOT = Path(__file__).parents[1]


def train_options(arguments: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """What all ways are given."""
    options = ["--preset", arguments.preset, "--max-steps", str(arguments.steps), "--epochs", "1000000"]
    options += ["--log-every", str(arguments.log_every), "--num-held-out", "0", "--num-validation", "0"]
    options += ["--save-every", "None", "--no-regenerate", "--no-resume"]
    for name in ("target", "token_budget", "num_anchors", "dtype"):
        if getattr(arguments, name) is not None:
            options += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
    return [*options, *others]


def write_data(path: Path, config: Config, num_documents: int) -> None:
    """Documents of random tokens, from a quarter of a row to half of it but at most 1,024, half of each supervised."""
    shape, _ = read_shape(config)
    draw = random.Random(0)
    longest = min(1024, config.token_budget // 2)
    with path.open("w") as file:
        for _ in range(num_documents):
            length = draw.randint(max(config.block_size + 2, longest // 2), max(config.block_size + 2, longest))
            tokens = [draw.randrange(3, shape.vocab_size - 1) for _ in range(length)]
            if config.mask_token_id is not None:
                tokens = [3 if token == config.mask_token_id else token for token in tokens]
            mask = [int(place >= length // 2) for place in range(length)]
            file.write(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")


def run(way: str, options: Sequence[str], out: Path, seconds: float) -> dict[str, Any]:
    """Train one way. Returns its readings, or an error."""
    command = [sys.executable, "-m", "examples.dflash", "train", *options, "--step", way, "--out", str(out)]
    began = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        return {"error": " ".join(lines[-2:])[:400] or f"exit status {done.returncode}"}
    return {"began": began, "wall_s": time.time() - began, "records": read_records(out / "metrics.jsonl")}


def summarize(result: dict[str, Any], num_warmup: int) -> dict[str, Any]:
    """Of a run's readings, those after the warm-up; of an error, the error."""
    if "error" in result:
        return result
    readings = [record for record in result["records"] if "event" not in record]
    warm = [record for record in readings if record["step"] > num_warmup]
    if len(warm) < 2:
        return {"error": f"{len(warm)} readings after the warm-up: take more --steps, or a lower --log-every"}
    speeds = sorted(record["tokens_per_s"] for record in warm)
    threads = [record["threads"] for record in warm]

    def share(prefix: str, kind: str) -> float:
        return float(statistics.mean(t[name][kind] for t in threads for name in t if name.startswith(prefix)))

    last = readings[-1]
    return {
        "tokens_per_s": statistics.median(speeds),
        "quartiles": [speeds[len(speeds) // 4], speeds[(3 * len(speeds)) // 4]],
        "slowest": speeds[0],
        "fastest": speeds[-1],
        "num_readings": len(warm),
        "drafter_busy": statistics.mean(record["drafter_busy"] for record in warm),
        "drafter_device_busy": share("drafter", "device_busy"),
        "target_device_busy": share("target", "device_busy"),
        "peak_gib": last["memory_bytes"] / GIBIBYTE,
        "first_step_s": readings[0]["time"] - result["began"],
        "wall_s": result["wall_s"],
        "recompiles": last["recompiles"],
        "captures": last["captures"],
        "losses": {record["step"]: record["loss"] for record in readings},
    }


def losses_apart(results: dict[str, dict[str, Any]]) -> float | None:
    """The largest relative difference of any two ways' losses at one step, infinite where one is no number.

    None where fewer than two ways were measured.
    """
    series = [result["losses"] for result in results.values() if "losses" in result]
    if len(series) < 2:
        return None
    apart = [0.0]
    for step in set.intersection(*(set(one) for one in series)):
        losses = [one[step] for one in series]
        known = all(loss is not None and math.isfinite(loss) for loss in losses)
        apart.append(max(losses) / min(losses) - 1 if known else math.inf)
    return max(apart)


def show(way: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{way:8} failed: {result['error']}"
    spread = "quartiles {:,.0f} and {:,.0f}".format(*result["quartiles"])
    return (
        f"{way:8} {result['tokens_per_s']:10,.0f} tokens/s ({spread}, of {result['num_readings']} readings)  "
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
    apart = losses_apart(results)
    found["losses_apart"] = apart if apart is None or math.isfinite(apart) else "not a number"
    found["losses_agree"] = apart is None or apart <= TOLERANCES[dtype]
    found["failed"] = sorted(way for way, result in results.items() if "error" in result)
    return found


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="smollm2")
    parser.add_argument("--target", help="the preset's architecture with random weights, unless given")
    parser.add_argument("--data", type=Path, help="random tokens, unless given")
    parser.add_argument("--token-budget", type=int)
    parser.add_argument("--num-anchors", type=int)
    parser.add_argument("--dtype", choices=tuple(TOLERANCES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=40, help="steps that do not count")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seconds-limit", type=float, default=180.0, help="for each way")
    parser.add_argument("--out", type=Path, help="where the runs stay; a temporary directory, unless given")
    known, others = parser.parse_known_args(arguments)
    return known, [option for option in others if option != "--"]


def measure(arguments: argparse.Namespace, others: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run all ways, one after the other, and print each."""
    from examples.dflash.__main__ import parse as parse_config

    if arguments.target is None:
        named = parse_config("train", ["--preset", arguments.preset]).target
        arguments.target = named if named.startswith("random:") else f"random:{named}"
    options = train_options(arguments, others)
    config = parse_config("train", options)
    directory.mkdir(parents=True, exist_ok=True)
    data = arguments.data
    if data is None:
        data = directory / "random.jsonl"
        write_data(data, config, max(64, 16 * config.token_budget // 1024))
    results = {}
    for way in arguments.ways:
        done = run(way, [*options, "--data", str(data)], directory / way, arguments.seconds_limit)
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
    if arguments.out is not None:
        found = measure(arguments, others, arguments.out)
    else:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(arguments, others, Path(directory))
    print(json.dumps(found), flush=True)
    return 0 if found["losses_agree"] and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
