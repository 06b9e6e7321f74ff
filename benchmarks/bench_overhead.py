"""What graphsafe adds to a replay, and what threads and graphs cost, as series over their counts.

    python -m benchmarks.bench_overhead --seconds-limit 240
    python -m benchmarks.bench_overhead --parts call --num-inputs 1 16 --seconds-limit 60

Parts. "call": host time of a call of graphed() (outputs aliased or copied, tensors positional or in a pytree) and of a
TrainStep, over the bare call: one ``torch._foreach_copy_`` of the inputs and ``CUDAGraph.replay()`` of the same work,
captured by hand; over the number of inputs. Both in turn, few calls at a time, so that the device's queue never fills.
"threads": a process of its own for each count, whose threads make their first step together: seconds of the first step,
of the call that captures, and memory a thread. "graphs": one thread captures more and more signatures: seconds and
memory of each. Before its timing each call's results are compared with the plain function's, every
thread's losses with the first one's, and those of each signature with an eager loop's, all to the bit. On the CPU there
is no replay and no device memory: calls are compared with the function itself. Each result is printed as it comes; the
last line is JSON, its series [count, value] pairs. The exit status is 1 where a result was wrong or a job failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import graphsafe as gs

from .bench_drafter_step import default_device
from .bench_graphed import by_hand, settled
from .step_checks import spread
from .supervised import Job, Result, results
from .workloads import LR, MINI, configuration, make_training, plain_step

PARTS = ("call", "threads", "graphs")
KINDS = (
    "graphed alias positional",
    "graphed copy positional",
    "graphed alias pytree",
    "graphed copy pytree",
    "TrainStep alias",
    "TrainStep copy",
)
SHAPE = (8, 16)  # of each input: small, for it is the host that is measured
NUM_CALLS = 32  # in a row: with many inputs a call is several launches, and the queue holds 1024
NUM_WARMUP_CALLS, MIB = 3, 2**20

Inputs = list[torch.Tensor]


def work(inputs: Inputs) -> torch.Tensor:
    return torch.stack(inputs).sum(0) * 2


def as_tree(inputs: Inputs) -> dict[str, Any]:
    """Half in a list, half in a dict of pairs."""
    half = len(inputs) // 2
    return {"list": inputs[:half], "dict": {f"x{index}": (tensor,) for index, tensor in enumerate(inputs[half:])}}


def work_on_tree(tree: dict[str, Any]) -> torch.Tensor:
    return work([*tree["list"], *(tensor for (tensor,) in tree["dict"].values())])


def training_body(device: torch.device) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.full(SHAPE, 0.5, device=device))
    optimizer = torch.optim.AdamW([weight], lr=LR, fused=True, capturable=device.type == "cuda")
    return lambda *inputs: (torch.stack(inputs).mean(0) * weight).square().mean(), optimizer


def pair(kind: str, num_inputs: int, device: torch.device) -> tuple[Callable[[Inputs], Any], Callable[[Inputs], Any]]:
    """A call of ours, and the bare one; each returns its result."""
    static = [torch.zeros(SHAPE, device=device) for _ in range(num_inputs)]
    outputs: Any = "alias" if "alias" in kind else "copy"
    held: list[torch.Tensor] = []  # the bare capture's output
    if kind.startswith("TrainStep"):
        step = gs.TrainStep(*training_body(device), num_warmup_iters=NUM_WARMUP_CALLS, outputs=outputs)
        loss_fn, optimizer = training_body(device)

        def body() -> None:
            loss = loss_fn(*static)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held[:] = [loss.detach()]

        ours: Callable[[Inputs], Any] = lambda batch: step(*batch)  # noqa: E731
    else:
        if "pytree" in kind:
            on_tree = gs.graphed(work_on_tree, num_warmup_iters=NUM_WARMUP_CALLS, outputs=outputs)
            ours = lambda batch: on_tree(as_tree(batch))  # noqa: E731
        else:
            graphed = gs.graphed(lambda *inputs: work(list(inputs)), num_warmup_iters=NUM_WARMUP_CALLS, outputs=outputs)
            ours = lambda batch: graphed(*batch)  # noqa: E731

        def body() -> None:
            held[:] = [work(static)]

    replay: list[Callable[[], Any]] = []

    def bare(batch: Inputs) -> torch.Tensor:
        torch._foreach_copy_(static, batch)
        if not replay:
            replay.append(by_hand(body, num_warmup_iters=NUM_WARMUP_CALLS)[0] if device.type == "cuda" else body)
        replay[0]()
        return held[0]

    return ours, bare


def equal_results(kind: str, num_inputs: int, device: torch.device, batches: list[Inputs]) -> bool:
    """Whether ours, called until it replays, gives to the bit what the plain function gives."""
    ours, _ = pair(kind, num_inputs, device)
    loss_fn, optimizer = training_body(device)

    def plain(batch: Inputs) -> torch.Tensor:
        if not kind.startswith("TrainStep"):
            return work(batch)
        loss = loss_fn(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return all(torch.equal(ours(batch), plain(batch)) for batch in batches[:8])


def measure_call(job: Job, device: torch.device) -> Result:
    """Ours and the bare call in turn; medians, and the spread of their differences, in us."""
    kind, num_inputs = job["kind"], job["num_inputs"]
    torch.manual_seed(0)
    batches = [[tensor.to(device) for tensor in torch.randn(num_inputs, *SHAPE)] for _ in range(NUM_CALLS)]
    with gs.thread_context(device, seed=0, name="calls"), torch.set_grad_enabled(kind.startswith("TrainStep")):
        equal = equal_results(kind, num_inputs, device, batches)
        ours, bare = pair(kind, num_inputs, device)
        settled(ours, batches[0])
        settled(bare, batches[0])
        pairs, until = [], time.monotonic() + job["seconds"]
        for number in range(job["num_rounds"]):
            first, second = (bare, ours) if number % 2 else (ours, bare)  # neither is always the first
            times = {first: us_a_call(first, batches)}
            times[second] = us_a_call(second, batches)
            pairs.append((times[bare], times[ours]))
            if time.monotonic() > until:
                break
        mine = next(one for one in gs.stats().contexts if one.alive)
        found = {"captures": mine.captures, "replays": mine.replays, "eager_steps": mine.eager_steps}
    bare_us, call_us = (statistics.median(column) for column in zip(*pairs, strict=True))
    over = spread([ours - bare for bare, ours in pairs])
    return {"equal": equal, "bare_us": bare_us, "call_us": call_us, "over_us": over, "num_rounds": len(pairs), **found}


def us_a_call(call: Callable[[Any], Any], batches: list[Any]) -> float:
    """Host time of one call, each batch in turn; the device is idle before and after."""
    start = time.perf_counter()
    for batch in batches:
        call(batch)
    elapsed_s = time.perf_counter() - start
    gs.current_context().synchronize()
    return elapsed_s / len(batches) * 1e6


def used_mib(device: torch.device) -> dict[str, float]:
    """What is taken of the device's memory: by all, and by this process's allocator."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device_mib": (total - free) / MIB,
        "reserved_mib": torch.cuda.memory_reserved(device) / MIB,
        "allocated_mib": torch.cuda.memory_allocated(device) / MIB,
    }


def less(after: dict[str, float], before: dict[str, float], count: int = 1) -> dict[str, float]:
    return {name: (value - before[name]) / count for name, value in after.items()}


def measure_threads(job: Job, device: torch.device) -> Result:
    """The first calls of threads that begin together, in a process that has done nothing before."""
    num_threads, case = job["num_threads"], job["case"]
    trainings = [make_training(case, device, dtype=job["dtype"]) for _ in range(num_threads)]
    if device.type == "cuda":  # what loads once a process is not what a thread costs
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    before = used_mib(device)
    ready, measured = threading.Barrier(num_threads + 1), threading.Barrier(num_threads + 1)
    limit_s = job["limit_s"]

    def body(index: int) -> dict[str, Any]:
        try:
            return first_calls(index)
        except BaseException:
            ready.abort()
            measured.abort()
            raise

    def first_calls(index: int) -> dict[str, Any]:
        training, context = trainings[index], gs.current_context()
        step = gs.TrainStep(
            training.loss_fn(), training.optimizer(), model=training.core, num_warmup_iters=NUM_WARMUP_CALLS
        )
        ready.wait(limit_s)
        start, times, losses = time.perf_counter(), [], []
        for number in range(NUM_WARMUP_CALLS + 3):
            losses.append(step(*training.batches[number % 2]))
            context.synchronize()
            times.append(time.perf_counter())
        measured.wait(limit_s)  # nobody's memory is freed before it was looked at
        measured.wait(limit_s)
        calls = [(end - begin) * 1e3 for begin, end in zip([start, *times], times, strict=False)]
        return {"calls_ms": calls, "ready_ms": (times[-1] - start) * 1e3, "losses": [float(loss) for loss in losses]}

    with gs.WorkerGroup() as group:  # which raises what a worker raised
        workers = [
            group.spawn(body, index, device=device, seed=0, name=f"first-{index}") for index in range(num_threads)
        ]
        with suppress(threading.BrokenBarrierError):
            ready.wait(limit_s)
            measured.wait(limit_s)
            after, stats = used_mib(device), gs.stats()
            measured.wait(limit_s)
    found = [worker.result(timeout=limit_s) for worker in workers]
    mine = [one for one in stats.contexts if one.name.startswith("first-") and one.alive]
    first, captures = [one["calls_ms"][0] for one in found], [one["calls_ms"][NUM_WARMUP_CALLS] for one in found]
    return {
        "equal": all(one["losses"] == found[0]["losses"] for one in found),
        "captures": sum(one.captures for one in mine),
        "first_step_ms": max(first),
        "first_step_median_ms": statistics.median(first),
        "capture_ms": max(captures),
        "capture_median_ms": statistics.median(captures),
        "ready_ms": max(one["ready_ms"] for one in found),
        "wait_s_a_thread": sum(one.wait_s for one in mine) / num_threads,
        "graph_mib_a_thread": sum(one.graph_bytes for one in mine) / MIB / num_threads,
        **{f"{name}_a_thread": value for name, value in less(after, before, num_threads).items()},
    }


def measure_graphs(job: Job, device: torch.device) -> Iterator[Result]:
    """A TrainStep that captures one signature after the other; a result for each."""
    trainings = [make_training(job["case"], device, dtype=job["dtype"], batch=2 + n) for n in range(job["num_graphs"])]
    eager = make_training(job["case"], device, dtype=job["dtype"])
    plain = plain_step(eager.loss_fn(), eager.optimizer())
    num_calls = NUM_WARMUP_CALLS + 3
    expected = [[float(plain(t.batches[call % 2])) for call in range(num_calls)] for t in trainings]
    del eager, plain
    with gs.thread_context(device, seed=0, name="graphs") as context:
        model = trainings[0].core
        optimizer = trainings[0].optimizer()
        step = gs.TrainStep(
            lambda *batch: model(*batch),
            optimizer,
            model=model,
            num_warmup_iters=NUM_WARMUP_CALLS,
            max_graphs=job["num_graphs"],
        )
        before = start = used_mib(device)
        for number, training in enumerate(trainings):
            times, losses = [], []
            for call in range(num_calls):
                begin = time.perf_counter()
                losses.append(step(*training.batches[call % 2]))
                context.synchronize()
                times.append((time.perf_counter() - begin) * 1e3)
            after, mine = used_mib(device), next(one for one in gs.stats().contexts if one.alive)
            yield {
                "num_graphs": number + 1,
                "equal": [float(loss) for loss in losses] == expected[number] and mine.captures == number + 1,
                "warmup_ms": times[0],
                "capture_ms": times[NUM_WARMUP_CALLS],
                "replay_ms": times[-1],
                "graph_mib": mine.graph_bytes / MIB,
                **{f"{name}_of_it": value for name, value in less(after, before).items()},
                **less(after, start),
            }
            before = after


def run_job(job: Job) -> Iterator[Result]:
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    if job["part"] == "call":
        yield measure_call(job, device)
    elif job["part"] == "threads":
        yield measure_threads(job, device)
    else:
        yield from measure_graphs(job, device)


def make_series(found: list[tuple[Job, Result]]) -> list[dict[str, Any]]:
    """Series that a plot takes as they are: name, part, x, unit, points [count, value] by count."""
    series: dict[tuple[str, str], dict[str, Any]] = {}

    def add(part: str, name: str, x: str, count: int, value: float) -> None:
        unit = next((unit for unit in ("us", "ms", "mib", "s") if unit in name.split("_")), "us")
        one = series.setdefault((part, name), {"part": part, "name": name, "x": x, "unit": unit, "points": []})
        one["points"].append([count, value])

    for job, result in found:
        if "equal" not in result:
            continue
        if job["part"] == "call":
            for field in ("bare_us", "call_us"):
                add("call", f"{job['kind']}: {field}", "num_inputs", job["num_inputs"], result[field])
            for field, value in result["over_us"].items():
                name = f"{job['kind']}: over_us" + ("" if field == "median" else f" {field}")
                add("call", name, "num_inputs", job["num_inputs"], value)
            continue
        x = "num_threads" if job["part"] == "threads" else "num_graphs"
        count = job["num_threads"] if job["part"] == "threads" else result["num_graphs"]
        for field, value in result.items():
            if field.split("_")[-1] in ("ms", "mib") or field.endswith(("_a_thread", "_of_it")):
                add(job["part"], field, x, count, value)
    for one in series.values():
        one["points"].sort()
    return list(series.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; tests/test_cuda_benchmarks.py has a CPU form")
def test_overhead(benchmark: Any) -> None:
    found = run(["--seconds-limit", "300"])
    assert not found["wrong"] and not found["failed"] and found["series"]
    benchmark.extra_info.update(found)
    benchmark.pedantic(lambda: None, rounds=1)


def show(job: Job, result: Result) -> None:
    what = {key: job[key] for key in ("part", "kind", "num_inputs", "num_threads") if key in job}
    told = {k: round(v, 2) if isinstance(v, float) else v for k, v in result.items() if k not in ("log", "over_us")}
    over = f" over bare {result['over_us']['median']:.2f} us" if "over_us" in result else ""
    print(f"{' '.join(map(str, what.values()))}:{over} {told}", flush=True)
    if result.get("log"):
        print(f"    {result['log'][-1500:]}", file=sys.stderr, flush=True)


def run(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for."""
    device = default_device()
    cuda = device.type == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-inputs", nargs="*", type=int, default=[1, 4, 16, 64, 256] if cuda else [1, 4])
    parser.add_argument("--num-threads", nargs="*", type=int, default=[1, 2, 4, 8] if cuda else [1, 2])
    parser.add_argument("--num-graphs", type=int, default=8 if cuda else 3)
    parser.add_argument("--case", choices=["mlp", "transformer", *MINI[:2]], default="mlp" if cuda else "mlp-mini")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if cuda else "float32")
    parser.add_argument("--num-rounds", type=int, default=200 if cuda else 5, help="of calls in turn")
    parser.add_argument("--call-seconds", type=float, default=3.0, help="no more rounds of a call after these")
    parser.add_argument("--job-limit", type=float, default=60.0, help="seconds for one measurement")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="ends by then")
    parser.add_argument("--record", type=Path, help="file to which results are appended as they come")
    given = parser.parse_args(arguments)
    if min([given.num_graphs, given.num_rounds, *given.num_inputs, *given.num_threads]) < 1:
        parser.error("counts are at least 1")
    until = time.monotonic() + given.seconds_limit
    common = {"device": str(device), "case": given.case, "dtype": given.dtype, "limit_s": given.job_limit}
    rounds = {"num_rounds": given.num_rounds, "seconds": given.call_seconds}
    parts: dict[str, list[Job]] = {
        "call": [{"part": "call", "kind": k, "num_inputs": n, **rounds} for n in given.num_inputs for k in given.kinds],
        "threads": [{"part": "threads", "num_threads": n} for n in given.num_threads],
        "graphs": [{"part": "graphs", "num_graphs": given.num_graphs}],
    }
    found: list[tuple[Job, Result]] = []
    limits = {"job_limit_s": given.job_limit, "until": until, "record": given.record}
    shared = [{**job, **common} for part in ("call", "graphs") if part in given.parts for job in parts[part]]
    fresh = [{**job, **common} for job in parts["threads"] if "threads" in given.parts]
    for jobs, a_process_each in ((shared, False), (fresh, True)):
        for job, result in results("benchmarks.bench_overhead", jobs, fresh=a_process_each, **limits):
            show(job, result)
            found.append((job, result))
    described = make_training(given.case, torch.device("cpu"), dtype=given.dtype)
    calls = {"input_shape": SHAPE, "input_dtype": "float32", "num_calls": NUM_CALLS, "num_warmup": NUM_WARMUP_CALLS}
    return {
        "benchmark": "overhead",
        "configuration": configuration(common, **calls, **rounds, **described.description),
        "wrong": wrong_results(found),
        "failed": [{**job, **result} for job, result in found if "error" in result],
        "skipped": [job for job, result in found if "skipped" in result],
        "series": make_series(found),
        "results": [{**job, **result} for job, result in found if "equal" in result],
    }


def wrong_results(found: list[tuple[Job, Result]]) -> list[dict[str, Any]]:
    """The measurements whose results were not those of the plain function, or of the other threads."""
    return [{**job, **result} for job, result in found if result.get("equal") is False]


def main() -> None:
    found = run()
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["wrong"] or found["failed"] else 0)


if __name__ == "__main__":
    main()
