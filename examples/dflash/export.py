"""``export``: the run's drafter as a directory that vLLM and SGLang, or the library speculators, load; and back.

The directory holds config.json and model.safetensors. ``formats`` knows what stands in them.

Guarantees:
- A directory appears whole or not at all: it is written beside its place, flushed to the disk, read back, and renamed.
  A former export is replaced only once the new one has passed; other files are never removed.
- What is read back is compared: the configuration with the drafter's own, every tensor bit for bit.
- An exported drafter, loaded again in the dtype it was exported in, has the weights that it had.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import Config, InputError
from .drafter import Drafter, DrafterConfig, load
from .fetch import resolve_target
from .files import sync
from .formats import Format, Verifier, canonical, check_servable, check_tensors, read, write
from .target import TargetShape

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def export(config: Config) -> Path:
    """Write the run's drafter in ``config.export_format``, check what was written, and say how it is served.

    Returns:
        The directory.
    Raises:
        InputError: there is no drafter, it is not the target's, a server would run it wrongly, or the place is taken.
    """
    drafter = load_drafter(config, torch.device("cpu"), torch.float32)
    shape = canonical(drafter.config)
    path = resolve_target(config.target)
    verifier = _verifier(config, path, shape)
    check_servable(shape)
    dtype = getattr(torch, config.dtype)
    weights = {name: tensor.detach().to(dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    _refuse_not_finite(weights)
    place = (config.export_dir or config.out / f"export-{config.export_format}").resolve()
    write_directory(place, config.export_format, shape, verifier, weights)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    print(f"Wrote {len(weights)} tensors ({config.dtype}, {size / 1e6:,.1f} MB) and their configuration to {place},")
    print("read them back, and found every bit as it was.")
    print(_how_to_serve(place, config.export_format, shape, verifier))
    return place


def write_directory(
    place: Path, format_: Format, config: DrafterConfig, verifier: Verifier, weights: Mapping[str, Tensor]
) -> None:
    """Write the export ``place``, whole or not at all; a former one is replaced.

    Args:
        place: the directory; an absolute path.
        config: what ``canonical`` returns.
        weights: all of one dtype, on the CPU.
    Raises:
        InputError: the tensors are not what the format demands, or something else is in that place.
        RuntimeError: what was read back is not what was written.
    """
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in weights.items()}, "What is to be exported")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    if len(dtypes) != 1:
        raise InputError(f"What is to be exported mixes {', '.join(sorted(dtypes))}; a checkpoint has one dtype.")
    record = write(format_, config, verifier, *dtypes)
    _refuse_foreign(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch_name:
        new = Path(scratch_name, "new")  # mkdir gives it the mode that the umask says; the scratch is private
        new.mkdir()
        (new / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n")
        weights_path = new / WEIGHTS_FILE
        weights_path.touch()
        mode = weights_path.stat().st_mode  # likewise; safetensors would make it private
        save_file(dict(weights), weights_path, metadata={"format": "pt"})  # transformers asks for the format
        weights_path.chmod(mode)
        for path in (new / CONFIG_FILE, weights_path, new):
            _flush(path)
        _compare(new, config, weights)
        _put(new, place, Path(scratch_name, "former"))
    _flush(place.parent)


def load_exported(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter in an exported directory of either format, in eval mode.

    Raises:
        InputError: a file is missing or torn, the configuration asks for what this drafter does not do, or a tensor is
            missing, unknown or of another shape.
    """
    config, weights_path = _read_config(path), path / WEIGHTS_FILE
    if not weights_path.is_file():
        raise InputError(f"{path} has no {WEIGHTS_FILE}, so it is no exported drafter.")
    try:
        with safe_open(weights_path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        check_tensors(config, shapes, str(weights_path))
        weights = load_file(weights_path)
    except SafetensorError as exc:
        raise InputError(f"{weights_path} is no whole safetensors file ({exc}). Export it again.") from exc
    model = Drafter(config)
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype).eval()


def load_drafter(config: Config, device: torch.device, dtype: torch.dtype) -> Drafter:
    """The drafter that the run names: an exported directory, or a .safetensors of train.

    Raises:
        InputError: it is not there, or not whole.
    """
    path = config.drafter or config.drafter_path
    if path.is_dir():
        return load_exported(path, device, dtype)
    try:
        return load(path, device, dtype)
    except FileNotFoundError as exc:
        advice = (
            "Run train first, with the same --out"
            if config.drafter is None
            else "--drafter takes a .safetensors of train, with its .json beside it, or a directory that export wrote"
        )
        raise InputError(f"There is no drafter at {path}. {advice}.") from exc
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        if isinstance(exc, torch.OutOfMemoryError):
            raise
        raise InputError(f"{path} and the .json beside it are no whole drafter ({exc}). Train it again.") from exc


def _verifier(config: Config, path: Path, drafter: DrafterConfig) -> Verifier:
    """What the formats say of the target in the directory ``path``, which must be the one that the drafter is for."""
    try:
        target = transformers.AutoConfig.from_pretrained(path)
        shape = TargetShape.of(target)
    except (OSError, ValueError, KeyError) as exc:
        raise InputError(f"--target {config.target}: its configuration cannot be used ({exc}).") from exc
    theirs = (drafter.hidden_size, drafter.vocab_size, drafter.num_target_layers)
    ours = (shape.hidden_size, shape.vocab_size, shape.num_layers)
    if theirs != ours:
        raise InputError(
            f"The drafter was trained for a target of (hidden size, vocabulary, layers) {theirs}, but --target "
            f"{config.target} has {ours}. Give export the --target that train had."
        )
    length = getattr(target.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise InputError(
            f"--target {config.target} does not say max_position_embeddings, and servers make the drafter's rotary "
            "table that long: add it to the target's config.json."
        )
    is_hub_name = config.target != "smollm2" and not Path(config.target).expanduser().is_dir()
    name = config.target if is_hub_name else str(path.resolve())
    return Verifier(name, tuple(target.architectures or ()), length)


def _refuse_not_finite(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} holds values that are not finite: the drafter drafts nothing. Train it again.")


def _refuse_foreign(place: Path) -> None:
    """Raise InputError where writing to ``place`` would take away something that is no export."""
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError(f"{place} is a file, so nothing can be exported there. Name a directory with --export-dir.")
    others = sorted(path.name for path in place.iterdir() if path.name not in (CONFIG_FILE, WEIGHTS_FILE))
    if others:
        raise InputError(
            f"{place} holds {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, which export would "
            "remove. Name another directory with --export-dir."
        )


def _flush(path: Path) -> None:
    """Wait until the file or directory is on the disk, and let reads of it come from there."""
    sync(path)
    if path.is_file() and hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _compare(directory: Path, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError where the directory does not hold this configuration and these tensors."""
    found = _read_config(directory)
    if found != config:
        raise RuntimeError(f"{CONFIG_FILE} reads back as {found}, but the drafter is {config}. Nothing was replaced.")
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        if set(file.keys()) != set(weights):
            raise RuntimeError(f"{WEIGHTS_FILE} reads back with other tensors. Nothing was replaced.")
        for name, tensor in weights.items():
            other = file.get_tensor(name)
            same = other.dtype == tensor.dtype and other.shape == tensor.shape
            if not same or not torch.equal(other.view(torch.uint8), tensor.view(torch.uint8)):  # -0.0 is not 0.0
                raise RuntimeError(f"{name} reads back with other values. Nothing was replaced.")


def _put(new: Path, place: Path, former: Path) -> None:
    """Rename ``new`` to ``place``; what is there goes to ``former``, whose place is removed, or back if that fails."""
    try:
        if place.exists():
            place.rename(former)
        new.rename(place)
    except BaseException:
        if former.exists() and not place.exists():
            former.rename(place)
        raise


def _read_config(directory: Path) -> DrafterConfig:
    path = directory / CONFIG_FILE
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError as exc:
        raise InputError(f"{directory} has no {CONFIG_FILE}, so it is no exported drafter.") from exc
    except ValueError as exc:  # no JSON, or no text
        raise InputError(f"{path} cannot be read ({exc}). Export it again.") from exc
    return read(record, str(path))


def _how_to_serve(place: Path, format_: Format, config: DrafterConfig, verifier: Verifier) -> str:
    directory, target = shlex.quote(str(place)), shlex.quote(verifier.name)
    if format_ == "speculators":
        return f"vLLM:   vllm serve {directory}\n        (the target, {verifier.name}, is named in it)"
    options = {"method": "dflash", "model": str(place), "num_speculative_tokens": config.block_size - 1}
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if config.sliding_window is not None else ""  # for layers of two kinds
    return (
        f"vLLM:   {runner}vllm serve {target} --speculative-config {shlex.quote(json.dumps(options))}\n"
        f"SGLang: python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {directory} --speculative-num-draft-tokens {config.block_size}"
    )
