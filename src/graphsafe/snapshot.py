"""Remembers what a function may change, so that it can be put back.

Guarantees, of what the function and its arguments reach:
- Tensors get back their values, memory, shapes, ``requires_grad`` and ``.grad``; nothing is written where nothing
  changed, and no version counter moves, so that graphs of autograd made before stay usable.
- Modules, optimizers, schedulers and GradScalers get back their attributes, parameters, buffers and state; containers
  among the arguments their items; random generators of torch, Python and NumPy their states, the default ones too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from . import walk
from .repairs import private

_OBJECTS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_CANNOT = (RuntimeError, NotImplementedError, TypeError)  # what a kind of tensor raises that lacks an operation


@dataclass
class _Tensor:
    """One tensor as it was. ``memory`` is another handle of the same memory."""

    tensor: torch.Tensor
    memory: torch.Tensor | None
    value: torch.Tensor | None
    version: int
    is_leaf: bool
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        memory = value = None
        version = -1 if tensor.is_inference() else tensor._version
        with suppress(*_CANNOT), torch.inference_mode(tensor.is_inference()):
            memory = tensor.data
            value = memory.clone()
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, memory, value, version, tensor.is_leaf, tensor.requires_grad, grad)

    def restore(self) -> None:
        tensor = self.tensor
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if self.is_leaf and not tensor.is_leaf:
                with suppress(RuntimeError):  # a view of a tensor that is no leaf either any more
                    tensor.detach_()
            if self.memory is not None and _place(tensor) != _place(self.memory):
                tensor.data = self.memory
            if self.value is not None and not self._unchanged(tensor):
                tensor.data.copy_(self.value)
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if self.is_leaf and tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad

    def _unchanged(self, tensor: torch.Tensor) -> bool:
        if self.version < 0 or tensor._version != self.version:
            return False
        try:
            return torch.equal(tensor.data, self.value)  # type: ignore[arg-type]  # NumPy, .data and kernels note nothing
        except _CANNOT:
            return False


def _random_kinds() -> tuple[type, ...]:
    """The types of random generators, NumPy's where it has been imported."""
    numpy_random: Any = sys.modules.get("numpy.random")
    names = () if numpy_random is None else ("Generator", "BitGenerator", "RandomState")
    return (torch.Generator, random.Random, *(getattr(numpy_random, name) for name in names))


def _place(tensor: torch.Tensor) -> object:
    try:
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    except _CANNOT:
        return None


def _restore_table(table: dict[Any, Any], items: dict[Any, Any]) -> None:
    now = [(id(key), id(value)) for key, value in table.items()]
    if now != [(id(key), id(value)) for key, value in items.items()]:
        table.clear()
        table.update(items)


def _restore_list(table: list[Any], items: list[Any]) -> None:
    if list(map(id, table)) != list(map(id, items)):
        table[:] = items


class Snapshot:
    """What ``fn`` and its arguments reach, as it is now.

    Args:
        roots: the function, and whatever else it works on.
        arguments: the arguments, whose containers are put back too.
        devices: those whose default generators are put back.
    """

    def __init__(self, roots: Iterable[Any], arguments: Any, devices: Iterable[torch.device]) -> None:
        everything = (*roots, arguments)
        self.tensors: list[torch.Tensor] = walk.tensors(*everything)
        self._saved = [_Tensor.of(tensor) for tensor in self.tensors]
        self._undo: list[Callable[[], None]] = []
        for item in walk.reachable(*everything, kind=_OBJECTS):
            self._remember(item)
        self._remember_containers(arguments)
        for device in devices:
            self._remember_generator(private.default_generator(device))
        for generator in walk.reachable(*everything, kind=_random_kinds()):
            self._remember_random(generator)
        state = random.getstate()
        self._undo.append(lambda: random.setstate(state))
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_state = numpy_random.get_state()
            self._undo.append(lambda: numpy_random.set_state(numpy_state))

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        for saved in self._saved:
            saved.restore()

    def _table(self, table: dict[Any, Any]) -> None:
        items = dict(table)
        self._undo.append(lambda: _restore_table(table, items))

    def _list(self, table: list[Any]) -> None:
        items = list(table)
        self._undo.append(lambda: _restore_list(table, items))

    def _remember(self, item: Any) -> None:
        self._table(vars(item))
        if isinstance(item, torch.nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                self._table(vars(item)[name])
        elif isinstance(item, torch.optim.Optimizer):
            self._list(item.param_groups)
            for table in (item.state, *item.param_groups, *item.state.values()):
                if isinstance(table, dict):
                    self._table(table)
        elif isinstance(item, torch.amp.GradScaler):
            stages = private.scaler_stages(item)
            self._undo.append(lambda: private.restore_stages(item, stages))

    def _remember_containers(self, item: Any) -> None:
        if isinstance(item, dict):
            self._table(item)
        elif isinstance(item, list):
            self._list(item)
        if isinstance(item, dict | list | tuple):
            for inner in item.values() if isinstance(item, dict) else item:
                self._remember_containers(inner)

    def _remember_random(self, generator: Any) -> None:
        if isinstance(generator, torch.Generator):
            self._remember_generator(generator)
        elif isinstance(generator, random.Random):
            with suppress(NotImplementedError):  # one that reads the system's has no state
                state = generator.getstate()
                self._undo.append(lambda: generator.setstate(state))
        elif hasattr(generator, "set_state"):
            numpy_state = generator.get_state()
            self._undo.append(lambda: generator.set_state(numpy_state))
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits_state = bits.state
            self._undo.append(lambda: setattr(bits, "state", bits_state))

    def _remember_generator(self, generator: torch.Generator) -> None:
        state = generator.get_state()

        def undo() -> None:
            if private.state_bytes(generator.get_state()) != private.state_bytes(state):
                generator.set_state(state)

        self._undo.append(undo)
