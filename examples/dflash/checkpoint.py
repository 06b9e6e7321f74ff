"""Checkpoints of a run, each whole or not there at all, and whether a run may go on from one.

    OUT/checkpoints/step-00000500/   drafter.safetensors, drafter.json, optimizer.pt, state.json

Guarantees:
- A checkpoint appears under its name only once all of it is on the disk. What a killed process left half done has
  another name, is never read, and is removed by the next run.
- It holds all that training goes on from: weights, optimizer, schedule, and how many steps are done. Batches, anchors
  and their order follow from the seed and the number of steps, and a step draws nothing, so there is no other state.
  Batches that were under way are made again: none is lost, none trained twice.
- A run goes on only with the hyper-parameters, the documents and the number of drafters that it began with.
- Training waits for a copy in host memory; the disk is written meanwhile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from . import drafter as drafters
from .config import Config, InputError
from .data import Document
from .drafter import Drafter
from .files import sync

_DRAFTER = "drafter.safetensors"  # its configuration is beside it, as .json
_NAME = "step-{:08d}"
_IS_NAME = re.compile(r"step-(\d{8,})")
_VERSION = 1

# Options that may change between two parts of a run: where it runs, how fast, what is written, other commands'.
FREE = frozenset(
    name
    for line in (
        "preset, data, out, num_held_out, num_validation, regenerate, assistant_mask, targets, drafters, step",
        "attention, gradient_checkpointing, ring_depth, cache_features, cache_dir, cache_disk, loss_chunk, max_steps",
        "log_every, save_every, keep_checkpoints, resume, peer_timeout_s, tensorboard, max_new_tokens, decode_batch",
        "temperature, num_samples, sample_temperature, min_acceptance, drafter, export_format, export_dir",
        "target_step, smoke_steps, profile",
    )
    for name in line.split(", ")
)

Contract = dict[str, Any]


def contract(config: Config, documents: Sequence[Document], num_drafters: int, num_steps: int) -> Contract:
    """What a run must keep to when it goes on, as plain JSON values: options by name, and what follows from others."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in FREE}
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.id} {len(document.tokens)} ".encode())
        digest.update(np.array(document.tokens, np.int64).tobytes() + np.array(document.loss_mask, np.bool_).tobytes())
    values["loss_decay"] = config.gamma
    values |= {
        "number of drafters": num_drafters,
        "number of steps": num_steps,
        "documents": f"{len(documents)}, SHA-256 {digest.hexdigest()[:16]}",
    }
    plain: Contract = json.loads(json.dumps(values, default=str))
    return plain


def differences(one: Contract, other: Contract, first: str, second: str) -> list[str]:
    """A line for each setting that differs, with both values, ``first`` and ``second`` said before them."""
    fields = {field.name for field in dataclasses.fields(Config)}
    return [
        f"  {'--' + name.replace('_', '-') if name in fields else name}: "
        f"{first} {one.get(name)!r}, {second} {other.get(name)!r}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _on_documents(changed: list[str]) -> str:
    if not any(line.startswith("  documents:") for line in changed):
        return ""
    return "\n(--data, --num-held-out, --num-validation and --num-samples decide the documents.)"


def check_contract(former: Checkpoint, now: Contract) -> None:
    """Raise InputError, naming what has changed, where a run would go on as another one."""
    changed = differences(former.contract, now, "was", "is")
    if changed:
        raise InputError(
            f"{former.path} was written by a run with other settings, so this one cannot go on from it:\n"
            + "\n".join(changed)
            + _on_documents(changed)
            + "\nGive it the same settings, or begin anew with --no-resume (the former drafter stays) or another --out."
        )


@dataclass(frozen=True)
class Checkpoint:
    """One that is on the disk.

    Attributes:
        path: its directory.
        step: training steps done.
        num_steps: of the whole run.
        contract: what its run must keep to.
        acceptance: expected acceptance length measured then; None where nothing was measured.
        best: the largest of the run so far.
        unmeasured: a measurement was due at this step and had not ended.
    """

    path: Path
    step: int
    num_steps: int
    contract: Contract
    acceptance: float | None
    best: float | None
    unmeasured: bool = False

    @property
    def is_final(self) -> bool:
        """Whether its run is finished."""
        return self.step >= self.num_steps and not self.unmeasured

    @property
    def is_best(self) -> bool:
        """Whether no other one of its run was better until then."""
        return self.acceptance is not None and self.acceptance == self.best

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Load all state, in place, wherever the drafter is.

        Raises:
            InputError: a file is missing or damaged.
        """
        try:
            weights = load_file(self.path / _DRAFTER)
            state = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
            drafter.load_state_dict(weights)
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError) as exc:
            raise InputError(
                f"The checkpoint {self.path} is damaged ({exc}). Remove that directory, and the run goes on from the "
                "one before."
            ) from exc


@dataclass(frozen=True)
class Snapshot:
    """A run's state in host memory, apart from what training goes on to change.

    Attributes:
        weights: of the drafter, by name.
        drafter: its configuration.
        training: state of optimizer and scheduler.
        state: step, num_steps, contract, acceptance, best, unmeasured; as of ``Checkpoint``.
    """

    weights: Mapping[str, Tensor]
    drafter: Mapping[str, Any]
    training: Mapping[str, Any]
    state: Mapping[str, Any]

    @classmethod
    def take(
        cls,
        model: Drafter,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        step: int,
        num_steps: int,
        contract: Contract,
        acceptance: float | None,
        best: float | None,
        unmeasured: bool = False,
    ) -> Snapshot:
        """Copy everything. Sync: waits for the device."""
        training = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        return cls(
            weights={name: _copied(weight) for name, weight in model.state_dict().items()},
            drafter=dataclasses.asdict(model.config),
            training=_copied_all(training),
            state={
                "version": _VERSION,
                "step": step,
                "num_steps": num_steps,
                "contract": contract,
                "acceptance": acceptance,
                "best": best,
                "unmeasured": unmeasured,
            },
        )


class Checkpoints:
    """The checkpoints of one run. One thread at a time; at most one is being written.

    Args:
        directory: of all of them.
        keep: so many of the newest stay.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def newest(self) -> Checkpoint | None:
        """The one with the most steps, if there is any.

        Raises:
            InputError: it cannot be read.
        """
        paths = self._paths()
        return None if not paths else read_checkpoint(paths[-1])

    def clear_leftovers(self) -> None:
        """Remove what a killed run left half done. Only while no other writes."""
        for path in self.directory.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(self, snapshot: Snapshot, also: Sequence[Path] = ()) -> None:
        """Write a checkpoint behind the caller's back, once the one before is written.

        Args:
            snapshot: the state.
            also: files (.safetensors) to be the same drafter, each replaced at once, its .json beside it.
        Raises:
            InputError: the one before could not be written.
        """
        self.wait()
        self._pending = self._writer.submit(self._write, snapshot, tuple(also))

    def relink(self, checkpoint: Checkpoint, drafter: Path, best: Path) -> None:
        """Have the run's files be those of a checkpoint that it goes on from, wherever the run before was killed."""
        for path in (drafter, best) if checkpoint.is_best else (drafter,):
            _link_drafter(checkpoint.path, path)

    def check(self) -> None:
        """Raise InputError if what was to be written could not be. Waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all is on the disk; raises InputError if that could not be."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for what is being written, without a word about its failure. Idempotent."""
        self._writer.shutdown(wait=True)

    def _write(self, snapshot: Snapshot, also: Sequence[Path]) -> Path:
        place = self.directory / _NAME.format(snapshot.state["step"])
        try:
            self._write_to(place, snapshot, also)
        except (OSError, RuntimeError, SafetensorError) as exc:  # whatever a full disk is to each library
            raise InputError(
                f"The checkpoint {place} could not be written ({exc}). Make room there, and start the run again: it "
                "goes on from the checkpoint before, if there is one."
            ) from exc
        return place

    def _write_to(self, place: Path, snapshot: Snapshot, also: Sequence[Path]) -> None:
        scratch = self.directory / f".{place.name}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            drafters.write(snapshot.weights, snapshot.drafter, scratch / _DRAFTER)
            torch.save(snapshot.training, scratch / "optimizer.pt")
            (scratch / "state.json").write_text(json.dumps(snapshot.state, indent=2) + "\n")
            sync(scratch / "optimizer.pt")
            sync(scratch / "state.json")
            sync(scratch)
            if place.is_dir():  # the run went on from it and has trained no step since, so the weights are the same
                (scratch / "state.json").replace(place / "state.json")
                sync(place)
            else:
                scratch.rename(place)
                sync(self.directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for path in also:
            _link_drafter(place, path)
        for path in self._paths()[: -self.keep]:
            self._remove(path)

    def _paths(self) -> list[Path]:
        """The oldest first; a directory that someone has renamed is none of them."""
        found = ((_IS_NAME.fullmatch(path.name), path) for path in self.directory.glob("step-*") if path.is_dir())
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, which is none any more before the first of its files goes."""
        doomed = path.with_name(f".removed-{path.name}.{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _link_drafter(checkpoint: Path, path: Path) -> None:
    """Have ``path`` (.safetensors) be a checkpoint's drafter, its .json beside it."""
    _link((checkpoint / _DRAFTER).with_suffix(".json"), path.with_suffix(".json"))
    _link(checkpoint / _DRAFTER, path)


def _link(source: Path, place: Path) -> None:
    """Have ``place`` be the same file as ``source``, or a copy where there are no links."""
    scratch = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    scratch.unlink(missing_ok=True)
    try:
        try:
            os.link(source, scratch)
        except OSError:
            shutil.copyfile(source, scratch)
            sync(scratch)
        scratch.replace(place)
        sync(place.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _copied_all(state: Any) -> Any:
    """A state of dicts and lists with copies of its tensors."""
    if isinstance(state, Tensor):
        return _copied(state)
    if isinstance(state, dict):
        return {key: _copied_all(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied_all(value) for value in state)
    return state


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / "state.json").read_text())
        if state["version"] != _VERSION:
            raise ValueError(f"its format is {state['version']}, this program reads {_VERSION}")
        names = ("step", "num_steps", "contract", "acceptance", "best")
        return Checkpoint(path, *(state[name] for name in names), unmeasured=state.get("unmeasured", False))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(
            f"The checkpoint {path} cannot be read ({exc}). Remove that directory, and the run goes on from the one "
            "before."
        ) from exc
