"""``train``: the whole pipeline in one process, on any number of devices.

    python -m examples.dflash train --preset smollm2 --targets cuda:0 --drafters cuda:1

Guarantees:
- Ctrl-C or SIGTERM ends the run at the end of a round, with the drafter saved; a second one ends it at once.
- An error in any thread ends all of them, and is the one that the command shows.
- After the warm-up a recompile is an error: shapes are fixed, so none is due.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import graphsafe

from . import batches as packing
from .config import Config, InputError, note_split
from .data import Document, load_training_documents
from .drafter import Drafter, DrafterConfig
from .features import FeatureSource
from .fetch import resolve_target
from .metrics import Reporter
from .pipeline import Pipeline, PipelineEnded, Rings, Topology
from .plan import GIB, describe_needs, drafter_config, estimate, topology
from .replicas import Replica, ReplicaLost
from .step import COMPUTE_DTYPES, DrafterStep, target_specs
from .target import Target, load_target
from .trainer import Run, Trainer, compiles

END_TIMEOUT_S = 60.0  # for threads to end once one has failed


def train(config: Config) -> int:
    """The command. Returns its exit code: 0, or 128 + the signal that ended the run early.

    Raises:
        InputError: something that the user gave cannot be used, or does not fit into memory.
    """
    devices = topology(config)
    path = resolve_target(config.target)
    targets = load_targets(path, config, devices)
    first = targets[devices.targets[0]]
    drafter = drafter_config(config, first.shape)
    documents = load_training_documents(config, first.tokenizer, drafter.mask_token_id)
    keep_former(config)
    note_split(config)
    return train_on(documents, targets, drafter, config, devices)


def keep_former(config: Config) -> None:
    """Rename a drafter that is there already, so that this run does not overwrite it."""
    former = config.drafter_path
    if former.is_file():
        for path in (former, former.with_suffix(".json")):
            if path.is_file():
                path.replace(path.with_name(f"previous-{path.name}"))
        print(f"the drafter of the last run is now {former.with_name(f'previous-{former.name}')}")


def load_targets(path: Path, config: Config, devices: Topology) -> dict[torch.device, Target]:
    """One target for each device that has target threads."""
    dtype = COMPUTE_DTYPES[config.dtype]
    targets: dict[torch.device, Target] = {}
    try:
        for device in devices.targets:
            if device not in targets:
                targets[device] = load_target(path, device, dtype)
    except ValueError as exc:
        raise InputError(str(exc)) from exc
    except torch.OutOfMemoryError as exc:
        raise InputError(
            f"Out of memory while loading the target on {device}: {str(exc).splitlines()[0]}\n"
            "`plan` shows what each device must hold. Take other --targets, or --dtype bfloat16."
        ) from exc
    return targets


def count_steps(documents: Sequence[Document], config: Config, num_drafters: int) -> int:
    """Steps of the run: one for each round of batches of all epochs, up to ``max_steps``."""
    num_batches = sum(packing.num_batches(documents, config, epoch) for epoch in range(config.epochs))
    num_steps = math.ceil(num_batches / num_drafters)
    return num_steps if config.max_steps is None else min(num_steps, config.max_steps)


def all_batches(documents: Sequence[Document], config: Config, num_batches: int) -> Iterator[Mapping[str, Tensor]]:
    """The batches of all epochs, one after the other, up to ``num_batches``."""
    epochs = (packing.batches(documents, config, epoch) for epoch in range(config.epochs))
    return itertools.islice(itertools.chain.from_iterable(epochs), num_batches)


def train_on(
    documents: Sequence[Document],
    targets: Mapping[torch.device, Target],
    drafter: DrafterConfig,
    config: Config,
    devices: Topology,
) -> int:
    """Train a drafter on documents. Returns the exit code, as ``train``."""
    dtype = COMPUTE_DTYPES[config.dtype]
    first = targets[devices.targets[0]]
    parameters = sum(parameter.numel() for parameter in first.model.parameters())
    num_steps = count_steps(documents, config, len(devices.drafters))
    stop = threading.Event()
    reporter = Reporter(config.out / "metrics.jsonl", num_steps, tensorboard=config.tensorboard)
    with ExitStack() as stack:
        stack.callback(reporter.close)
        stack.enter_context(_memory_advice(config, first, parameters, devices))
        if config.labels == "data":
            for target in targets.values():
                target.drop_layers_after(max(drafter.target_layer_ids))
        rings = Rings(devices, packing.batch_specs(config), target_specs(config, drafter), config.ring_depth)
        pipeline = Pipeline(rings, stop)
        run = Run(
            config=config,
            devices=devices,
            drafter=drafter,
            num_steps=num_steps,
            pipeline=pipeline,
            reporter=reporter,
            store=dist.HashStore(),
            weights=head_weights(targets, devices, dtype),
        )
        reporter.say(
            f"training on {len(documents)} documents: {num_steps} steps of {len(devices.drafters)} x "
            f"{config.token_budget} tokens and {config.num_anchors} blocks of {config.block_size}"
        )
        signals = stack.enter_context(_signals(pipeline))
        if compiles(config, devices):
            stack.callback(torch.compiler.set_stance, "default")
        source = all_batches(documents, config, num_steps * len(devices.drafters))
        try:
            with graphsafe.WorkerGroup(timeout=END_TIMEOUT_S) as group:
                empty = packing.empty_batch(config)
                group.spawn(partial(_guarded, pipeline, pipeline.read, source, empty), device="cpu", name="reader")
                label_chunk = config.loss_chunk if config.labels == "target" else None
                for number, device in enumerate(devices.targets):
                    target, cache_bytes = targets[device], int(config.cache_features * GIB)
                    cached = FeatureSource(target, drafter.target_layer_ids, cache_bytes, label_chunk)
                    body = partial(_guarded, pipeline, _target_body, run, number, cached)
                    group.spawn(body, device=device, name=f"target-{number}")
                for number, device in enumerate(devices.drafters):
                    seed = config.seed + number
                    group.spawn(_drafter_thread, run, number, device=device, seed=seed, name=f"drafter-{number}")
        except BaseExceptionGroup as group_error:
            raise _root(group_error) from None
        if signals.received:
            reporter.say(f"stopped early; the drafter is in {config.drafter_path}" if not signals.twice else "stopped")
            return 128 + signals.received[0]
        reporter.say(f"the drafter is in {config.drafter_path}")
    return 0


def head_weights(
    targets: Mapping[torch.device, Target], devices: Topology, dtype: torch.dtype
) -> dict[torch.device, tuple[Tensor, Tensor]]:
    """Embedding and head for each drafter device: the target's own where it is there, else a copy."""
    weights: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for device in devices.drafters:
        if device not in weights:
            target = targets.get(device, targets[devices.targets[0]])
            embedding, head = target.embed_tokens.weight.detach(), target.lm_head_weight.detach()
            tied = embedding.data_ptr() == head.data_ptr()
            embedding = embedding.to(device, dtype)
            weights[device] = embedding, embedding if tied else head.to(device, dtype)
    return weights


def _guarded(pipeline: Pipeline, function: Callable[..., None], *args: Any) -> None:
    pipeline.guard(partial(function, *args), PipelineEnded)


def _target_body(run: Run, number: int, source: FeatureSource) -> None:
    if len(run.devices.drafters) > 1:  # see DrafterStep.warm_up
        with graphsafe.current_context(run.devices.targets[number]).eager(rng=False):
            source.compute(packing.empty_batch(run.config))
        run.pipeline.meet()
    run.pipeline.run_target(number, source)


def _drafter_thread(run: Run, number: int) -> None:
    with ExitStack() as stack:  # leaves the group once the pipeline knows of an error, so that others stay quiet
        run.pipeline.guard(partial(_drafter_body, run, number, stack), ReplicaLost, PipelineEnded)


def _drafter_body(run: Run, number: int, stack: ExitStack) -> None:
    config, device = run.config, run.devices.drafters[number]
    replica = Replica(number, len(run.devices.drafters), device, run.store)
    stack.callback(replica.close)
    run.pipeline.on_abort(replica.abort)
    model = Drafter(run.drafter, seed=config.seed, gradient_checkpointing=config.gradient_checkpointing).to(device)
    step = DrafterStep(model, *run.weights[device], config, run.num_steps, replica)
    stack.callback(step.close)
    if replica.size > 1:
        with run.pipeline.compiling:
            step.warm_up(_padding(run, device))
        run.pipeline.meet()
    trainer = Trainer(run, number, step, replica)
    run.pipeline.run_drafter(number, trainer)
    if not run.pipeline.failed.is_set():
        trainer.finish()
        graphsafe.current_context(device).synchronize()
        run.pipeline.part()


def _padding(run: Run, device: torch.device) -> dict[str, Tensor]:
    """A slot's tensors for a batch of padding."""
    batch = {name: tensor.to(device) for name, tensor in packing.empty_batch(run.config).items()}
    specs = target_specs(run.config, run.drafter)
    return batch | {name: torch.zeros(spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}


class _Signals:
    """Which signals have come."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def twice(self) -> bool:
        return len(self.received) > 1


@contextmanager
def _signals(pipeline: Pipeline) -> Iterator[_Signals]:
    """The first SIGINT or SIGTERM asks for a stop, the second one aborts. Only the main thread can listen."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(number: int, frame: object) -> None:
        signals.received.append(number)
        if signals.twice:
            pipeline.abort()
        else:
            pipeline.stop.set()
            os.write(2, b"\nstopping at the end of the round; once more stops at once\n")

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _memory_advice(config: Config, target: Target, parameters: int, devices: Topology) -> Iterator[None]:
    """Out of memory becomes an InputError that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        needs = estimate(config, target.shape, parameters, devices)
        texts = "\n".join(describe_needs(device, needs[device]) for device in needs if device.type == "cuda")
        raise InputError(
            f"Out of memory: {str(exc).splitlines()[0]}\nThe plan's estimate, the largest first, and what lowers it:\n"
            f"{texts}"
        ) from exc


def _root(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group that has one; else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
