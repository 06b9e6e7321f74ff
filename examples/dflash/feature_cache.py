"""Caches of what a target computed for documents: in host memory, and on a disk that threads and runs share.

A document's entry is a dict of named tensors, such as {"features": [n, K*H]}. On the disk it is one file: the entry as
safetensors, then four bytes of CRC-32. Its name is a digest of the target's identity and of the document's tokens.

Guarantees:
- An entry that is found is what was put, bit for bit. A target is known by its configuration and its weights, so
  another one's entries are never found. (Other kernels round differently: what one GPU computed, another would compute
  up to rounding.)
- A file appears whole: it is written beside its place and renamed. One that is torn or altered all the same (power
  lost, a bad disk) is detected, removed and computed again.
- Files never exceed the limit, over all threads and processes that share the directory: room is taken under a lock
  before anything is written. What a killed process had begun is cleared away when the cache is next opened, an hour on.
- A disk that is full or fails ends the writing, with one message; the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .config import Config, InputError
from .target import Target

GIB = 2**30
CRC_BYTES = 4
STALE_S = 3600.0  # no file takes so long to write
_FORMAT = "1"  # part of every key: raise it when the meaning of entries changes

Entry = Mapping[str, Tensor]


class FeatureCache(Protocol):
    """Where entries are kept."""

    def get(self, tokens: Tensor) -> Entry | None:
        """The entry of the document of these tokens [n] int64 (on the CPU), in host memory, or None."""

    def put(self, tokens: Tensor, entry: Entry) -> None:
        """Keep a copy of the entry, where there is room."""


class MemoryCache:
    """Entries in host memory. One thread.

    Args:
        limit_bytes: how much it may hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._entries: dict[bytes, Entry] = {}

    def get(self, tokens: Tensor) -> Entry | None:
        return self._entries.get(tokens.numpy().tobytes())

    def put(self, tokens: Tensor, entry: Entry) -> None:
        if self.has_room(entry):
            self.keep(tokens, {name: tensor.to("cpu", copy=True) for name, tensor in entry.items()})

    def has_room(self, entry: Entry) -> bool:
        return self.num_bytes + _size(entry) <= self.limit_bytes

    def keep(self, tokens: Tensor, entry: Entry) -> None:
        """Keep the entry itself, which must be in host memory and nobody else's, where there is room."""
        key = tokens.numpy().tobytes()
        if key not in self._entries and self.has_room(entry):
            self._entries[key] = entry
            self.num_bytes += _size(entry)


class DiskCache:
    """Entries in files. Any number of threads, and of processes that open the same directory.

    Args:
        directory: made where it is not there.
        limit_bytes: how much all files in it may take, whoever wrote them.
        identity: of the target, from ``target_identity``.
        say: told once when the disk takes no more.

    Raises:
        InputError: the directory cannot be written.
    """

    def __init__(self, directory: Path, limit_bytes: int, identity: str, say: Callable[[str], object] = print) -> None:
        self.directory, self.limit_bytes, self.identity = directory, limit_bytes, identity
        self._say = say
        self._writing = True
        self._ended = threading.Lock()  # guards _writing; taken alone
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._clear_away()
                self._write_usage(_disk_usage(directory))
        except (OSError, NotImplementedError) as exc:  # the latter where the file system has no locks
            reason = getattr(exc, "strerror", None) or exc
            raise InputError(
                f"--cache-dir {directory} cannot be written ({reason}). Name another one, or leave the option out."
            ) from exc

    @property
    def num_bytes(self) -> int:
        """What all entries take, those that are being written included."""
        with self._lock():
            return self._read_usage()

    @property
    def writing(self) -> bool:
        """False once the disk has failed."""
        return self._writing

    def get(self, tokens: Tensor) -> Entry | None:
        path = self._path(tokens)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        entry = _decode(content)
        if entry is None:
            self._remove(path)
        return entry

    def wants(self, tokens: Tensor, entry: Entry) -> bool:
        """Whether ``put`` would write it, as things are now."""
        return self._writing and not self._path(tokens).exists() and self.num_bytes + _size(entry) < self.limit_bytes

    def put(self, tokens: Tensor, entry: Entry) -> None:
        if not self.wants(tokens, entry):
            return
        path, content = self._path(tokens), _encode(entry)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            if not self._reserve(temporary, len(content)):
                return
            try:
                with temporary.open("r+b") as file:
                    file.write(content)
                with self._lock():
                    if path.exists():  # another thread or process was first
                        self._remove_locked(temporary)
                    else:
                        temporary.replace(path)
            except BaseException:
                self._remove(temporary)
                raise
        except OSError as exc:
            self._end_writing(exc)

    def _path(self, tokens: Tensor) -> Path:
        digest = hashlib.sha256(f"{_FORMAT} {self.identity} ".encode() + tokens.numpy().tobytes()).hexdigest()
        return self.directory / digest[:2] / digest[2:]

    def _reserve(self, temporary: Path, size: int) -> bool:
        """Take room and make the file in its full size, which a scan of the directory counts; False: no room."""
        with self._lock():
            used = self._read_usage()
            if used + size > self.limit_bytes:
                return False
            temporary.parent.mkdir(exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.truncate(size)
                self._write_usage(used + size)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        return True

    def _remove(self, path: Path) -> None:
        try:
            with self._lock():
                self._remove_locked(path)
        except OSError as exc:
            self._end_writing(exc)

    def _remove_locked(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        self._write_usage(max(0, self._read_usage() - size))

    def _end_writing(self, exc: OSError) -> None:
        with self._ended:
            first, self._writing = self._writing, False
        if first:
            self._say(
                f"{self.directory} takes no more features ({exc.strerror or exc}): from here on they are read from it "
                "where they are there, and computed again where not."
            )

    def _lock(self) -> FileLock:
        """Guards the usage, and names becoming files; held for a look or a rename. Of its own for each use."""
        return FileLock(self.directory / "lock", poll_interval=0.002)

    def _read_usage(self) -> int:
        try:
            return int((self.directory / "usage").read_text())
        except (OSError, ValueError):  # lost, or torn
            return _disk_usage(self.directory)

    def _write_usage(self, num_bytes: int) -> None:
        (self.directory / "usage").write_text(str(num_bytes))

    def _clear_away(self) -> None:
        """Remove what killed processes had begun."""
        long_ago = time.time() - STALE_S
        for path in self.directory.glob("??/.*.tmp"):
            if path.stat().st_mtime < long_ago:
                path.unlink(missing_ok=True)


class LayeredCache:
    """Host memory in front of a disk. One thread."""

    def __init__(self, memory: MemoryCache, disk: DiskCache) -> None:
        self.memory, self.disk = memory, disk

    def get(self, tokens: Tensor) -> Entry | None:
        entry = self.memory.get(tokens)
        if entry is None:
            entry = self.disk.get(tokens)
            if entry is not None:
                self.memory.keep(tokens, entry)
        return entry

    def put(self, tokens: Tensor, entry: Entry) -> None:
        if self.memory.has_room(entry) or self.disk.wants(tokens, entry):
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in entry.items()}
            self.memory.keep(tokens, copied)
            self.disk.put(tokens, copied)


def open_disk_cache(
    config: Config, target: Target, layer_ids: Sequence[int], say: Callable[[str], object] = print
) -> DiskCache | None:
    """The cache in ``--cache-dir``, for all target threads of a run; None without the option.

    Raises:
        InputError: the directory cannot be written.
    """
    if config.cache_dir is None or config.cache_disk == 0:
        return None
    return DiskCache(config.cache_dir, int(config.cache_disk * GIB), target_identity(target, layer_ids), say)


def feature_cache(config: Config, disk: DiskCache | None) -> FeatureCache | None:
    """A target thread's cache: in memory, on the shared disk, both or none, as the configuration says."""
    memory = MemoryCache(int(config.cache_features * GIB)) if config.cache_features > 0 else None
    if memory is not None and disk is not None:
        return LayeredCache(memory, disk)
    return memory if disk is None else disk


def target_identity(target: Target, layer_ids: Sequence[int]) -> str:
    """A digest of all that decides a document's entry but its tokens: configuration, weights, layers and dtype.

    Weights enter by the exact sum of their bits, a parameter each, so the same ones give the same digest wherever they
    are. Layers that the target has dropped do not enter. Sync: waits for the device once.
    """
    settings = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(name, None)
    parameters = dict(target.model.named_parameters())
    sums = torch.stack([_bit_sum(parameter.detach()) for parameter in parameters.values()]).tolist()
    shapes = [(name, list(parameter.shape)) for name, parameter in parameters.items()]
    decides = [settings, list(layer_ids), str(target.dtype), shapes, sums]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()


def _bit_sum(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole).sum(dtype=torch.int64)


def _encode(entry: Entry) -> bytes:
    content = save({name: tensor.cpu().contiguous() for name, tensor in entry.items()})
    return content + zlib.crc32(content).to_bytes(CRC_BYTES, "little")


def _decode(content: bytes) -> Entry | None:
    """The entry, or None where it is not what ``_encode`` made."""
    body, crc = content[:-CRC_BYTES], content[-CRC_BYTES:]
    if zlib.crc32(body).to_bytes(CRC_BYTES, "little") != crc:
        return None
    try:
        return load(body)
    except SafetensorError:
        return None


def _size(entry: Entry) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in entry.values())


def _disk_usage(directory: Path) -> int:
    """Bytes of all entries' files, those being written included."""
    total = 0
    for shard in os.scandir(directory):
        if shard.is_dir():
            for file in os.scandir(shard.path):
                try:
                    total += file.stat().st_size
                except FileNotFoundError:  # renamed or removed meanwhile
                    continue
    return total
