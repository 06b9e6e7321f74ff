"""What a drafter's thread does with each batch: a step, now and then a reading of the metrics, a checkpoint.

Guarantees:
- All replicas read their metrics at the same step, and the first one speaks for all.
- After the warm-up a recompile is an error: shapes are fixed, so none is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import graphsafe

from . import drafter as drafters
from .config import Config
from .drafter import DrafterConfig
from .metrics import Meter, Reporter, summarize
from .pipeline import Pipeline, Topology
from .replicas import Replica
from .step import DrafterStep
from .telemetry import Telemetry

WARMUP_STEPS = 8  # of each drafter, in which everything is compiled


@dataclass(frozen=True)
class Run:
    """What the threads of a run read, none of it changed by any."""

    config: Config
    devices: Topology
    drafter: DrafterConfig
    num_steps: int
    pipeline: Pipeline
    reporter: Reporter
    telemetry: Telemetry
    store: Any
    weights: Mapping[torch.device, tuple[Tensor, Tensor]]  # embedding and head of the target, by drafter device


def compiles(config: Config, devices: Topology) -> bool:
    """Whether anything in the run is compiled: the step, or flex_attention on CUDA."""
    return config.step == "compile" or any(d.type == "cuda" for d in (*devices.targets, *devices.drafters))


class Trainer:
    """Trains on a drafter's batches, logs and saves; rank 0 speaks for all."""

    def __init__(self, run: Run, number: int, step: DrafterStep, replica: Replica) -> None:
        self.run, self.number, self.step, self.replica = run, number, step, replica
        self.meter = Meter(run.config.block_size, step.device)
        self.num_steps = 0
        self.started_s = self.logged_s = time.monotonic()
        self.timer = run.telemetry.timer(f"drafter-{number}")
        self.compiles = compiles(run.config, run.devices)
        self.warm_after = WARMUP_STEPS + math.ceil(len(run.devices.targets) / len(run.devices.drafters))

    def __call__(self, batch: Mapping[str, Tensor]) -> None:
        with self.timer:
            self.meter.add(self.step(batch))
        self.num_steps += 1
        config, first = self.run.config, self.number == 0
        if self.num_steps % config.log_every == 0 or self.num_steps == 1:
            self.log()
        elif first:
            self.run.reporter.advance(self.num_steps)
        if first and config.save_every is not None and self.num_steps % config.save_every == 0:
            self.save()
        if first and self.compiles and self.num_steps == self.warm_after:
            torch.compiler.set_stance("fail_on_recompile")  # of all threads: each has compiled by now
            self.run.telemetry.warmed_up()

    def finish(self) -> None:
        """After the last batch."""
        if self.num_steps % self.run.config.log_every != 0 and self.num_steps != 1:
            self.log()
        if self.number == 0:
            self.save()

    def save(self) -> None:
        """Write the weights, unless another replica's end has spoilt the last step."""
        graphsafe.current_context(self.step.device).synchronize()
        if not self.run.pipeline.failed.is_set():
            drafters.save(self.step.drafter, self.run.config.drafter_path)

    def log(self) -> None:
        """Read the metrics of all replicas; all of them come here at the same step."""
        lr, norm = self.step.lr, self.step.grad_norm
        measured = self.replica.sum(self.meter.take())
        if self.number != 0:
            return
        record = summarize(measured.tolist())
        now = time.monotonic()
        record |= {
            "step": self.num_steps,
            "lr": lr,
            "grad_norm": None if norm is None else norm.item(),
            "tokens_per_s": record["tokens"] / max(now - self.logged_s, 1e-9),
            "elapsed_s": now - self.started_s,
            **self.run.telemetry.read(),
        }
        self.logged_s = now
        self.run.reporter.report(record)
