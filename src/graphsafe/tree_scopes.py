"""What a thread holds while torch's graph trees warm up or record for it: the device's gate, and its own generator.

Guarantees:
- The thread is alone on the device meanwhile, with its context's generator in place of the default one; a thread
  without a context has a generator of its own, and the main thread draws from the default one as ever.

Importing it plugs the gate and the contexts into the repairs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import gate
from .context import active_contexts
from .repairs import private
from .repairs.hooks import hooks

_numbers = itertools.count(1)


class _PerThread(threading.local):
    """Generators of a thread that has no context, by device index."""

    def __init__(self) -> None:
        self.generators: dict[int, torch.Generator] = {}


_per_thread = _PerThread()


class _Swap:
    """Puts a generator's state in place of a device's default one, and takes it out again."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self._default, self._generator = private.default_generator(device), generator
        self._saved: torch.Generator | None = None

    def swap_in(self) -> None:
        self._saved = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._generator)

    def swap_out(self) -> None:
        if self._saved is not None:
            self._default.graphsafe_set_state(self._saved)


def _own_generator(device: torch.device) -> torch.Generator:
    """Of a thread without a context; its seed follows from the default generator's, from which nothing is drawn."""
    generator = _per_thread.generators.get(device.index)
    if generator is None:
        generator = torch.Generator(device)
        generator.manual_seed((private.default_generator(device).initial_seed() + 2**32 * next(_numbers)) % 2**63)
        _per_thread.generators[device.index] = generator
    return generator


@contextmanager
def _recording_scope(device_index: int, capture: bool) -> Iterator[None]:
    device = torch.device("cuda", device_index)
    own = gate.gate_for(device)
    if gate.capturing() is not None:  # a tree's own capture goes on
        yield
        return
    context = next((context for context in active_contexts() if context.device == device), None)
    if context is not None:
        swap: dict[str, object] = {"on_take": context.swap_in, "on_give": context.swap_out}
        counters = context.counters
    elif threading.current_thread() is threading.main_thread():
        swap, counters = {}, None
    else:
        swapper = _Swap(device, _own_generator(device))
        swap, counters = {"on_take": swapper.swap_in, "on_give": swapper.swap_out}, None
    scope = own.capture(counters=counters, **swap) if capture else own.seat(exclusive=True, counters=counters, **swap)  # type: ignore[arg-type]
    with scope:
        yield


def _capturing() -> bool:
    return gate.capturing() is not None


hooks.recording_scope = _recording_scope
hooks.capturing = _capturing
