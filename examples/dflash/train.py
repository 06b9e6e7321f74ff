"""``train``: the whole pipeline, on any number of devices, in one process or in several.

    python -m examples.dflash train --preset smollm2 --targets cuda:0 --drafters cuda:1

Guarantees:
- A run that was ended, or killed, goes on from its newest checkpoint when it is started again, bit for bit.
- Ctrl-C or SIGTERM ends the run at the end of a round, with a checkpoint; a second one ends it at once.
- An error in any thread ends all of them, and is the one that the command shows.
- After the warm-up a recompile is an error: shapes are fixed, so none is due.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from . import batches as packing
from .checkpoint import Checkpoint, Checkpoints, Contract, check_contract, contract, differences, read_checkpoint
from .config import Config, InputError, note_split
from .data import Document, load_training_documents, split_validation
from .drafter import DrafterConfig
from .feature_cache import open_disk_cache
from .fetch import resolve_target
from .metrics import Reporter, Silent
from .pipeline import Pipeline, PipelineEnded, Rings, Topology
from .plan import describe_needs, drafter_config, estimate, topology
from .processes import PeerLost, Processes
from .recompiles import errors_noted
from .replicas import ReplicaLost
from .schedule import Schedule
from .signals import listen
from .step import COMPUTE_DTYPES, target_specs
from .target import Target, load_target
from .telemetry import Telemetry, describe_run
from .threads import run_threads
from .trainer import Run, compiles


def train(config: Config) -> int:
    """The command. Returns its exit code: 0, or 128 + the signal that ended the run early.

    Raises:
        InputError: something that the user gave cannot be used, or does not fit into memory.
        PeerLost: another process of the run failed, or is gone.
    """
    processes = Processes.join(config.peer_timeout_s)
    try:
        devices = processes.share(topology(config))
        path = Path(processes.from_first("target", lambda: str(resolve_target(config.target))))
        targets = load_targets(path, config, devices)
        first = targets[devices.targets[0]]
        drafter = drafter_config(config, first.shape)
        say = print if processes.rank == 0 else (lambda text: None)
        documents = load_training_documents(config, first.tokenizer, drafter.mask_token_id, say=say)
        _check_vocabulary(documents, first, config)
        documents, validation = split_validation(documents, config, say=say)
        code = train_on(documents, targets, drafter, config, devices, validation=validation, processes=processes)
    except BaseException as exc:
        processes.close(exc)
        raise
    processes.close()
    return code


def _check_vocabulary(documents: Sequence[Document], target: Target, config: Config) -> None:
    largest = max(max(document.tokens, default=0) for document in documents)
    if largest >= target.vocab_size:
        raise InputError(
            f"{config.data} has the token {largest}, and {config.target} has {target.vocab_size}. Are the tokens those "
            "of another target?"
        )


def keep_former(config: Config, say: Callable[[str], object] = print) -> None:
    """Rename what former runs have left, each under a number of its own, so that nothing is overwritten."""
    weights = (config.drafter_path, config.best_path)
    left = (*weights, *(path.with_suffix(".json") for path in weights), config.checkpoints_path, config.metrics_path)
    left = tuple(path for path in left if path.exists())
    number = 1
    while any(_previous(path, number).exists() for path in left):
        number += 1
    for path in left:
        path.replace(_previous(path, number))
    if config.drafter_path in left:
        say(f"the drafter of the run before is now {_previous(config.drafter_path, number)}")


def _previous(path: Path, number: int) -> Path:
    return path.with_name(f"previous-{number}-{path.name}")


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
    limit = None if config.max_steps is None else config.max_steps * num_drafters
    return math.ceil(packing.num_training_batches(documents, config, limit) / num_drafters)


def find_start(config: Config, agreed: Contract, checkpoints: Checkpoints, say: Callable[[str], object]) -> str:
    """The checkpoint that the run goes on from; "" where it begins anew, with what a former run left renamed.

    A finished run is gone on from like any other, and has nothing left to do: --no-resume begins anew.

    Raises:
        InputError: the one that is there is of a run with other settings.
    """
    checkpoints.clear_leftovers()
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun: the same run, begun anew or not
    newest = checkpoints.newest() if config.resume or restarted else None
    if newest is not None:
        check_contract(newest, agreed)
        checkpoints.relink(newest, config.drafter_path, config.best_path)
        return str(newest.path)
    keep_former(config, say)
    note_split(config)
    return ""


def train_on(
    documents: Sequence[Document],
    targets: Mapping[torch.device, Target],
    drafter: DrafterConfig,
    config: Config,
    devices: Topology,
    *,
    validation: Sequence[Document] = (),
    processes: Processes | None = None,
) -> int:
    """Train a drafter on documents. Returns the exit code, as ``train``.

    Args:
        documents: to train on.
        targets: by device, those of this process.
        drafter: its shape.
        config: the run's.
        devices: of this process.
        validation: documents to measure on before each checkpoint.
        processes: those that train together, each with as many drafters; None: this one alone.
    """
    processes = Processes() if processes is None else processes
    dtype = COMPUTE_DTYPES[config.dtype]
    first = targets[devices.targets[0]]
    parameters = sum(parameter.numel() for parameter in first.model.parameters())
    num_replicas = processes.size * len(devices.drafters)
    num_steps = count_steps(documents, config, num_replicas)
    agreed = contract(config, documents, num_replicas, num_steps)
    checkpoints = Checkpoints(config.checkpoints_path, config.keep_checkpoints)
    with ExitStack() as stack:
        if processes.rank == 0:
            stack.enter_context(_sole_writer(config))
        stack.callback(checkpoints.close)
        start = _agree_on_start(config, agreed, checkpoints, processes)
        reporter: Reporter | Silent = Silent()
        if processes.rank == 0:
            reporter = Reporter(
                config.metrics_path,
                num_steps,
                tensorboard=config.tensorboard,
                resume_step=None if start is None else start.step,
            )
        stack.callback(reporter.close)
        stack.enter_context(errors_noted(reporter))
        reporter.event("start", num_steps=num_steps, **describe_run(config, devices))
        stack.enter_context(_memory_advice(config, first, parameters, devices))
        if config.labels == "data":
            for target in targets.values():
                target.drop_layers_after(max(drafter.target_layer_ids))
        disk = open_disk_cache(config, first, drafter.target_layer_ids, reporter.say)
        rings = Rings(devices, packing.batch_specs(config), target_specs(config, drafter), config.ring_depth)
        pipeline = Pipeline(rings, threading.Event())
        schedule = Schedule(
            num_steps=num_steps,
            first_step=0 if start is None else start.step,
            num_validation_rounds=packing.num_validation_rounds(validation, config, num_replicas),
            save_every=config.save_every,
        )
        run = Run(
            config=config,
            devices=devices,
            drafter=drafter,
            schedule=schedule,
            contract=agreed,
            start=start,
            checkpoints=checkpoints,
            pipeline=pipeline,
            processes=processes,
            reporter=reporter,
            telemetry=Telemetry(pipeline.rings),
            weights=head_weights(targets, devices, dtype),
            disk=disk,
        )
        reporter.say(
            f"training on {len(documents)} documents: {num_steps} steps of {num_replicas} x "
            f"{config.token_budget} tokens and {config.num_anchors} blocks of {config.block_size}"
        )
        if start is not None:
            reporter.say(f"going on from {start.path}, after {start.step} of them")
            if start.is_final:
                reporter.say("this run is finished; --no-resume begins anew and keeps its drafter")
            reporter.event("resume", step=start.step)
        signals = stack.enter_context(listen(pipeline))
        if compiles(config, devices):
            stack.callback(torch.compiler.set_stance, "default")
        processes.on_loss(pipeline.abort)
        try:
            run_threads(run, documents, validation, targets, signals)
        except BaseExceptionGroup as group_error:
            error = _root(group_error)
            if processes.size > 1 and _means_loss(error, processes):
                raise _with_advice(processes.explain(), checkpoints) from error
            raise error from None
        if processes.lost is not None:
            raise _with_advice(PeerLost(processes.lost), checkpoints)
        if signals.twice:
            processes.break_off("a second signal has ended it at once")
        if signals.agreed:
            reporter.event("stop", signal=signals.agreed)
            reporter.say("stopped" if signals.twice else f"stopped early; the drafter is in {config.drafter_path}")
            return 128 + signals.agreed
        reporter.event("end")
        reporter.say(f"the drafter is in {config.drafter_path}")
    return 0


def _agree_on_start(
    config: Config, agreed: Contract, checkpoints: Checkpoints, processes: Processes
) -> Checkpoint | None:
    """What process 0 finds, for all; all must be given the same options and data."""
    say = print if processes.rank == 0 else (lambda text: None)
    settings = json.dumps(agreed)
    first = json.loads(
        processes.from_first("start", lambda: json.dumps([settings, find_start(config, agreed, checkpoints, say)]))
    )
    differing = differences(json.loads(first[0]), agreed, "process 0 has", "this one")
    if differing:
        raise InputError(
            "The processes of a run must be given the same options and data, but they differ:\n" + "\n".join(differing)
        )
    if not first[1]:
        return None
    path = Path(first[1])
    if not path.is_dir():
        raise InputError(f"Process 0 goes on from {path}, which is not on this host. All hosts must share --out.")
    return read_checkpoint(path)


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


@contextmanager
def _sole_writer(config: Config) -> Iterator[None]:
    """Hold --out for this run alone, for as long as the process lives.

    Raises:
        InputError: another run has it.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    with (config.out / ".lock").open("a+") as file:
        try:
            import fcntl
        except ImportError:  # not on this system: nothing to hold it with
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise InputError(f"Another train is writing to {config.out}. Wait for it, or take another --out.") from exc
        except OSError as exc:
            print(f"Nothing keeps another train out of {config.out}: that file system has no locks ({exc}).")
        yield


def _with_advice(lost: PeerLost, checkpoints: Checkpoints) -> PeerLost:
    """The error, with what to do. Waits for the checkpoint that is being written, which is the one to name."""
    checkpoints.close()
    try:
        newest = checkpoints.newest()
    except InputError as exc:  # damaged, or just removed by process 0
        return PeerLost(f"{lost} {exc}")
    if newest is not None and newest.is_final:
        return PeerLost(f"{lost} All steps were done before; {newest.path} holds the last.")
    where = "There is no checkpoint yet" if newest is None else f"The last checkpoint is {newest.path}"
    return PeerLost(f"{lost} {where}; start all processes again, and the run goes on from there.")


def _means_loss(error: BaseException, processes: Processes) -> bool:
    """Whether an error, or each of a group, is what another process's end looks like in this one's threads."""
    if isinstance(error, BaseExceptionGroup):
        return all(_means_loss(inner, processes) for inner in error.exceptions)
    late = isinstance(error, TimeoutError) and processes.lost is not None  # a thread that cannot be broken off
    return late or isinstance(error, ReplicaLost | PipelineEnded | PeerLost)


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
