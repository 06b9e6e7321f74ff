"""What a graph works on outside its own pool, and whether it still is what it was.

Guarantees:
- ``holds()`` sees, before a replay, a tensor whose memory was replaced or moved, and a parameter, buffer, submodule,
  closure variable, global or attribute that now is another one. Deep changes that nothing announces (a submodule put
  into a module's private table by hand, an entry of an optimizer's state) are seen at the next check of everything,
  which comes every ``CHECK_ALL_EVERY`` calls, and at once when any module of the process registers a part, and when a
  hook is put anywhere. (The removal of a hook is not announced.)

It rests on torch's registration hooks, which every assignment of a parameter, buffer or submodule calls, and on the
number that torch gives each hook.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from operator import attrgetter, getitem, is_
from types import CellType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from . import walk
from .errors import CaptureError
from .repairs import private

CHECK_ALL_EVERY = 64
MAX_STALE = 3  # captures in a row that were out of date at their next call, until a signature runs eagerly
_requires_grad = attrgetter("requires_grad")
_content = attrgetter("cell_contents")
_gradient = attrgetter("grad")


class _Registrations:
    """Counts the registrations of parts of modules, of the whole process, from the first graph on."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers = itertools.count(1)  # so that two threads never write the same number
        self._lock = threading.Lock()  # guards the flag; taken alone
        self._watches = False

    def watch(self) -> None:
        with self._lock:
            if self._watches:
                return
            self._watches = True
            torch_module.register_module_parameter_registration_hook(self._note)
            torch_module.register_module_buffer_registration_hook(self._note)
            torch_module.register_module_module_registration_hook(self._note)

    def _note(self, module: torch.nn.Module, name: str, part: Any) -> None:
        self.count = next(self._numbers)


_registrations = _Registrations()


def _alike(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return type(now) is type(then) and isinstance(then, int | float | complex | str | bytes) and bool(now == then)


class Memory:
    """Where the tensors that ``roots`` reach hang and lie.

    Args:
        roots: what the graph's code reaches: functions, modules, an optimizer.
        gradients_of: parameters whose gradients stay where they are, so that the graph adds to them in place.
    Thread safety: one thread.
    """

    def __init__(self, *roots: Any, gradients_of: Sequence[torch.Tensor] = ()) -> None:
        _registrations.watch()
        self._epoch, self._calls = (_registrations.count, RemovableHandle.next_id), 0
        found = walk.trace(*roots)
        self._held = True
        self._is_empty = not (
            found.tensors or found.modules or found.edges or found.values or found.routes or found.fixed
        )
        self.tensors = [tensor for tensor in found.tensors if tensor.layout is torch.strided]
        self.modules = found.modules
        self._variables = found.variables
        quick = [*found.edges, *found.values]
        self._all = [edge for edge in (*quick, *found.fixed) if not isinstance(edge[0], CellType)]
        self._routes = found.routes
        self._watch_routes()
        cells = [edge for edge in quick if isinstance(edge[0], CellType)]
        self._fixed_cells = [edge for edge in found.fixed if isinstance(edge[0], CellType)]
        self._cells, self._contents = [cell for cell, _, _ in cells], [child for _, _, child in cells]
        tables = [t for module in found.modules for t in (module._parameters, module._buffers, module._modules)]
        self._hooks = [
            hooks
            for module in found.modules
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            if isinstance(hooks := module.__dict__.get(name), dict)
        ]
        optimizers = walk.reachable(*roots, kind=torch.optim.Optimizer)
        lists = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._sizes = [(container, len(container)) for container in (*tables, *lists)]
        states = [entry for optimizer in optimizers for entry in optimizer.state.values()]
        announced = {id(module._modules) for module in found.modules}
        announced |= set(map(id, states)) | {id(optimizer.state) for optimizer in optimizers}
        often = [edge for edge in quick if id(edge[0]) not in announced and not isinstance(edge[0], CellType)]
        self._containers, self._keys = [edge[0] for edge in often], [edge[1] for edge in often]
        self._children = [edge[2] for edge in often]
        in_states = {id(value) for entry in states for value in entry.values()}
        self._trainable = [tensor for tensor in self.tensors if id(tensor) not in in_states]
        self._flags = list(map(_requires_grad, self._trainable))
        self._parameters = list(gradients_of)
        self._gradients = list(map(_gradient, self._parameters))
        self._pointed = self.tensors + [g for g in self._gradients if g is not None and g.layout is torch.strided]
        self._addresses = list(map(torch.Tensor.data_ptr, self._pointed))
        self._indices = list(range(len(self._pointed)))
        self._kinds = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in self.tensors]
        self._hooks_then = self._hooks_now()
        self._training = [module.__dict__ for module in found.modules if "training" in module.__dict__]

    def holds(self) -> bool:
        """Whether everything still is where it was. Once it is not, never again."""
        epoch = (_registrations.count, RemovableHandle.next_id)
        if self._is_empty or not self._held:
            return self._held
        self._calls += 1
        everything = epoch != self._epoch or self._calls % CHECK_ALL_EVERY == 0
        try:
            held = (
                (all(map(is_, map(getitem, self._containers, self._keys), self._children)) or self._hang_alike())
                and (all(map(is_, map(_content, self._cells), self._contents)) or self._contain_alike())
                and (not self._routes or self._stay_on_routes() or self._lead_alike())
                and private.data_pointers_equal(self._pointed, self._addresses, self._indices)
                and list(map(_requires_grad, self._trainable)) == self._flags
                and all(map(is_, map(_gradient, self._parameters), self._gradients))
                and (not everything or self._holds_wholly())
            )
        except (KeyError, IndexError, ValueError):  # what hung there is gone
            held = False
        self._epoch, self._held = epoch, held
        return held

    def _stay_on_routes(self) -> bool:
        return all(map(is_, map(getitem, *self._stops), self._next_stops)) and all(
            map(is_, map(_content, self._begins), self._first_stops)
        )

    def _hang_alike(self) -> bool:
        """Whether what hangs there is the same or, of numbers and strings, equal."""
        for index, (container, key) in enumerate(zip(self._containers, self._keys, strict=True)):
            if not _alike(container[key], self._children[index]):
                return False
            self._children[index] = container[key]
        return True

    def _watch_routes(self) -> None:
        edges = {(id(edge[0]), edge[1]): edge for route in self._routes for edge in route.edges}.values()
        cells = [edge for edge in edges if isinstance(edge[0], CellType)]
        hanging = [edge for edge in edges if not isinstance(edge[0], CellType)]
        self._stops = [container for container, _, _ in hanging], [key for _, key, _ in hanging]
        self._next_stops = [child for _, _, child in hanging]
        self._begins, self._first_stops = [cell for cell, _, _ in cells], [child for _, _, child in cells]

    def _lead_alike(self) -> bool:
        """Whether all routes lead to equal values, though by way of other objects; those are watched from now on."""
        for route in self._routes:
            edges = route.again()
            if edges is None or not _alike(edges[-1][2], route.value):
                return False
            route.edges = edges
        self._watch_routes()
        return True

    def _contain_alike(self) -> bool:
        for index, cell in enumerate(self._cells):
            if not _alike(cell.cell_contents, self._contents[index]):
                return False
            self._contents[index] = cell.cell_contents
        return True

    def _holds_wholly(self) -> bool:
        return (
            all(_alike(container[key], child) for container, key, child in self._all)
            and all(cell.cell_contents is child for cell, _, child in self._fixed_cells)
            and all(len(container) == size for container, size in self._sizes)
            and [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in self.tensors] == self._kinds
            and self._hooks_now() == self._hooks_then
        )

    def _hooks_now(self) -> list[tuple[int, ...]]:
        numbers = list(map(tuple, self._hooks))
        for tensor in self._trainable:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                numbers.append(tuple(getattr(tensor, name, None) or ()))
        return numbers

    def rebound(self) -> str | None:
        """The name of a variable, an attribute or a part of a module that is another object now, if there is one."""
        for container, key, child in self._variables:
            if isinstance(container, CellType):
                if container.cell_contents is not child:
                    return "a variable of a closure"
            elif container.get(key) is not child:
                return repr(key)
        return None

    def put_back(self) -> None:
        """Have variables, attributes and parts of modules be what they were."""
        for container, key, child in self._variables:
            if isinstance(container, CellType):
                container.cell_contents = child
            elif isinstance(container, dict) and container.get(key) is not child:
                container[key] = child

    def changed(self) -> str:
        """What is no longer there, in words."""
        for container, key, child in self._all:
            try:
                same = container[key] is child
            except (KeyError, IndexError):
                same = False
            if not same and not _alike(container.get(key) if isinstance(container, dict) else None, child):
                return f"{key!r} (a {type(child).__name__})"
        for route in self._routes:
            edges = route.again()
            if edges is None or not _alike(edges[-1][2], route.value):
                return f"{str(route)!r} (a {type(route.value).__name__})"
        return "a tensor that the code reads from a variable, or where one lies"

    def training(self) -> tuple[bool, ...]:
        """The modules' train/eval flags."""
        return tuple(fields["training"] for fields in self._training)


def refuse_rebound(memory: Memory) -> None:
    """Raise CaptureError where the captured code has bound something anew that it reads: see ``Memory.rebound``."""
    name = memory.rebound()
    if name is not None:
        memory.put_back()
        raise CaptureError(
            f"The captured function binds {name} to a new object: replays would go on reading the old one.",
            cure="Write into the tensor in place, as in buffer.copy_(value), or return the value and pass it in again.",
        )
