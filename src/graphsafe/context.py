"""A thread's own device, stream, memory pool and RNG: what its compiles, captures and replays stand on.

Guarantees:
- Enter sets device, stream and confinement of autograd to this thread, and exit leaves everything as found, also after
  an exception. (``torch.autograd.set_multithreading_enabled`` is thread-local: backward then runs on this thread.)
- Work handed over is never read early: the context's stream waits for the caller's on enter, and the caller's for the
  context's on exit.
- The default generator is swapped for the context's only under exclusion, so no thread draws another's numbers.
- Graphs die with their context, in its thread, outside any capture.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch

from . import gate, own_streams
from .errors import GraphsafeError, NoContextError, WrongThreadError, require
from .gate import Counters, DeviceGate, Scope
from .repairs import private, trees

_SEED_BOUND = 2**63 - 1
MAX_ENDED = 1000  # names of ended contexts that statistics keep apart


class Resource(Protocol):
    """What dies with a context: a graph."""

    def close(self) -> None: ...


class _PerThread(threading.local):
    """This thread's contexts, outermost first, and the record of those that attach() made."""

    def __init__(self) -> None:
        self.contexts: list[ThreadContext] = []
        self.attached: Any = None


_per_thread = _PerThread()
_registry_lock = threading.Lock()  # guards the three below; taken alone
_live: list[ThreadContext] = []
_ended: dict[tuple[str, str], Counters] = {}  # (name, device) -> what contexts that have ended did
left_behind: list[ThreadContext] = []  # of threads that could not end them; kept, so that no graph is destroyed
_seeding_lock = threading.Lock()  # guards draws of seeds from a generator; taken alone


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A device with its index; ``None`` is the current CUDA device, or the CPU where there is none.

    Raises:
        GraphsafeError: no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError) as exc:
        why = str(exc).partition("\n")[0]
        raise GraphsafeError(f"{device!r} names no device ({why}). Name one as torch does: 'cpu', 'cuda:0'.") from exc
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise GraphsafeError(f"Device {found} is of a kind that graphsafe does not support. Use 'cuda:N' or 'cpu'.")
    count = torch.cuda.device_count()
    index = found.index if found.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise GraphsafeError(
            f"Device cuda:{index} is not there: this process sees {count} CUDA device(s). Choose one of them, or 'cpu'."
        )
    return torch.device("cuda", index)


class ThreadContext:
    """One thread's state on one device, used by that thread alone. Made by ``thread_context``, ``attach`` or ``spawn``.

    Attributes:
        device: ``torch.device``, with its index on CUDA.
        stream: the ``torch.cuda.Stream`` that the thread works on; None on the CPU.
        pool: handle of the graph memory pool that the context's training steps share; None on the CPU.
        generator: the ``torch.Generator`` of everything the context draws.
        name: for reports and statistics.
    """

    def __init__(
        self, device: torch.device | str | int | None = None, *, seed: int | None = None, name: str | None = None
    ) -> None:
        self.device = resolve_device(device)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise GraphsafeError(f"seed is {seed!r}; it is an int, or None to draw one from the spawner's generator.")
        self.seed = seed
        self.name = name if name is not None else threading.current_thread().name
        self.stream: torch.cuda.Stream | None = None
        self.pool: tuple[int, int] | None = None
        self.generator: torch.Generator = torch.Generator(self.device)
        self.counters = Counters()
        self.pool_bytes: dict[tuple[int, int], int] = {}  # reserved for the pools of its graphs
        self.gate: DeviceGate = gate.gate_for(self.device)
        self.graveyard: deque[Any] = deque()  # CUDA graphs to destroy, by this thread, outside captures
        self._resources_lock = threading.RLock()  # guards the set; taken alone, also by a finaliser that interrupts it
        self._resources: weakref.WeakSet[Resource] = weakref.WeakSet()
        self._seeder = torch.Generator()  # seeds of contexts made below this one
        self._saved: torch.Generator | torch.Tensor | None = None
        self._swapped_in = b""  # on the CPU: the state that stands in for the default generator's
        self._exit: ExitStack | None = None
        self.closer: Callable[[ThreadContext], None] | None = None  # how an attached one ends; None: with its block
        self._ident = 0
        self._closed = False

    def __enter__(self) -> ThreadContext:
        if torch.compiler.is_dynamo_compiling():  # is_compiling() is one flag for all threads
            raise GraphsafeError(
                "A thread context was entered inside compiled code. Enter it outside, around the compiled call."
            )
        if gate.capturing() is not None:
            raise GraphsafeError("A thread context was entered inside a capture. Enter it before the capture begins.")
        if self._closed or self._exit is not None:
            cure = "Make a new one." if self.closer is None else "attach() has entered it: use it without `with`."
            raise GraphsafeError(f"The context {self.name!r} was entered before; a context is entered once. {cure}")
        for other in _per_thread.contexts:
            if other.device == self.device:
                raise GraphsafeError(
                    f"This thread already has a context on {self.device} ({other.name!r}). One thread has one context "
                    "a device: use graphsafe.current_context(), or another device, or another thread."
                )
        self._ident, self._outside = threading.get_ident(), tuple(gate.held())
        self.reseed(draw_seed() if self.seed is None else self.seed)
        with ExitStack() as stack:
            if self.device.type == "cuda":
                before = torch.cuda.current_stream(self.device)
                self.stream = own_streams.take(self.device)
                stack.callback(own_streams.give_back, self.stream)
                self.pool = torch.cuda.graph_pool_handle()
                self.stream.wait_stream(before)
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
                stack.callback(before.wait_stream, self.stream)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.callback(gate.abandon, self.gate, self._outside)
            _per_thread.contexts.append(self)
            with _registry_lock:
                _live.append(self)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.check_thread("The context")
        if exc_info and exc_info[0] is not None:  # an interrupt may have left a capture open
            gate.abandon(self.gate, self._outside)
        require(gate.capturing() is None, "A thread context was left inside a capture. End the capture first.")
        try:
            for inside in reversed(_per_thread.contexts[_per_thread.contexts.index(self) + 1 :]):
                if inside.closer is not None:
                    inside.closer(inside)
        finally:
            self.end()

    def close(self) -> None:
        """End a context that ``attach()`` made, and its graphs, before its thread ends. A second call does nothing.

        Raises:
            WrongThreadError: another thread than its own.
            GraphsafeError: it ends with a ``with`` block, one inside it is still open, or this thread captures.
        """
        if self._closed:
            return
        if self._exit is not None:
            self.check_thread("The context")
        if self.closer is None:
            raise GraphsafeError(
                f"The context {self.name!r} ends with its `with` block, or with its worker: leave the block. close() "
                "is for contexts that graphsafe.attach() made."
            )
        self.closer(self)

    def end(self) -> None:
        assert self._exit is not None
        try:
            self._destroy_graphs()
        finally:
            self._closed = True
            _per_thread.contexts.remove(self)
            retire(self)
            self._exit.close()  # which gives back what an interrupt has left, too

    def _destroy_graphs(self) -> None:
        if self.device.type != "cuda":
            self._close_resources()
            return
        with self.gate.seat(exclusive=False):
            self._close_resources()
            self.drain()
            trees.mine().close(self.device.index)
            private.clear_cublas_workspaces()  # the workspace of this stream, which nothing uses any more

    def _close_resources(self) -> None:
        for resource in self.resources():
            resource.close()

    def drain(self) -> None:
        """Destroy the graphs that were dropped since. The context's own thread, outside a capture."""
        if self.graveyard and self.stream is not None:
            self.stream.synchronize()  # a graph's memory, and what it kept alive, is free only once it no longer runs
        while self.graveyard:
            raw, kept = self.graveyard.popleft()
            raw.reset()
            del kept

    def register(self, resource: Resource) -> None:
        """Have ``resource`` closed when the context ends, if it lives that long."""
        with self._resources_lock:
            self._resources.add(resource)

    def unregister(self, resource: Resource) -> None:
        with self._resources_lock:
            self._resources.discard(resource)

    def resources(self) -> list[Resource]:
        """What lives in the context now. Any thread."""
        with self._resources_lock:
            return list(self._resources)

    def shared_pool(self) -> tuple[int, int]:
        """The context's pool: a new one once no graph uses it, since a pool without users dies with its id."""
        pool = self.pool
        if pool is None or not any(getattr(resource, "pool", None) == pool for resource in self.resources()):
            pool = self.pool = torch.cuda.graph_pool_handle()
        return pool

    # what users call

    @property
    def closed(self) -> bool:
        """Whether the context has ended, and its graphs with it."""
        return self._closed

    def synchronize(self) -> None:
        """Wait on the host for this context's stream, never for the device. A no-op inside a capture."""
        if self.stream is not None and gate.capturing() is None:
            self.stream.synchronize()

    def eager(self, rng: bool = True) -> AbstractContextManager[None]:
        """A block of eager work during which no other thread captures on the device.

        Args:
            rng: True: alone on the device, with the context's generator in place of the default one. False: a shared
                seat, for steps that draw nothing.
        Raises:
            GateTimeout: the deadline passed before the seat was free.
            WrongThreadError: another thread, or another asyncio task of this one.
        """
        self.check_thread("The context")
        if self._closed or self._exit is None:
            raise NoContextError("eager()", str(self.device))
        self.counters.eager_steps += 1
        return self.seat(exclusive=rng)

    def released(self) -> AbstractContextManager[None]:
        """A block that waits for another thread, as a collective on the CPU does: no seat is held meanwhile."""
        return gate.released()

    # for the modules below

    def seat(self, *, exclusive: bool) -> Scope:
        if not exclusive:
            return self.gate.seat(exclusive=False, counters=self.counters)
        return self.gate.seat(exclusive=True, counters=self.counters, on_take=self.swap_in, on_give=self.swap_out)

    def swap_in(self) -> None:
        """Put the context's generator in place of the device's default one. Only under exclusion."""
        default = private.default_generator(self.device)
        if self.device.type == "cpu":
            self._saved = default.get_state()
            state = self.generator.get_state()
            default.set_state(state)
            self._swapped_in = private.state_bytes(state)
        else:
            self._saved = default.graphsafe_get_state()
            default.graphsafe_set_state(self.generator)

    def swap_out(self) -> None:
        """Undo ``swap_in``, keeping what was drawn. A second call goes on from where an interrupt left the first."""
        default, saved = private.default_generator(self.device), self._saved
        if isinstance(saved, torch.Tensor):
            if self._swapped_in:
                drawn = default.get_state()
                own = private.state_bytes(self.generator.get_state())
                if own == self._swapped_in or private.state_bytes(drawn) != self._swapped_in:
                    self.generator.set_state(drawn)  # else it was drawn from by name, and is ahead
                self._swapped_in = b""
            default.set_state(saved)
        elif saved is not None:
            default.graphsafe_set_state(saved)
        self._saved = None

    def rng_state(self) -> torch.Tensor:
        """The state of the context's generator, wherever it is now."""
        standing_in = self._saved is not None and self.device.type == "cpu"
        return (private.default_generator(self.device) if standing_in else self.generator).get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the context's generator, wherever it is now."""
        standing_in = self._saved is not None and self.device.type == "cpu"
        (private.default_generator(self.device) if standing_in else self.generator).set_state(state)

    def drawn(self) -> object:
        """A value that changes whenever a number is drawn while the context's generator is swapped in."""
        if self.device.type == "cpu":
            return private.state_bytes(private.default_generator(self.device).get_state())
        return (self.generator.initial_seed(), self.generator.get_offset())

    def reseed(self, seed: int) -> None:
        self.seed = seed
        self.generator.manual_seed(seed)
        self._seeder.manual_seed(seed)

    def check_thread(self, what: str) -> None:
        """Raise WrongThreadError unless this is the context's own thread."""
        if threading.get_ident() != self._ident:
            owner = next((t.name for t in threading.enumerate() if t.ident == self._ident), "a thread that has ended")
            raise WrongThreadError(f"{what} {self.name!r}", owner, threading.current_thread().name)


def retire(context: ThreadContext) -> None:
    """Count a context among those that have ended."""
    with _registry_lock:
        _live.remove(context)
        key = (context.name, str(context.device))
        if key not in _ended and len(_ended) >= MAX_ENDED:
            key = ("(others)", str(context.device))
        _ended.setdefault(key, Counters()).add(context.counters)


def thread_context(
    device: torch.device | str | int | None = None, *, seed: int | None = None, name: str | None = None
) -> ThreadContext:
    """A context for this thread, to be used with ``with``.

    Args:
        device: where the thread works: 'cuda:0', 'cpu', an index; None: the current CUDA device, else the CPU.
        seed: of everything the context draws; None draws one from the spawner's generator, distinct for each context.
        name: for reports; the thread's by default.
    Raises:
        GraphsafeError: there is no such device, or this thread has a context there already.
    """
    return ThreadContext(device, seed=seed, name=name)


def active_contexts() -> tuple[ThreadContext, ...]:
    """This thread's contexts, outermost first."""
    return tuple(_per_thread.contexts)


def current_context(device: torch.device | str | int | None = None) -> ThreadContext:
    """This thread's innermost context, or the one on ``device``.

    Raises:
        NoContextError: there is none.
    """
    contexts = _per_thread.contexts
    if device is None:
        if not contexts:
            raise NoContextError("current_context()")
        return contexts[-1]
    wanted = resolve_device(device)
    for context in contexts:
        if context.device == wanted:
            return context
    raise NoContextError("current_context()", str(wanted))


def draw_seed() -> int:
    """A seed from the calling thread's generator: its innermost context's, else torch's default one on the CPU.

    Distinct from the seeds of all contexts alive.
    """
    contexts = _per_thread.contexts
    source = contexts[-1]._seeder if contexts else torch.default_generator
    cpu = gate.gate_for(torch.device("cpu"))
    # On a seat, so that no other thread's generator stands in for the default one.
    with nullcontext() if contexts else cpu.seat(exclusive=False), _seeding_lock:
        with _registry_lock:
            taken = {context.seed for context in _live}
        while True:
            seed = int(torch.randint(_SEED_BOUND, (), generator=source, device="cpu"))
            if seed not in taken:
                return seed


def all_counters() -> tuple[list[tuple[ThreadContext, Counters]], dict[tuple[str, str], Counters]]:
    """The contexts alive, and the counters of those that have ended, by name and device."""
    with _registry_lock:
        return [(context, context.counters) for context in _live], dict(_ended)
