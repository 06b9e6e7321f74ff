"""Steps a second of 1, 2, 4 and 8 threads, against as many processes that do the same work.

    python -m benchmarks.bench_scaling --seconds-limit 420
    python -m benchmarks.bench_scaling --counts 1 2 --modes eager graph --seconds-limit 90

Each worker trains a model of its own with batches of its own, all alike; they begin a round together, at a barrier,
and a round's time is from the first one's begin to the last one's end. Threads are graphsafe's workers in one process;
processes are spawned, each with one context, so that both run the same code. Modes: eager, compile (graphsafe.compile)
and graph (a TrainStep); with two or more GPUs the workers are also spread over two. All workers of a mode must have the
same losses, to the bit, and the same as the first worker alone; where compiled, within a tolerance. Processes share a
GPU by time slices, as there is no MPS here. Each result is printed as it comes; the last line is JSON; the exit status
is 1 where losses do not agree or a job failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphsafe as gs

from .bench_drafter_step import default_device
from .bench_steps import Way, make_step
from .supervised import Job, Result, brief, results
from .workloads import FULL, MINI, configuration, make_training

KINDS = ("threads", "processes")
WAYS = {
    "eager": Way(ours=True),
    "compile": Way(mode="default", ours=True),
    "graph": Way("TrainStep", ours=True),
    "graph + compile": Way("TrainStep", "default", ours=True),
}
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-3}  # relative, of the losses of compiled workers
NUM_CHECKED = 8  # steps before the first round, the warm-up and the capture among them; their losses are compared

_making = threading.Lock()  # guards torch's default generators, which the weights are drawn from; taken alone

Say = Callable[[dict[str, Any]], None]


def train(job: Job, device: str, wait_all: Callable[[], Any], say: Say) -> None:
    """A worker's part, in a context: every mode in turn, each with its rounds."""
    for mode in job["modes"]:
        way = WAYS[mode]
        whole = way.mode is not None
        with _making:
            training = make_training(
                job["case"], torch.device(device), dtype=job["dtype"], batch=job["batch"], compiled_whole=whole
            )
        wait_all()
        start = time.monotonic()
        step, batches = make_step(way, training), training.batches
        kept = [step(batches[number % 2]).clone() for number in range(NUM_CHECKED)]
        losses = [loss.item() for loss in kept]
        ready_s = time.monotonic() - start
        rounds = []
        for _ in range(job["num_rounds"]):
            gs.current_context().synchronize()
            wait_all()
            begin = time.monotonic()
            for number in range(job["num_steps"]):
                loss = step(batches[number % 2])
            gs.current_context().synchronize()
            rounds.append((begin, time.monotonic()))
        say(
            {"mode": mode, "losses": [*losses, loss.item()], "rounds": rounds, "ready_s": ready_s}
            | training.description
        )
        del step, training
        wait_all()  # so that no one's compile or capture is in another's round


def process_main(job: Job, device: str, barrier: Any, reports: Any) -> None:
    """The main of one of several processes."""
    faulthandler.dump_traceback_later(job["limit_s"], exit=True)
    torch.set_num_threads(1)

    def say(report: dict[str, Any]) -> None:
        reports.put(report)

    try:
        with gs.thread_context(device, seed=0):
            train(job, device, lambda: barrier.wait(job["limit_s"]), say)
    except BaseException as error:
        reports.put({"error": brief(error)})
        barrier.abort()
        raise


def in_processes(job: Job) -> Iterator[dict[str, Any]]:
    """What the workers say, as it comes."""
    context = multiprocessing.get_context("spawn")
    devices = job["devices"]
    barrier, reports = context.Barrier(len(devices)), context.Queue()
    processes = [
        context.Process(target=process_main, args=(job, device, barrier, reports), daemon=True) for device in devices
    ]
    try:
        for process in processes:
            process.start()
        yield from taken(job, lambda: reports.get(timeout=1.0), lambda: any(p.is_alive() for p in processes))
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            process.kill()


def in_threads(job: Job) -> Iterator[dict[str, Any]]:
    """What the workers say, as it comes."""
    devices = job["devices"]
    barrier = threading.Barrier(len(devices))
    reports: queue.Queue[dict[str, Any]] = queue.Queue()

    def body(device: str) -> None:
        try:
            train(job, device, lambda: barrier.wait(job["limit_s"]), reports.put)
        except BaseException as error:
            reports.put({"error": brief(error)})
            barrier.abort()
            raise

    workers = [gs.spawn(body, device, device=device, seed=0) for device in devices]
    yield from taken(job, lambda: reports.get(timeout=1.0), lambda: not all(worker.done() for worker in workers))
    for worker in workers:
        worker.result(timeout=30)


def taken(job: Job, get: Callable[[], Any], alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """One report a worker and mode. The first error ends it, and so do workers that end without a word."""
    left, until, last = len(job["devices"]) * len(job["modes"]), time.monotonic() + job["limit_s"], False
    while left:
        try:
            report = get()
        except queue.Empty:
            if last or time.monotonic() > until:
                raise RuntimeError(f"{left} reports of the workers did not come") from None
            last = not alive()  # what they have said before may still be on its way
            continue
        if "error" in report:
            raise RuntimeError(f"A worker failed: {report['error']}")
        left -= 1
        yield report


def summed_up(job: Job, mode: str, reports: list[dict[str, Any]]) -> Result:
    """The workers' reports of a mode as one result."""
    walls = [
        max(e for _, e in one) - min(b for b, _ in one) for one in zip(*(r["rounds"] for r in reports), strict=True)
    ]
    num_steps = job["num_steps"] * len(reports)
    return {
        "mode": mode,
        "steps_per_s": num_steps / statistics.median(walls),
        "steps_per_s_rounds": [num_steps / wall for wall in walls],
        "ready_s": max(report["ready_s"] for report in reports),
        "losses": [report["losses"] for report in reports],
        **{name: reports[0][name] for name in ("shapes", "dtypes", "num_trained")},
    }


def run_job(job: Job) -> Iterator[Result]:
    """All modes of one kind and count of workers; a result for each mode once its workers are done."""
    torch.set_num_threads(1)
    reports: dict[str, list[dict[str, Any]]] = {}
    for report in in_threads(job) if job["kind"] == "threads" else in_processes(job):
        mine = reports.setdefault(report.pop("mode"), [])
        mine.append(report)
        if len(mine) == len(job["devices"]):
            mode = next(name for name, found in reports.items() if found is mine)
            yield summed_up(job, mode, mine)


def check(found: list[dict[str, Any]], tolerance: float) -> list[str]:
    """What is wrong with the losses: of each worker against the first measured worker of its mode, and that one's
    against eager's. To the bit where the kernels are eager's."""
    wrong: list[str] = []
    first: dict[str, list[float]] = {}

    def same(mode: str, losses: list[float], expected: list[float]) -> bool:
        allowed = 0.0 if WAYS[mode].mode is None else tolerance
        return len(losses) == len(expected) and all(
            abs(a - b) <= allowed * abs(b) for a, b in zip(losses, expected, strict=True)
        )

    for one in found:
        for index, losses in enumerate(one["losses"]):
            if not same(one["mode"], losses, first.setdefault(one["mode"], losses)):
                where = f"{one['mode']}, {one['num_workers']} {one['kind']} on {one['num_devices']} device(s)"
                wrong.append(f"{where}: the losses of worker {index} are not those of the first worker of all")
    for mode, losses in first.items():
        if "eager" in first and not same(mode, losses, first["eager"]):
            wrong.append(f"{mode}: its losses are not those of eager")
    return wrong


def ratios(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each count: threads over processes, and each over one worker of its kind, by mode and number of devices."""
    rates = {(o["mode"], o["num_devices"], o["num_workers"], o["kind"]): o["steps_per_s"] for o in found}
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for (mode, num_devices, num_workers, kind), rate in rates.items():
        key = (mode, num_devices, num_workers)
        row = rows.setdefault(key, dict(zip(("mode", "num_devices", "num_workers"), key, strict=True)))
        row[kind] = rate
        alone = rates.get((mode, 1, 1, kind))
        if alone is not None:
            row[f"{kind}_over_one"] = rate / alone
        if "threads" in row and "processes" in row:
            row["threads_over_processes"] = row["threads"] / row["processes"]
    return list(rows.values())


def make_jobs(kinds: list[str], counts: list[int], all_devices: list[str], common: dict[str, Any]) -> list[Job]:
    """Every count on the first device, and every one above one spread over two."""
    jobs = []
    for num_devices in (1, 2) if len(all_devices) > 1 else (1,):
        for count in counts:
            for kind in kinds if count >= num_devices else ():
                devices = [all_devices[index % num_devices] for index in range(count)]
                jobs.append({"kind": kind, "devices": devices, **common})
    return jobs


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; tests/test_cuda_benchmarks.py has a CPU form")
def test_scaling(benchmark: Any) -> None:
    found = run(["--seconds-limit", "420"])
    assert not found["wrong"] and not found["failed"] and found["results"]
    benchmark.extra_info.update(found)
    benchmark.pedantic(lambda: None, rounds=1)


def run(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for."""
    device = default_device()
    cuda = device.type == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 2, 4, 8] if cuda else [1, 2])
    modes = ["eager", "compile", "graph"] if cuda else ["eager", "graph"]
    parser.add_argument("--modes", nargs="*", choices=list(WAYS), default=modes)
    parser.add_argument("--case", choices=[*FULL, *MINI], default="mlp" if cuda else "mlp-mini")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="bfloat16" if cuda else "float32")
    parser.add_argument("--num-steps", type=int, default=300 if cuda else 20, help="of a worker in a round")
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--job-limit", type=float, default=150.0, help="seconds for all modes of a kind and count")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="ends by then")
    parser.add_argument("--record", type=Path, help="file to which results are appended as they come")
    given = parser.parse_args(arguments)
    if min([given.num_steps, given.num_rounds, *given.counts]) < 1:
        parser.error("--counts, --num-steps and --num-rounds are at least 1")
    until = time.monotonic() + given.seconds_limit
    common = {
        "modes": given.modes,
        "case": given.case,
        "batch": given.batch,
        "dtype": given.dtype,
        "num_steps": given.num_steps,
        "num_rounds": given.num_rounds,
        "limit_s": given.job_limit,
    }
    all_devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if cuda else ["cpu"]
    jobs = make_jobs(given.kinds, given.counts, all_devices, common)
    found, failed = [], []
    limits = {"job_limit_s": given.job_limit, "until": until, "fresh": True, "record": given.record}
    for job, result in results("benchmarks.bench_scaling", jobs, **limits):
        labels = {"kind": job["kind"], "num_workers": len(job["devices"]), "num_devices": len(set(job["devices"]))}
        if "steps_per_s" not in result:
            print(f"{labels} {result.get('error') or result.get('skipped')}", flush=True)
            print((result.get("log") or "")[-1500:], file=sys.stderr, flush=True)
            failed.append({**labels, **result})
            continue
        found.append({**labels, **result})
        print(
            f"{labels['num_workers']} {job['kind']:9} on {labels['num_devices']}  {result['mode']:16} "
            f"{result['steps_per_s']:10.1f} steps/s  ready {result['ready_s']:5.1f} s  "
            f"loss {result['losses'][0][-1]:.6f}",
            flush=True,
        )
    tolerance = TOLERANCES[given.dtype]
    wrong = check(found, tolerance)
    rows = ratios(found)
    for row in rows:
        told = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(told, flush=True)
    print(*wrong, sep="\n" if wrong else "", end="\n" if wrong else "", flush=True)
    config = configuration({"device": str(device), **common}, tolerance=tolerance, num_checked=NUM_CHECKED)
    return {
        "benchmark": "scaling",
        "configuration": config,
        "wrong": wrong,
        "failed": failed,
        "results": found,
        "ratios": rows,
    }


def main() -> None:
    found = run()
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["wrong"] or any("error" in one for one in found["failed"]) else 0)


if __name__ == "__main__":
    main()
