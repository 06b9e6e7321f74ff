"""The threads of one process of a run: the reader, a thread a target, a thread a drafter, and what each does.

Guarantees:
- An error in any thread ends all of them, and is the one that is raised.
- Everything is compiled before the first collective (``DrafterStep.warm_up`` says why).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import graphsafe

from . import batches as packing
from .data import Document
from .drafter import Drafter
from .feature_cache import feature_cache
from .features import FeatureSource
from .pipeline import Pipeline, PipelineEnded
from .processes import PeerLost
from .replicas import Replica, ReplicaLost, attempt, gather
from .signals import Signals, shielded
from .step import DrafterStep, target_specs
from .target import Target
from .trainer import Run, Trainer, compiles

END_TIMEOUT_S = 60.0  # for threads to end once one has failed


def run_threads(
    run: Run,
    documents: Sequence[Document],
    validation: Sequence[Document],
    targets: Mapping[torch.device, Target],
    signals: Signals,
) -> None:
    """Run all threads until the schedule ends, a stop is agreed on, or one fails.

    Raises:
        BaseExceptionGroup: what went wrong in the threads.
    """
    config, devices, pipeline = run.config, run.devices, run.pipeline
    ranks = [run.rank(number) for number in range(len(devices.drafters))]
    batches = packing.scheduled_batches(documents, validation, config, run.schedule, ranks, run.num_replicas)

    left, agree = run.schedule.rounds(), partial(run.processes.agree, given_up=pipeline.failed.is_set)

    def stops() -> bool:  # asked before each round and once more: a run that has read all of them is not stopped
        return next(left, None) is not None and signals.stops(agree)

    def read() -> None:
        try:
            pipeline.read(batches, packing.empty_batch(config), stops)
        finally:
            run.processes.leave_agreement()

    with shielded():  # what is started here, such as Inductor's pool, outlives a signal to the whole process group
        if compiles(config, devices):
            importlib.import_module("torch._inductor.async_compile")
    with graphsafe.WorkerGroup(timeout=END_TIMEOUT_S) as group:
        pipeline.on_abort(group.stop.set)
        group.spawn(partial(_guarded, pipeline, read), device="cpu", name="reader")
        label_chunk = config.loss_chunk if config.labels == "target" else None
        for number, device in enumerate(devices.targets):
            target = targets[device]
            cache, layer_ids = feature_cache(config, run.disk), run.drafter.target_layer_ids
            graphed, compiled = config.step == "graph", config.target_step == "compile"
            source = FeatureSource(target, layer_ids, cache, label_chunk, graphed=graphed, compiled=compiled)
            body = partial(_guarded, pipeline, _target_body, run, number, source)
            group.spawn(body, device=device, name=f"target-{number}")
        stores = [run.processes.store("replicas") for _ in devices.drafters]
        for number, device in enumerate(devices.drafters):
            seed = config.seed + run.rank(number)
            body = partial(_drafter_thread, run, number, stores[number])
            group.spawn(body, device=device, seed=seed, name=f"drafter-{number}")


def _guarded(pipeline: Pipeline, function: Callable[..., None], *args: Any) -> None:
    with shielded():
        pipeline.guard(partial(function, *args), PipelineEnded, PeerLost)


def _target_body(run: Run, number: int, source: FeatureSource) -> None:
    if run.num_replicas > 1:  # see DrafterStep.warm_up
        with graphsafe.current_context(run.devices.targets[number]).eager(rng=False):
            source.compute(packing.empty_batch(run.config))
        run.pipeline.meet()
    run.pipeline.run_target(number, run.telemetry.timer(f"target-{number}").around(source))


def _drafter_thread(run: Run, number: int, store: Any) -> None:
    # leaves its group once the pipeline knows of an error, so that others stay quiet
    with shielded(), ExitStack() as stack:
        run.pipeline.guard(partial(_drafter_body, run, number, store, stack), ReplicaLost, PipelineEnded)


def _drafter_body(run: Run, number: int, store: Any, stack: ExitStack) -> None:
    config, device = run.config, run.devices.drafters[number]
    replica = Replica(run.rank(number), run.num_replicas, device, store, run.pipeline.failed)
    stack.callback(replica.close)
    run.pipeline.on_abort(replica.abort)
    model = Drafter(run.drafter, seed=config.seed, gradient_checkpointing=config.gradient_checkpointing).to(device)
    step = DrafterStep(model, *run.weights[device], config, run.schedule.num_steps, replica)
    stack.callback(step.close)
    if run.start is not None:
        run.start.restore(model, step.optimizer, step.scheduler)
    if replica.size > 1:
        with run.pipeline.compiling:
            step.warm_up(_padding(run, device), measures=run.schedule.num_validation_rounds > 0)
        run.pipeline.meet()
    trainer = Trainer(run, number, step, replica)
    run.pipeline.run_drafter(number, trainer)
    if not run.pipeline.failed.is_set():
        trainer.finish()
        graphsafe.current_context(device).synchronize()
        run.pipeline.part()
        if run.processes.size > 1:  # the same for those of other processes
            lost, left = run.pipeline.failed.is_set, run.processes.store("left")
            with graphsafe.current_context(device).released():
                attempt(partial(gather, left, run.num_replicas, lost), lost)


def _padding(run: Run, device: torch.device) -> dict[str, Tensor]:
    """A slot's tensors for a batch of padding."""
    batch = {name: tensor.to(device) for name, tensor in packing.empty_batch(run.config).items()}
    specs = target_specs(run.config, run.drafter)
    return batch | {name: torch.zeros(spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}
