"""Which tensors of a block lie in host memory on a GPU machine, found on a machine that may have no GPU.

Guarantees:
- A tensor is taken for the device's unless it is known not to be: only what a factory makes without a device inside the
  block, and what is computed from such tensors alone, is the host's.
- No tensor is kept alive.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .repairs.private import tree_flatten
from .rules import FROM_VALUES

_CONSTANT = (
    "tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "full", "eye", "arange", "range", "linspace",
    "logspace", "tril_indices", "triu_indices", "hann_window", "hamming_window", "bartlett_window", "blackman_window",
    "kaiser_window", "fft_fftfreq", "fft_rfftfreq",
)  # fmt: skip
RANDOM = ("rand", "randn", "randint", "randperm", "normal")
_OTHER = ("empty", "empty_strided", "empty_permuted", "frombuffer", "from_file")
FACTORIES = frozenset((*_CONSTANT, *RANDOM, *_OTHER))
_MAKES_CONSTANTS = frozenset((*_CONSTANT, "empty", "empty_strided", "empty_permuted"))

_CPU_LITERAL = re.compile(r"""["']cpu["']""")


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors among nested arguments."""
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> Any:
    """The tensor's storage; None where it has none of its own (sparse, a subclass that wraps others)."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


class Placement:
    """What is known of the tensors of one block, by their storages. One thread's.

    Args:
        real: the block runs on CUDA tensors, so that a tensor's own device tells.
        home: tensors that were there before the block.
    """

    def __init__(self, *, real: bool = False, home: Iterable[torch.Tensor] = ()) -> None:
        self.real = real
        self.from_memory = False  # whether the block has made a tensor of memory that is not torch's (from_numpy)
        self._host: dict[int, tuple[StorageWeakRef, bool]] = {}  # and whether it holds the same values in every call
        # A weak reference keeps the address from being given to another storage.
        self._home = {ref.cdata: ref for ref in map(StorageWeakRef, filter(None, map(_storage, home)))}

    def _key(self, tensor: torch.Tensor) -> int | None:
        storage = _storage(tensor)
        if storage is None:
            return None
        key = int(StorageWeakRef(storage).cdata)
        if self.from_memory and key not in self._host and key not in self._home and not storage.resizable():
            self._host[key] = (StorageWeakRef(storage), True)  # as for torch.tensor: Python's values, not the device's
        return key

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in host memory."""
        if self.real:
            return tensor.device.type == "cpu"
        return bool(self._host or self.from_memory) and self._key(tensor) in self._host

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is the host's and the same in every call, so that reading it does no harm."""
        if not self._host:
            return False
        return self._host.get(self._key(tensor) or 0, (None, False))[1]

    def put_on_host(self, tensors: Iterable[torch.Tensor], *, constant: bool) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None:
                ref = StorageWeakRef(storage)
                self._host[int(ref.cdata)] = (ref, constant)

    def put_on_device(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._host.pop(self._key(tensor) or 0, None)

    def made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what a factory has made without a device."""
        inputs = tensors_in(args, kwargs)
        if not inputs or (name in FROM_VALUES and not isinstance(args[0], torch.Tensor)):
            self.put_on_host(tensors_in(result), constant=name in _MAKES_CONSTANTS and not inputs)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what an operator has computed: on the host from the host's tensors alone, else on the device."""
        if not self._host and not self.from_memory:
            return
        inputs = tensors_in(args, kwargs)
        known = [self.is_host(tensor) for tensor in inputs]
        if not any(known):
            return
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        constant = not random and all(map(self.is_constant, inputs))
        if all(known):
            outputs = [tensor for tensor in tensors_in(result) if self._key(tensor) not in self._host]
            self.put_on_host(outputs, constant=constant)
        if not constant:
            self.put_on_host(filter(self.is_host, _written(func, args, kwargs)), constant=False)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    found: list[Any] = []
    for index, declared in enumerate(schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(declared.name))
    return tensors_in(found)


def target_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | torch.Tensor | None:
    """The device that a function is told to put its result on, or the tensor whose device that is."""
    if name in ("cuda", "cpu"):
        return torch.device(name)
    if name == "to":
        value = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(value, torch.Tensor):
            return value
    elif name in FACTORIES or name.startswith("new_") or name.endswith("_like"):
        value = kwargs.get("device")
        if value is None and name == "new_tensor":
            return args[0] if isinstance(args[0], torch.Tensor) else None
    else:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return torch.device(value) if isinstance(value, str | torch.device) else None


def without_cuda(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the CPU where it asks for a CUDA device that is not there."""
    if name == "cuda":
        return args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = "cpu"
    if name == "to" and len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], "cpu", *args[2:])
    return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def is_list_index(index: Any) -> bool:
    """Whether an index has a list or array of numbers, of which torch makes a tensor."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list) and part and all(isinstance(leaf, int) for leaf in tree_flatten(part)[0]):
            return True
        if type(part).__module__ == "numpy" and getattr(part, "ndim", 0) > 0:
            return True
    return False


def says_cpu(frame: FrameType | None) -> bool:
    """Whether the call that a frame is at names the CPU itself, not a device that happens to be one here."""
    return frame is not None and _CPU_LITERAL.search(_source(frame)) is not None


def _source(frame: FrameType) -> str:
    """The text of the call that a frame is at; of the whole line where Python keeps no columns."""
    file = frame.f_code.co_filename
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    first, last, start, end = position
    if first is None or last is None or start is None or end is None:
        return linecache.getline(file, frame.f_lineno)
    lines = [linecache.getline(file, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")
