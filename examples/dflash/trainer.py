"""What a drafter's thread does with each batch: a step or a measurement, now and then a reading and a checkpoint.

Guarantees:
- All replicas read their metrics at the same step, and the first one of all processes speaks for all.
- Metrics are read before a checkpoint is taken, so a resumed run loses and repeats no reading.
- After the warm-up a recompile is an error: shapes are fixed, so none is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import graphsafe

from .checkpoint import Checkpoint, Checkpoints, Contract, Snapshot
from .config import Config
from .drafter import DrafterConfig
from .feature_cache import DiskCache
from .metrics import Meter, Reporter, Silent, summarize
from .pipeline import Pipeline, Topology
from .processes import Processes
from .replicas import Replica
from .schedule import Schedule
from .step import DrafterStep
from .telemetry import Telemetry

WARMUP_STEPS = 8  # of each drafter, in which everything is compiled


@dataclass(frozen=True)
class Run:
    """What the threads of a run read, none of it changed by any.

    Attributes:
        devices: of this process.
        schedule: the rounds of all processes.
        start: the checkpoint that the run goes on from; None: from the beginning.
        checkpoints: where rank 0 writes.
        weights: embedding and head of the target, by drafter device.
        disk: the cache of features on disk, if there is one.
    """

    config: Config
    devices: Topology
    drafter: DrafterConfig
    schedule: Schedule
    contract: Contract
    start: Checkpoint | None
    checkpoints: Checkpoints
    pipeline: Pipeline
    processes: Processes
    reporter: Reporter | Silent
    telemetry: Telemetry
    weights: Mapping[torch.device, tuple[Tensor, Tensor]]
    disk: DiskCache | None

    @property
    def num_replicas(self) -> int:
        """Drafters of all processes."""
        return self.processes.size * len(self.devices.drafters)

    def rank(self, number: int) -> int:
        """The rank among all replicas of drafter ``number`` of this process."""
        return self.processes.rank * len(self.devices.drafters) + number


def compiles(config: Config, devices: Topology) -> bool:
    """Whether anything in the run is compiled: the step, or flex_attention on CUDA."""
    return config.step == "compile" or any(d.type == "cuda" for d in (*devices.targets, *devices.drafters))


class Trainer:
    """Trains on a drafter's batches, measures, logs and saves; rank 0 speaks for all."""

    def __init__(self, run: Run, number: int, step: DrafterStep, replica: Replica) -> None:
        self.run, self.number, self.step, self.replica = run, number, step, replica
        self.meter = Meter(run.config.block_size, step.device)
        self.validation = Meter(run.config.block_size, step.device)
        self.rounds = run.schedule.rounds()
        self.num_steps = self.logged_at = self.saved_at = run.schedule.first_step
        self.best = None if run.start is None else run.start.best
        if run.start is not None and run.start.unmeasured:
            self.saved_at -= 1  # the measurement to come is that checkpoint's
        self.started_s = self.logged_s = time.monotonic()
        self.timer = run.telemetry.timer(f"drafter-{number}")
        self.compiles = compiles(run.config, run.devices)
        self.warm_after = WARMUP_STEPS + math.ceil(len(run.devices.targets) / len(run.devices.drafters))

    def __call__(self, batch: Mapping[str, Tensor]) -> None:
        current = next(self.rounds)
        if current.validation:
            self.validation.add(self.step.measure(batch))
            if current.last:
                self.validated()
            return
        with self.timer:
            self.meter.add(self.step(batch))
        self.num_steps += 1
        self.run.checkpoints.check()
        schedule, here = self.run.schedule, self.num_steps - self.run.schedule.first_step
        due = schedule.is_due(self.num_steps)
        if self.num_steps % self.run.config.log_every == 0 or here == 1 or due:
            self.log()
        elif self.replica.rank == 0:
            self.run.reporter.advance(self.num_steps)
        if due and schedule.num_validation_rounds == 0:
            self.save(None)
        if self.number == 0 and self.compiles and here == self.warm_after:
            torch.compiler.set_stance("fail_on_recompile")  # of all threads: each has compiled by now
            self.run.telemetry.warmed_up()

    def finish(self) -> None:
        """After the last batch."""
        if self.num_steps > self.logged_at:
            self.log()
        if self.num_steps > self.saved_at or self.num_steps == 0:  # there is a drafter even before the first step
            self.save(None)
        if self.replica.rank == 0:
            self.run.checkpoints.wait()

    def validated(self) -> None:
        """After a measurement on the validation documents: report it, and write the checkpoint that was due."""
        record = summarize(self.replica.sum(self.validation.take()).tolist())
        start = self.run.start
        known = start is not None and start.step == self.num_steps and start.acceptance is not None
        if self.replica.rank != 0 or known:
            return
        self.run.reporter.event("validation", step=self.num_steps, **record)
        if self.num_steps > self.saved_at:
            self.save(record["acceptance"])

    def save(self, acceptance: float | None) -> None:
        """Rank 0: write a checkpoint, unless another replica's end has spoilt the last step.

        Args:
            acceptance: on the validation documents; None: not measured.
        """
        graphsafe.current_context(self.step.device).synchronize()
        if self.replica.rank != 0 or self.run.pipeline.failed.is_set():
            return
        config, schedule, also = self.run.config, self.run.schedule, [self.run.config.drafter_path]
        if acceptance is not None and (self.best is None or acceptance > self.best):
            self.best = acceptance
            also.append(config.best_path)
        snapshot = Snapshot.take(
            self.step.drafter,
            self.step.optimizer,
            self.step.scheduler,
            step=self.num_steps,
            num_steps=schedule.num_steps,
            contract=self.run.contract,
            acceptance=acceptance,
            best=self.best,
            unmeasured=acceptance is None and self.num_steps > 0 and schedule.measures_after(self.num_steps),
        )
        self.run.checkpoints.save(snapshot, also)
        self.saved_at = self.num_steps
        self.run.reporter.event("checkpoint", step=self.num_steps, acceptance=acceptance)

    def log(self) -> None:
        """Read the metrics of all replicas; all of them come here at the same step."""
        lr, norm = self.step.lr, self.step.grad_norm
        measured = self.replica.sum(self.meter.take())
        self.logged_at = self.num_steps
        if self.replica.rank != 0:
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
