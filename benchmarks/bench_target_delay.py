"""Does a target's Python delay a drafter? The idle time between a drafter's replays, alone and beside a busy target.

    python -m benchmarks.bench_target_delay --trace trace.json.gz

One process. A drafter of the smollm2 preset's shape trains on slots that lie in memory, its step one CUDA graph.
Beside it runs, on half of the rounds, a thread that keeps the interpreter as busy as an eager target does: a Llama of
30 layers in transformers, over so few tokens that its kernels take next to nothing of the GPU. What is measured is the
GPU's own time from the end of one replay to the start of the next, by CUDA events; rounds of both kinds alternate, so
that both see the same clocks. It prints the medians and their spread, and the last line is JSON. Goal: at most 1.1
times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphsafe as gs
from examples.dflash.batches import batch_specs
from examples.dflash.config import PRESETS
from examples.dflash.drafter import Drafter, DrafterConfig
from examples.dflash.pipeline import MAX_AHEAD
from examples.dflash.replicas import Replica
from examples.dflash.smoke import random_batch
from examples.dflash.step import NUM_WARMUP_STEPS, DrafterStep

GOAL = 1.1
TARGET_TOKENS = 64
NUM_ROUNDS, NUM_STEPS = 10, 60  # rounds alternate; steps of each
SHAPE = DrafterConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    block_size=8,
    mask_token_id=16,
    target_layer_ids=(1, 8, 14, 20, 27),
    vocab_size=49152,
    num_target_layers=30,
)


def make_target(device: torch.device) -> LlamaForCausalLM:
    """SmolLM2's shape with random weights."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_target_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


class BusyTarget:
    """A thread that runs an eager target over and over, while it is let."""

    def __init__(self, device: torch.device) -> None:
        self.model = make_target(device)
        self.tokens = torch.zeros(1, TARGET_TOKENS, dtype=torch.int64, device=device)
        self.go, self.end, self.idle = threading.Event(), threading.Event(), threading.Event()
        self.num_passes = 0

    def run(self) -> None:
        context = gs.current_context(self.tokens.device)
        while not self.end.is_set():
            if not self.go.is_set():
                context.synchronize()
                self.idle.set()
                self.go.wait(0.05)
                continue
            with context.eager(rng=False), torch.no_grad():
                self.model(self.tokens)
            context.synchronize()  # so that its queue does not outlast the round
            self.num_passes += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block in which it runs."""
        self.idle.clear()
        self.go.set()
        try:
            yield
        finally:
            self.go.clear()
            self.idle.wait(10)


def gaps_of(step: DrafterStep, slots: list[Any], num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds between replays and of the replays, of the GPU's time, at the pipeline's pace."""
    marks = []
    for index in range(num_steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(slots[index % len(slots)])
        end.record()
        marks.append((begin, end))
        if index >= MAX_AHEAD:
            marks[index - MAX_AHEAD][1].synchronize()
    torch.cuda.current_stream().synchronize()
    gaps = [former[1].elapsed_time(later[0]) for former, later in itertools.pairwise(marks)]
    return gaps, [begin.elapsed_time(end) for begin, end in marks]


def drafter_thread(target: BusyTarget, device: torch.device, trace: Path | None) -> dict[str, Any]:
    """Alternate rounds alone and beside the target."""
    config = PRESETS["smollm2"]
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(SHAPE).to(device)
    head = (0.02 * torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator)).to(device, torch.bfloat16)
    step = DrafterStep(drafter, head, head, config, 10_000, Replica(0, 1, device, None))
    width = len(SHAPE.target_layer_ids) * SHAPE.hidden_size
    specs = {**batch_specs(config), "features": gs.Spec((config.token_budget, width), torch.bfloat16)}
    slots = [gs.StaticBuffers(specs, device) for _ in range(2)]
    for slot in slots:
        features = torch.randn(config.token_budget, width, generator=generator).to(torch.bfloat16)
        slot.load({**random_batch(config, SHAPE.vocab_size, generator), "features": features})
    gaps_of(step, slots, 2 * NUM_WARMUP_STEPS + 10)
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    steps: dict[str, list[float]] = {"alone": [], "beside": []}
    passes = 0
    for number in range(NUM_ROUNDS):
        kind = "beside" if number % 2 else "alone"
        before = target.num_passes
        if kind == "beside":
            with target.busy():
                gaps_of(step, slots, 5)
                found = gaps_of(step, slots, NUM_STEPS)
            passes += target.num_passes - before
        else:
            gaps_of(step, slots, 5)
            found = gaps_of(step, slots, NUM_STEPS)
        gaps[kind] += found[0]
        steps[kind] += found[1]
    if trace is not None:
        with target.busy(), torch.profiler.profile() as profile:
            gaps_of(step, slots, 12)
        profile.export_chrome_trace(str(trace))
    step.close()
    medians = {kind: statistics.median(values) for kind, values in gaps.items()}
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "gap_ms": {kind: _spread(values) for kind, values in gaps.items()},
        "replay_ms": {kind: _spread(values) for kind, values in steps.items()},
        "target_passes": passes,
        "ratio": medians["beside"] / medians["alone"],
        "goal": GOAL,
        "met": medians["beside"] <= GOAL * medians["alone"],
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}


def measure(trace: Path | None = None) -> dict[str, Any]:
    """Both kinds of rounds; the target runs on the second GPU where there is one."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    target = BusyTarget(devices[-1])
    with gs.WorkerGroup(timeout=60.0) as group:
        group.spawn(target.run, device=devices[-1], name="target")
        drafter = group.spawn(drafter_thread, target, devices[0], trace, device=devices[0], seed=0, name="drafter")
        try:
            return drafter.result()
        finally:
            target.end.set()
            target.go.set()


@pytest.mark.cuda
def test_target_delay(benchmark: Any) -> None:
    found = measure()
    assert found["target_passes"] > 0
    benchmark.extra_info.update(found)
    print(json.dumps(found))
    benchmark.pedantic(lambda: None, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of some steps beside the target")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: the gap between replays of a graph is a GPU's")
    found = measure(arguments.trace)
    for kind in ("alone", "beside"):
        gap, replay = found["gap_ms"][kind], found["replay_ms"][kind]
        print(
            f"{kind:7} gap {gap['median'] * 1e3:7.1f} us (p10 {gap['p10'] * 1e3:.1f}, p90 {gap['p90'] * 1e3:.1f}, "
            f"p99 {gap['p99'] * 1e3:.1f})   replay {replay['median']:.3f} ms"
        )
    print(
        f"gap beside a busy target is {found['ratio']:.3f} times the gap alone (goal {GOAL}); the target made "
        f"{found['target_passes']} passes meanwhile"
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
