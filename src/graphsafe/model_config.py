"""Where a model's configuration lies: a directory, a file, or a name on the hub.

Guarantees:
- Reads files alone; the hub is asked only for a name that is not in its local cache, and not under HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import GraphsafeError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[\w.-]+")
_GGUF_MAGIC = b"GGUF"  # the first bytes of each such file
_MAX_SHOWN = 80  # characters of a name in a message


class ModelConfigError(GraphsafeError):
    """A model's configuration cannot be read; the message says where it was looked for."""


def find_config(model: str) -> Path:
    """The file that describes ``model``: a config.json, or a .gguf file.

    Raises:
        ModelConfigError: there is none.
    """
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return path
        if path.is_dir():
            for found in (path / "config.json", *sorted(path.glob("*.gguf"))):
                if found.is_file():
                    return found
            raise ModelConfigError(f"The directory {path} has neither a config.json nor a .gguf file.")
        if not _HUB_NAME.fullmatch(model) or model in (".", ".."):
            raise ModelConfigError(
                f"There is no file or directory {shown(model)}, and it is no name on the hub either."
            )
        return _in_cache(model) or _from_hub(model)
    except ModelConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # too long, not to be read, or a home that is not known
        raise ModelConfigError(f"{shown(model)} cannot be looked for: {_why(error)}") from error


def shown(name: str) -> str:
    """A name in quotes, as much of it as a message holds."""
    return repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]


def _in_cache(model: str) -> Path | None:
    """The config.json in the hub's local cache."""
    environment = os.environ
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    folder = Path(cache).expanduser() / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
    snapshots = [folder / "snapshots" / commit] if _COMMIT.fullmatch(commit) else []
    snapshots += sorted(folder.glob("snapshots/*"))
    return next((found for one in snapshots if (found := one / "config.json").is_file()), None)


def _from_hub(model: str) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelConfigError(f"{model!r} is no directory, and not in the hub's local cache; HF_HUB_OFFLINE is set.")
    try:
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ModelConfigError(
            f"{model!r} is no directory, and not in the hub's local cache. Give a directory, or pip install "
            "huggingface_hub so that its configuration can be fetched."
        ) from error
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        raise ModelConfigError(
            f"{model!r} is no directory, and the hub does not give its config.json: {_why(error)}"
        ) from error


def read_config(source: Path) -> Mapping[str, Any]:
    """The configuration in the file.

    Raises:
        ModelConfigError: it is no JSON object.
    """
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{source} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise ModelConfigError(f"{source} cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{source} holds no JSON object, so it is no model's configuration.")
    return config


def check_gguf(source: Path) -> None:
    """Raise ModelConfigError unless the file begins as a GGUF file does."""
    try:
        with source.open("rb") as file:
            begin = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelConfigError(f"{source} cannot be read: {_why(error)}") from error
    if begin != _GGUF_MAGIC:
        raise ModelConfigError(f"{source} is no GGUF file: it does not begin with {_GGUF_MAGIC.decode()}.")
