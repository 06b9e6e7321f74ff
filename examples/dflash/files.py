"""Files that appear whole or not at all.

Guarantees:
- Whoever reads a file meets the former one or the new one, whatever happens meanwhile, a kill or a full disk included.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, flush it to the disk, and rename it over ``path``.

    Args:
        write: called with the temporary file, which is there and empty.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask says; safetensors would make it private
        write(temporary)
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    if path.is_dir() and os.name == "nt":  # a directory cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
