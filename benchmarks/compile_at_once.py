"""How long threads of one process take to compile a drafter's step when all begin together, against one thread alone.

Each count of threads has a process of its own with cold caches, and each of its threads a drafter, an optimizer and a
batch of its own, all alike: ``DrafterStep`` of the example with --step compile. What is timed is the first step, from
the moment at which all begin until the last has done it: forward, backward and optimizer, compiled and run. The process
has compiled something else before, so imports are not counted. The losses of all threads must agree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import graphsafe
from examples.dflash.batches import batch_specs
from examples.dflash.config import Config
from examples.dflash.drafter import Drafter
from examples.dflash.plan import drafter_config, read_shape
from examples.dflash.replicas import Replica
from examples.dflash.smoke import make_slots
from examples.dflash.step import COMPUTE_DTYPES, DrafterStep, target_specs

from .pipeline_runs import TOLERANCES, run_limited


def compile_at_once(
    num_threads: int, device: str, options: Sequence[str], directory: Path, seconds: float
) -> dict[str, Any]:
    """Measure one thread and ``num_threads``, and print both.

    Args:
        device: cuda: thread i works on device i, beginning anew where there are fewer; or cpu.
        options: of ``train``.
        seconds: limit of each process.
    Returns:
        ``results`` by number of threads: ``s``, the seconds until the last was done, ``threads_s``, of each, and
        ``losses``; ``ratio`` of both; ``error`` where one failed, or losses do not agree.
    """
    found: dict[str, Any] = {"num_threads": num_threads, "results": {}}
    for count in dict.fromkeys((1, num_threads)):
        result = _in_child(count, device, options, directory, seconds)
        found["results"][str(count)] = result
        if "error" in result:
            print(f"first steps of {count} threads at once: failed: {result['error']}", flush=True)
            return {**found, "error": result["error"]}
        print(f"first steps of {count} threads at once: {result['s']:.1f} s", flush=True)
    one, many = found["results"]["1"], found["results"][str(num_threads)]
    found["ratio"] = many["s"] / one["s"]
    losses = [*one["losses"], *many["losses"]]
    if not all(map(math.isfinite, losses)) or max(losses) / min(losses) - 1 > TOLERANCES[one["dtype"]]:
        found["error"] = f"the losses of the first steps do not agree: {losses}"
        print(found["error"], flush=True)
    print(f"{num_threads} threads take {found['ratio']:.2f} times as long as one alone", flush=True)
    return found


def _in_child(count: int, device: str, options: Sequence[str], directory: Path, seconds: float) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"compile-{count}"
    with tempfile.TemporaryDirectory() as caches:  # cold ones
        places = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": str(Path(caches) / "triton")}
        command = [sys.executable, "-m", "benchmarks.compile_at_once", str(count), device, *options]
        status, said = run_limited(command, log, seconds, places)
    if status == 0:
        result: dict[str, Any] = json.loads(Path(f"{log}.log").read_text().strip().splitlines()[-1])
        return result
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return {"error": f"not done after {seconds:.0f} s" if status is None else " ".join(lines[-2:])[:400]}


def first_steps(config: Config, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Of a thread on each of these devices."""
    shape, _ = read_shape(config)
    drafter = drafter_config(config, shape)
    generator = torch.Generator().manual_seed(config.seed)
    alone = dataclasses.replace(config, ring_depth=1)
    made = make_slots(alone, drafter, torch.device("cpu"), generator)[0]
    specs = {**batch_specs(config), **target_specs(config, drafter)}
    head_on_cpu = 0.02 * torch.randn(drafter.vocab_size, drafter.hidden_size, generator=generator)
    together = threading.Barrier(len(devices))
    begun, ended, losses = ([math.nan] * len(devices) for _ in range(3))

    def body(number: int) -> None:
        device = devices[number]
        context = graphsafe.current_context(device)
        try:
            slot = graphsafe.StaticBuffers(specs, device)
            slot.load({name: made[name] for name in specs})
            head = head_on_cpu.to(device, COMPUTE_DTYPES[config.dtype])
            model = Drafter(drafter, seed=config.seed, gradient_checkpointing=config.gradient_checkpointing).to(device)
            step = DrafterStep(model, head, head, config, 100, Replica(0, 1, device, None))
            context.synchronize()
            with context.released():
                together.wait()
            begun[number] = time.perf_counter()
            measured = step(slot)
            context.synchronize()
            ended[number] = time.perf_counter()
            total, weight = measured[:2].tolist()
            losses[number] = total / weight
            step.close()
        except threading.BrokenBarrierError:  # another thread's error, which is raised there
            return
        except BaseException:
            together.abort()  # or the others would wait for this one
            raise

    def worker(number: int) -> Callable[[], None]:
        return lambda: body(number)

    with graphsafe.WorkerGroup() as group:
        for number, device in enumerate(devices):
            group.spawn(worker(number), device=device, seed=config.seed, name=f"drafter-{number}")
    start = min(begun)
    return {"s": max(ended) - start, "threads_s": [end - start for end in ended], "losses": losses}


def main(arguments: Sequence[str]) -> int:
    """The child: a number of threads, cuda or cpu, and options of ``train``."""
    from examples.dflash.__main__ import parse

    count, kind, *options = arguments
    num_devices = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and num_devices == 0:
        print("torch finds no CUDA device here", file=sys.stderr)
        return 2
    config = parse("train", [*options, "--step", "compile"])
    devices = [
        torch.device("cuda", number % num_devices) if kind == "cuda" else torch.device("cpu")
        for number in range(int(count))
    ]
    with graphsafe.thread_context(devices[0]):
        torch.compile(lambda x: x + 1)(torch.ones(3, device=devices[0]))  # starts what the first compile of all needs
    found = first_steps(config, devices)
    compiles = sum(graphsafe.stats().compiles.values())
    print(json.dumps({**found, "dtype": config.dtype, "compiles": compiles}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
