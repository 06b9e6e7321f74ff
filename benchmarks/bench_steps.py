"""A training step by every way to run it: eager, torch.compile's modes, graphs by hand, torch's, tensordict's and ours.

    python -m benchmarks.bench_steps --seconds-limit 420
    python -m benchmarks.bench_steps --cases mlp --ways eager TrainStep --seconds-limit 60

Every way starts from the same weights and trains the same two batches in turn. The losses of the first --num-checked
steps and the bits of the weights after them are compared: to the bit where a way runs eager's own kernels (if eager
itself repeats to the bit), within a tolerance where it runs others. Then single steps are timed, each waited for, and a
row of steps that is waited for once. Memory is the peak of what is allocated, from the model's making to the last step.
Before each way Dynamo is reset; plain torch.compile runs without graphsafe's repairs. A sweep of batch sizes shows
where a graph no longer pays. The exit status is 1 where losses do not agree or a way failed. Each way is printed once
it is measured, and with --record written to a file; the last line is JSON. A way that hangs is killed; others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config

import graphsafe as gs

from .bench_drafter_step import GIBIBYTE, default_device
from .step_checks import CPU_WAYS, PAYS, SWEEP_WAYS, TOLERANCES, WAYS, Groups, Way, collect, spread
from .supervised import Job, Result, results
from .workloads import FULL, MINI, Batch, Training, configuration, digest, make_training, plain_step

NUM_WARMUP_CALLS = 3  # eager ones before a capture
BATCHES = {
    "mlp": (16, 64, 256, 1024, 4096, 16384, 65536),
    "transformer": (1, 2, 4, 8, 16, 32, 64),
    "mlp-mini": (2, 8),
    "transformer-mini": (1, 2),
}


class Arranged(torch.nn.Module):
    """A core that takes a batch's tensors alone, as make_graphed_callables asks."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.core, self.arrange = training.core, training.arrange

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.core(*self.arrange(batch))


class ByHand:
    """The step as torch alone captures it: eager on a side stream, captured, replayed. On the CPU it stays eager."""

    def __init__(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._step, self._num_calls = step, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side: torch.cuda.Stream | None = None
        self._static: Batch = ()
        self._loss = torch.zeros(())

    def __call__(self, batch: Batch) -> torch.Tensor:
        if not batch[0].is_cuda:
            return self._step(batch)
        self._num_calls += 1
        if self._num_calls <= NUM_WARMUP_CALLS:
            current = torch.cuda.current_stream()
            self._side = self._side or torch.cuda.Stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                loss = self._step(batch)
            current.wait_stream(self._side)
            return loss
        if self._graph is None:
            self._static = tuple(tensor.clone() for tensor in batch)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._loss = self._step(self._static)
            self._graph = graph
        torch._foreach_copy_(list(self._static), list(batch))
        self._graph.replay()
        return self._loss


def why_not(name: str, device: torch.device) -> str | None:
    """Why a way cannot be measured here; None: it can be."""
    way = WAYS[name]
    if way.graph == "torch" and device.type != "cuda":
        return "torch.cuda.make_graphed_callables needs a GPU"
    if way.graph == "tensordict" and importlib.util.find_spec("tensordict") is None:
        return "tensordict is not installed"
    return None


def make_step(way: Way, training: Training) -> Callable[[Batch], torch.Tensor]:
    """One step, from a batch to its loss, which is good until the next step."""
    optimizer = training.optimizer()
    core: Callable[..., torch.Tensor] = training.core
    if way.mode is not None:
        compile_it = gs.compile if way.ours else torch.compile
        core = compile_it(training.core, dynamic=False, mode=way.mode)
    loss_fn = training.loss_fn(core)
    if way.graph == "TrainStep":
        step = gs.TrainStep(loss_fn, optimizer, model=training.core, num_warmup_iters=NUM_WARMUP_CALLS, outputs="alias")
        return lambda batch: step(*batch)
    if way.graph == "graphed":
        return plain_step(gs.graphed(loss_fn, num_warmup_iters=NUM_WARMUP_CALLS), optimizer)
    if way.graph == "torch":
        return plain_step(torch.cuda.make_graphed_callables(Arranged(training), training.batches[0]), optimizer)
    plain = plain_step(loss_fn, optimizer)
    if way.graph == "by hand":
        return ByHand(plain)
    if way.graph == "tensordict":
        from tensordict.nn import CudaGraphModule

        module = CudaGraphModule(lambda *batch: plain(batch), warmup=NUM_WARMUP_CALLS + 1)
        return lambda batch: module(*batch)
    if way.mode in ("reduce-overhead", "max-autotune"):

        def marked(batch: Batch) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return plain(batch)

        return marked
    return plain


def measure_steps(job: Job, device: torch.device) -> Result:
    """Check, then time, one way; see the module."""
    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.current_stream(device).synchronize()

    before, reserved_before, peak = 0, 0, 0
    if cuda:
        before, reserved_before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    compiles = sum(gs.stats().compiles.values())  # those of earlier ways
    way = WAYS[job["way"]]
    whole = way.mode is not None
    training = make_training(job["case"], device, dtype=job["dtype"], batch=job["batch"], compiled_whole=whole)
    wait()
    start = time.perf_counter()
    step, batches = make_step(way, training), training.batches
    kept = [step(batches[number % 2]).clone() for number in range(job["num_checked"])]
    losses = [loss.item() for loss in kept]
    wait()
    ready_s = time.perf_counter() - start
    if cuda:
        peak = torch.cuda.max_memory_allocated(device)
    weights = digest(training.core)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    until, times = time.perf_counter() + job["seconds"], []
    for number in range(job["num_steps"]):
        began = time.perf_counter()
        step(batches[number % 2])
        wait()
        times.append((time.perf_counter() - began) * 1e3)
        if time.perf_counter() > until:
            break
    began = time.perf_counter()
    for number in range(len(times)):
        step(batches[number % 2])
    wait()
    result = {
        "ms": spread(times),
        "row_ms": (time.perf_counter() - began) * 1e3 / len(times),
        "num_steps": len(times),
        "ready_s": ready_s,
        "losses": losses,
        "weights": weights,
        **training.description,
    }
    if way.ours:
        found = gs.stats()
        fields = ("captures", "failed_captures", "replays", "eager_steps", "mismatches", "graph_bytes", "wait_s")
        mine = next(one for one in found.contexts if one.alive)
        result["stats"] = {name: getattr(mine, name) for name in fields} | {
            "compiles": sum(found.compiles.values()) - compiles
        }
        result["stats"]["graphs"] = [dataclasses.asdict(graph) for graph in mine.graphs]
    if cuda:
        result["peak_gib"] = (max(peak, torch.cuda.max_memory_allocated(device)) - before) / GIBIBYTE
        torch.cuda.empty_cache()
        result["held_gib"] = (torch.cuda.memory_reserved(device) - reserved_before) / GIBIBYTE
    return result


def run_job(job: Job) -> Iterator[Result]:
    """Measure one way from a clean start, and leave nothing of it behind."""
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    reason = why_not(job["way"], device)
    if reason is not None:
        yield {"skipped": reason}
        return
    torch._dynamo.reset()
    gs.uninstall()
    try:
        with gs.thread_context(device, seed=0, name="steps") if WAYS[job["way"]].ours else nullcontext():
            result = measure_steps(job, device)
        yield result
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # or only the first way would pay for it
            torch.cuda.empty_cache()


def label(job: Job) -> str:
    return f"{job['case']:17} {job['batch'] or '-':>6} {job['way']:27}"


def show(job: Job, result: Result) -> None:
    if "ms" not in result:
        reason = result.get("skipped") or result.get("error")
        print(f"{label(job)} {'not measured' if 'skipped' in result else 'failed'}: {reason}", flush=True)
        if result.get("log"):
            print(f"    {result['log'][-1500:]}", file=sys.stderr, flush=True)
        return
    ms = result["ms"]
    memory = f"peak {result['peak_gib']:7.3f} held {result['held_gib']:7.3f} GiB" if "peak_gib" in result else "(CPU)"
    print(
        f"{label(job)} {ms['median']:9.3f} ms (p10 {ms['p10']:.3f}, p90 {ms['p90']:.3f})  row {result['row_ms']:9.3f} "
        f"ms  {memory}  ready {result['ready_s']:5.1f} s  loss {result['losses'][-1]:.6f}",
        flush=True,
    )
    if "stats" in result:
        told = {key: value for key, value in result["stats"].items() if key != "graphs"}
        print(f"{'':25} stats {told}", flush=True)


def make_jobs(
    cases: list[str], ways: list[str], sweep: list[str], sweep_ways: list[str], common: dict[str, Any]
) -> list[Job]:
    """All of the ways of each case, then the sweeps, whose jobs have a batch."""
    jobs = [{"case": case, "batch": None, "way": way, **common} for case in cases for way in ways]
    for case in sweep:
        jobs += [{"case": case, "batch": b, "way": way, **common} for b in BATCHES[case] for way in sweep_ways]
    return jobs


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; tests/test_cuda_benchmarks.py has a CPU form")
@pytest.mark.parametrize("case", FULL)
def test_steps(benchmark: Any, case: str) -> None:
    found = run(["--cases", case, "--sweep", *([case] if case in BATCHES else []), "--seconds-limit", "400"])
    assert found["agree"] is True and not found["failed"]
    assert any("ms" in result for result in found["cases"][0]["results"].values())
    benchmark.extra_info.update(found)
    benchmark.pedantic(lambda: None, rounds=1)


def run(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for."""
    device = default_device()
    cuda = device.type == "cuda"
    sweepable = [name for name in (FULL if cuda else MINI) if name in BATCHES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=[*FULL, *MINI], default=list(FULL if cuda else MINI))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS if cuda else CPU_WAYS))
    parser.add_argument("--sweep", nargs="*", choices=list(BATCHES), default=sweepable, help="cases to sweep")
    parser.add_argument("--sweep-ways", nargs="*", choices=list(WAYS), default=list(SWEEP_WAYS))
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="bfloat16" if cuda else "float32")
    parser.add_argument("--num-checked", type=int, default=20 if cuda else 8, help="steps whose losses are compared")
    parser.add_argument("--num-steps", type=int, default=100 if cuda else 5, help="steps that are timed")
    parser.add_argument("--step-seconds", type=float, default=4.0, help="no more steps of a way after these")
    parser.add_argument("--job-limit", type=float, default=120.0, help="seconds for one way, its compile included")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="ends by then")
    parser.add_argument("--record", type=Path, help="file to which results are appended as they come")
    given = parser.parse_args(arguments)
    if min(given.num_checked, given.num_steps) < 1:
        parser.error("--num-checked and --num-steps are at least 1")
    until = time.monotonic() + given.seconds_limit
    common = {
        "device": str(device),
        "dtype": given.dtype,
        "num_checked": given.num_checked,
        "num_steps": given.num_steps,
        "seconds": given.step_seconds,
    }
    jobs = make_jobs(given.cases, given.ways, given.sweep, given.sweep_ways, common)
    config = configuration(common, num_warmup_calls=NUM_WARMUP_CALLS, tolerances=TOLERANCES, pays=PAYS)
    groups: Groups = {}
    limits = {"job_limit_s": given.job_limit, "until": until, "record": given.record}
    for job, result in results("benchmarks.bench_steps", jobs, **limits):
        show(job, result)
        groups.setdefault((job["case"], job["batch"]), {})[job["way"]] = result
    return collect(groups, config)


def main() -> None:
    found = run()
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["agree"] is False or found["failed"] else 0)


if __name__ == "__main__":
    main()
