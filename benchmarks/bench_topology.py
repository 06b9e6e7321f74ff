"""The pipeline's topologies: N target devices and M drafter devices in one process, each with --step eager, compile
and graph.

    python -m benchmarks.bench_topology --preset qwen3-8b --target random:Qwen/Qwen3-8B --device cuda \\
        --topologies 6+2 7+1 5+3 4+4 --ways eager compile graph --steps 300 --out runs/topologies
    python -m benchmarks.bench_topology --device cpu --preset demo --topologies 6+2 --compile-at-once 8

Targets are cuda:0 to N-1 and drafters the M after those; --device cpu names "cpu" as often. Each way of a topology is
``train`` in a process of its own, on the same data, with a limit of time; what it has measured until the limit is kept.
Reported are, after a warm-up, tokens/s in all and a device; the drafters' busy share, which is all but waits at rings
and gates, so what replicas wait for each other is in it; what the threads wait for at rings; when each thread was first
seen at work; memory at its peak, and whether it grew after step 10. The losses of all ways of a topology must agree. A
topology that needs more devices than are here is skipped. --compile-at-once measures the first steps of so many threads
of one process that begin together, against one thread's alone. What a run has compiled is in torch's caches for the
next one, unless --cold-caches is given.

The last line is JSON, as is the file of --record, which is written anew after each run. The exit status is 1 where a
run failed, losses do not agree, or nothing was measured. Options that this command does not know go to ``train``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.dflash.files import replace_file
from examples.dflash.smoke import GROWTH

from . import pipeline_runs
from .compile_at_once import compile_at_once
from .pipeline_runs import (
    GIBIBYTE,
    add_options,
    agreement,
    losses,
    mean_share,
    place_for_runs,
    prepare,
    readings,
    spread,
)

FLAT_FROM = 10  # the step after which memory should not grow
HOST_SLACK = 64 * 2**20  # bytes that a process's allocators may still take: of each thread an arena
COLUMNS = {  # of the table, and how wide they are
    "topology": 8,
    "way": 8,
    "tokens/s": 12,
    "quartiles": 21,
    "a device": 10,
    "drafters busy": 13,
    "drafters wait": 13,
    "targets wait": 12,
    "ready s": 7,
    "first step s": 12,
    "peak GiB": 8,
    "memory": 6,
    "status": 7,
}


@dataclass(frozen=True)
class Split:
    """How many devices have targets, and how many have drafters. Written 6+2."""

    num_targets: int
    num_drafters: int

    @classmethod
    def parse(cls, text: str) -> Split:
        """Raises: argparse.ArgumentTypeError."""
        parts = text.split("+")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is no topology: write targets+drafters, such as 6+2")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.num_targets}+{self.num_drafters}"

    @property
    def num_devices(self) -> int:
        return self.num_targets + self.num_drafters

    def options(self, device: str) -> list[str]:
        """For ``train``: targets on the first devices, drafters on those after them."""
        names = [device if device == "cpu" else f"{device}:{index}" for index in range(self.num_devices)]
        targets, drafters = names[: self.num_targets], names[self.num_targets :]
        return ["--targets", ",".join(targets), "--drafters", ",".join(drafters)]

    def lacks(self, device: str) -> str | None:
        """Why it cannot be measured here; None: it can."""
        here = torch.cuda.device_count() if device == "cuda" else self.num_devices
        return None if here >= self.num_devices else f"needs {self.num_devices} CUDA devices, and {here} are here"


def summarize(result: Mapping[str, Any], num_warmup: int) -> dict[str, Any]:
    """What a run's metrics say, as far as it came; ``error`` where it failed, or was too short."""
    logged = readings(result["records"])
    found: dict[str, Any] = {"status": result["status"], "wall_s": result["wall_s"]}
    found["last_step"] = logged[-1]["step"] if logged else 0
    found["losses"] = losses(logged)
    found["starts_s"] = starts(result["records"], result["began"])
    warm = [record for record in logged if record["step"] > num_warmup]
    if "error" in result:
        found["error"] = result["error"]
    elif len(warm) < 2:
        found["error"] = f"{len(warm)} readings after the warm-up: take more --steps, or a lower --log-every"
    if logged:
        found["memory"] = memory(logged)
        found |= {name: logged[-1][name] for name in ("captures", "compiles", "recompiles")}
        found["rings"] = logged[-1]["rings"]
    if warm:
        speeds = spread(record["tokens_per_s"] for record in warm)
        num_devices = sum(len(numbers) for numbers in numbers_of(warm[-1]["rings"]))
        found |= speeds
        found["tokens_per_s_a_device"] = speeds["tokens_per_s"] / num_devices
        found["quartiles_a_device"] = [speed / num_devices for speed in speeds["quartiles"]]
        found["drafter_busy"] = statistics.mean(record["drafter_busy"] for record in warm)
        found["device_busy"] = {kind: mean_share(warm, kind, "device_busy") for kind in ("target", "drafter")}
        before = [record for record in logged if record["step"] <= num_warmup]
        found["waits"] = waits([*before, *warm][max(0, len(before) - 1)], warm[-1])
    return found


def numbers_of(rings: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Targets and drafters of rings named batches-TARGET and features-TARGET-DRAFTER."""
    pairs = [name.split("-")[1:] for name in rings if name.startswith("features")]
    return {target for target, _ in pairs}, {drafter for _, drafter in pairs}


def waits(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Shares of the time between two readings that threads waited, on average over those of a kind.

    From the sums of all waits, so that one that outlasts a reading counts whole.

    Returns:
        by kind of thread, ``input``: for something to work on; ``room``: for a free slot; ``gate``: for the device.
    """
    elapsed_s = max(last["time"] - first["time"], 1e-9)
    targets, drafters = numbers_of(last["rings"])

    def share(rings: str, field: str, num_threads: int) -> float:
        names = [name for name in last["rings"] if name.startswith(rings)]
        seconds = sum(last["rings"][name][field] - first["rings"][name][field] for name in names)
        return float(min(1.0, seconds / elapsed_s / num_threads))

    def gate(kind: str, num_threads: int) -> float:
        names = [name for name in last["contexts"] if name.startswith(kind)]
        seconds = sum(last["contexts"][name]["wait_s"] - first["contexts"][name]["wait_s"] for name in names)
        return float(min(1.0, seconds / elapsed_s / num_threads))

    return {
        "reader": {"room": share("batches", "produce_wait_s", 1), "gate": gate("reader", 1)},
        "target": {
            "input": share("batches", "consume_wait_s", len(targets)),
            "room": share("features", "produce_wait_s", len(targets)),
            "gate": gate("target", len(targets)),
        },
        "drafter": {
            "input": share("features", "consume_wait_s", len(drafters)),
            "gate": gate("drafter", len(drafters)),
        },
    }


def starts(records: Sequence[Mapping[str, Any]], began: float) -> dict[str, Any]:
    """Seconds since the process's start.

    Returns:
        loaded: the targets were there; ready: the first drafter began to train, which with two drafters or more is
        after all threads have computed and compiled once (None where nothing was logged); first_step: of the drafters,
        read, so all of them had done it; threads: the reading at which each thread's device was first seen at work, no
        sooner than the first step, and None for those that never were.
    """
    logged = readings(records)
    start = next((record["time"] - began for record in records if record.get("event") == "start"), None)
    threads: dict[str, float | None] = {}
    for record in logged:
        for name, shares in record["threads"].items():
            if name != "reader" and threads.get(name) is None:
                threads[name] = record["time"] - began if shares["device_busy"] > 0 else None
    first = logged[0]["time"] - began if logged else None
    ready = first - logged[0]["elapsed_s"] if logged and first is not None else None
    return {"loaded": start, "ready": ready, "first_step": first, "threads": threads}


def memory(logged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Peak by device; what was added after step ``FLAT_FROM``; and whether that is no more than a leak would not be.

    Returns:
        peak_gib: by device, ``cpu`` is the process; grown_bytes: on a GPU of the peak or of what is reserved, whichever
        grew more, on the host of what the process holds; flat: None where nothing was read so late, twice.
    """
    late = [record["memory"] for record in logged if record["step"] >= FLAT_FROM]
    last = logged[-1]["memory"]
    found: dict[str, Any] = {"peak_gib": {device: used["peak_bytes"] / GIBIBYTE for device, used in last.items()}}
    if len(late) < 2:
        return {**found, "grown_bytes": {}, "flat": None}
    grown = {}
    for device, used in last.items():
        kinds = ("allocated_bytes",) if device == "cpu" else ("peak_bytes", "reserved_bytes")
        grown[device] = max(used[kind] - late[0][device][kind] for kind in kinds)
    allowed = {
        device: GROWTH * used["peak_bytes"] + (HOST_SLACK if device == "cpu" else 0) for device, used in last.items()
    }
    return {**found, "grown_bytes": grown, "flat": all(grown[device] <= allowed[device] for device in grown)}


def row(split: Split, way: str, found: Mapping[str, Any]) -> list[str]:
    """Of the table."""
    times = found["starts_s"]
    line = [str(split), way]
    if "tokens_per_s" in found:
        waits = found["waits"]
        line += [f"{found['tokens_per_s']:,.0f}", "{:,.0f} - {:,.0f}".format(*found["quartiles"])]
        line += [f"{found['tokens_per_s_a_device']:,.0f}", f"{found['drafter_busy']:.0%}"]
        line += [f"{waits['drafter']['input']:.0%}"]
        line += [f"{waits['target']['input']:.0%} + {waits['target']['room']:.0%}"]
    else:
        line += ["-"] * 6
    line += ["-" if times[name] is None else f"{times[name]:.1f}" for name in ("ready", "first_step")]
    used = found.get("memory")
    line += ["-" if used is None else f"{max(used['peak_gib'].values()):.2f}"]
    line += ["-" if used is None else {True: "flat", False: "GROWS", None: "-"}[used["flat"]]]
    status = "stopped" if found["status"] is None else str(found["status"])
    return [*line, status]


def show_row(cells: Sequence[str]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True)), flush=True)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--topologies", nargs="+", type=Split.parse, default=[Split(6, 2)])
    parser.add_argument("--steps", type=int, default=300)
    add_options(parser)
    parser.add_argument("--compile-at-once", type=int, metavar="N", help="also the first steps of N threads together")
    parser.add_argument("--cold-caches", action="store_true", help="each run compiles anew")
    parser.add_argument("--seconds-limit", type=float, default=600.0, help="for each run")
    parser.add_argument("--out", type=Path, help="where the runs stay; a temporary directory, unless given")
    parser.add_argument("--record", type=Path, help="a file for what the last line holds, kept up to date")
    known, others = parser.parse_known_args(arguments)
    return known, [option for option in others if option != "--"]


def measure(arguments: argparse.Namespace, others: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run all topologies, each all ways, one after the other, and print each."""
    others = ["--cache-features", "0", *others]  # with features kept, targets would soon have nothing to do
    options, config, data = prepare(arguments, others, directory)
    found: dict[str, Any] = {"device": arguments.device, "options": options, "versions": {}, "devices": {}}
    found |= {"topologies": {}, "agreement": {}, "skipped": {}, "failed": []}
    show_row(list(COLUMNS))
    for split in arguments.topologies:
        lack = split.lacks(arguments.device)
        if lack is not None:
            found["skipped"][str(split)] = lack
            print(f"{split!s:8}  skipped: {lack}", flush=True)
            continue
        results: dict[str, dict[str, Any]] = {}
        found["topologies"][str(split)] = results
        for way in arguments.ways:
            where = directory / str(split) / way
            where.parent.mkdir(parents=True, exist_ok=True)
            given = [*options, *data, *split.options(arguments.device)]
            variables = environment(arguments, split, where)
            ran = pipeline_runs.run(way, given, where, arguments.seconds_limit, variables)
            results[way] = summarize(ran, arguments.warmup)
            for record in ran["records"]:
                if record.get("event") == "start":
                    found["versions"] = record["versions"]
                    found["devices"] |= record["devices"]
            show_row(row(split, way, results[way]))
            if "error" in results[way]:
                found["failed"].append(f"{split} {way}")
                print(f"          failed at step {results[way]['last_step']}: {results[way]['error']}", flush=True)
            keep(found, arguments.record)
        found["agreement"][str(split)] = agreed = agreement(results, config.dtype)
        if agreed["losses_apart"] is not None:
            verdict = "they agree" if agreed["losses_agree"] else "they DO NOT AGREE"
            print(f"          largest relative difference of losses: {agreed['losses_apart']}; {verdict}", flush=True)
    if arguments.compile_at_once is not None:
        found["compile_at_once"] = compile_at_once(
            arguments.compile_at_once, arguments.device, options, directory, arguments.seconds_limit
        )
        if "error" in found["compile_at_once"]:
            found["failed"].append("compile at once")
    keep(found, arguments.record)
    return found


def environment(arguments: argparse.Namespace, split: Split, where: Path) -> dict[str, str]:
    """What a run is given: with --cold-caches empty ones, and on the CPU its share of the cores for each thread.

    Each operation of each thread would take all of them otherwise.
    """
    variables = {}
    if arguments.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // split.num_devices))
    if arguments.cold_caches:
        caches = tempfile.mkdtemp(prefix=f"{where.name}-caches-", dir=where.parent)
        variables |= {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
    return variables


def keep(found: Mapping[str, Any], record: Path | None) -> None:
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        replace_file(record, lambda temporary: temporary.write_text(json.dumps(found, indent=1) + "\n"))


def exit_status(found: Mapping[str, Any]) -> int:
    measured = found["topologies"] or "compile_at_once" in found
    agreed = all(agreed["losses_agree"] for agreed in found["agreement"].values())
    return 0 if measured and agreed and not found["failed"] else 1


def main() -> int:
    arguments, others = parse()
    with place_for_runs(arguments.out) as directory:
        found = measure(arguments, others, directory)
    print(json.dumps(found), flush=True)
    return exit_status(found)


if __name__ == "__main__":
    sys.exit(main())
