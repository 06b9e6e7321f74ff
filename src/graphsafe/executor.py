"""A pool of threads that own contexts, with the interface of concurrent.futures: for servers and asyncio.

Guarantees:
- A thread of the pool has one context from its first call to its end, so its graphs serve one request after another.
- Every call starts in one known state: the pool's device and stream are current, autograd confined, grad mode on,
  autocast off, no mode, no default device, and a copy of the submitter's context variables (torch's config overrides
  are among them since torch 2.12).
- Tensors cross safely both ways: the call waits for the submitter's streams, and whoever asks the future for its result
  waits for the call's. An event loop that awaits the call does so on its own thread.
- Whatever a call does, it leaves no seat, no capture and no mode behind. What it left open is closed and logged; a call
  that returns with a capture open fails, since that graph is lost.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from . import cuda_errors, gate
from .attach import attach
from .context import active_contexts, draw_seed, resolve_device
from .deadlines import timeout_s
from .errors import GraphsafeError
from .repairs import modes
from .workers import Handover

P = ParamSpec("P")
T = TypeVar("T")


class _Future(Future[T]):
    """A future whose result is handed over to the thread that asks for it."""

    _handed_back: Handover | None = None
    _raised: types.TracebackType | None = None

    def hand_back(self, value: T, handover: Handover) -> None:
        self._handed_back = handover
        self.set_result(value)

    def fail(self, error: BaseException) -> None:
        self._raised = error.__traceback__
        self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """The call's value; this thread's current streams wait for the work on it, and its seats are given back while
        it waits. Raises what the call raised, with its traceback; TimeoutError; CancelledError."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error.with_traceback(self._raised)  # as it was, however often it is asked for
            finally:
                del self, error  # the traceback holds this frame
        self._take()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None; it waits as ``result()`` does."""
        if not self.done():
            with gate.released():
                self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        start = time.monotonic()
        interval = timeout_s()
        while True:
            waited = time.monotonic() - start
            try:
                super().exception(interval if timeout is None else min(interval, max(0.0, timeout - waited)))
                return
            except TimeoutError:
                waited = time.monotonic() - start
                if timeout is not None and waited >= timeout:
                    raise
            if not self.done():
                who = threading.current_thread().name
                gate.logger.warning(
                    "Thread %r has waited %.0f s for a call of an Executor.\n%s", who, waited, gate.report()
                )

    def _take(self) -> None:
        if self._handed_back is not None:
            self._handed_back.take()

    def _get_snapshot(self) -> Any:
        # An event loop of newer Pythons (3.14) reads a future through this, on its own thread, and not by result().
        self._take()
        return super()._get_snapshot()  # type: ignore[misc]


class Executor(ThreadPoolExecutor):
    """A ``concurrent.futures.Executor`` whose threads each own a context on ``device``.

    Args:
        max_workers: the most threads; each starts when a call finds none idle.
        device: where the calls work; None: the device of the caller's innermost context, else the current one.
        seed: thread ``i``, and its context, are named ``executor-<device>_<i>``, and its seed follows from this one and
            ``i``, so it is the same in each run. None draws this one from the caller's generator.

    Attributes:
        device: ``torch.device``, with its index on CUDA.
        seed: what the threads' seeds follow from.

    Raises:
        GraphsafeError: there is no such device.
        ValueError: max_workers is not an int of at least 1.

    ``submit``, ``map``, ``shutdown`` and ``with`` are the standard library's, and ``loop.run_in_executor`` and
    ``loop.set_default_executor`` take it. A graph, and a TrainStep, belong to the thread that made them: keep one a
    thread, in a ``threading.local``. ``shutdown()``, and the end of the interpreter, end each thread's context in it.

    A call that waits for another call of the same executor waits for ever once no thread is free, as in the standard
    library. Waiting by ``future.result()`` gives the caller's seats back; ``concurrent.futures.wait``, ``as_completed``
    and ``await`` do not, so use them outside ``eager()`` blocks.
    """

    def __init__(
        self, max_workers: int, device: torch.device | str | int | None = None, seed: int | None = None
    ) -> None:
        if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 1:
            raise ValueError(f"max_workers is {max_workers!r}; it is an int of at least 1.")
        if device is None and active_contexts():
            device = active_contexts()[-1].device
        self.device = resolve_device(device)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise GraphsafeError(f"seed is {seed!r}; it is an int, or None to draw one from the caller's generator.")
        self.seed = draw_seed() if seed is None else seed
        super().__init__(max_workers, thread_name_prefix=f"executor-{self.device}")

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread of the pool call ``fn(*args, **kwargs)``.

        The tensors handed over are those of the arguments, and of ``fn``'s closure, defaults and partials. A module, a
        method's own object, and an object of a closure are taken to live longer than the call, and are not searched:
        replace or drop their tensors when no call that uses them is under way.

        Raises:
            GraphsafeError: this thread captures.
            RuntimeError: after ``shutdown()``.
        """
        if gate.capturing() is not None:
            raise GraphsafeError("Executor.submit() was called inside a capture. Submit before it, or after.")
        handed = Handover(_carried(fn, args, kwargs), [self.device, *(context.device for context in active_contexts())])
        future: _Future[T] = _Future()
        # Emptied by whoever ends it: the traceback of a failed call reaches what the pool keeps of it.
        call = [future, handed, contextvars.copy_context(), fn, args, kwargs]
        super().submit(self._run, call).add_done_callback(functools.partial(_give_up, call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, and their contexts in them, once no call is left; see the standard library's.

        Args:
            wait: return when they have ended; this thread's seats are given back meanwhile.
            cancel_futures: cancel the calls that have not started.
        """
        with gate.released():
            super().shutdown(wait, cancel_futures=cancel_futures)

    def _run(self, call: list[Any]) -> None:
        future, handed, variables, fn, args, kwargs = call
        call.clear()
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._known_state()
            handed.take()
            handed.tensors.clear()
            value = variables.run(fn, *args, **kwargs)
            back = Handover((value,), (self.device,))
        except BaseException as exc:
            cuda_errors.note(exc)
            _leave_as_found(None)
            future.fail(exc)
        else:
            lost = _leave_as_found(fn)
            if lost is None:
                future.hand_back(value, back)
            else:
                future.fail(lost)
        finally:
            del future, handed, variables, fn, args, kwargs  # the traceback of a failed call holds this frame

    def _known_state(self) -> None:
        if gate.capturing() is not None:
            raise GraphsafeError("An earlier call left a capture open in this thread. Capture with a `with` block.")
        known = any(context.device == self.device for context in active_contexts())
        context = attach(self.device, seed=None if known else self._thread_seed())
        if active_contexts()[-1] is not context:
            raise GraphsafeError("An earlier call left the block of a thread_context() open in this thread.")
        if context.stream is not None:
            torch.cuda.set_stream(context.stream)  # and its device
        torch.autograd.set_multithreading_enabled(False)
        modes.leave_all()  # of what ran after the last call's end, such as its future's callbacks

    def _thread_seed(self) -> int:
        # The pool names its threads by their number, which no other order of starting changes.
        number = threading.current_thread().name.rpartition("_")[2]
        return random.Random(f"{self.seed} {number}").getrandbits(63)


def _carried(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call brings along that its submitter may let go of at once; to search a whole model takes too long."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[tuple[Any, bool]] = [(fn, False), *((item, True) for item in (*args, *kwargs.values()))]
    while pending:
        item, is_argument = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            pending.append((item.func, False))
            pending += ((one, True) for one in (*item.args, *item.keywords.values()))
        elif isinstance(item, types.FunctionType):
            own = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    own.append(cell.cell_contents)
            pending += ((one, False) for one in own)
        elif isinstance(item, torch.Tensor | list | tuple | dict | set) or (
            is_argument and not isinstance(item, torch.nn.Module | types.MethodType)
        ):
            found.append(item)
    return tuple(found)


def _give_up(call: list[Any], ended: Future[None]) -> None:
    """End the future of a call that the pool ended without running it."""
    if not call:
        return
    future = call[0]
    call.clear()
    if not ended.cancelled():
        future.set_exception(ended.exception())
    elif future.cancel():
        future.set_running_or_notify_cancel()


def _leave_as_found(returned: Callable[..., Any] | None) -> GraphsafeError | None:
    """After a call: close what it left open. ``returned``: the function, where it did not raise.

    Returns:
        the error that the call ends in although it has returned.
    """
    lost = None
    if gate.capturing() is not None:
        lost = GraphsafeError(
            f"{returned!r} returned with a capture open. The capture is given up, and its graph holds nothing. Capture "
            "with a `with` block."
        )
    elif gate.held() and returned is not None:
        gate.logger.error("%r returned with a seat held; it is given back. Use `with context.eager():`.", returned)
    for hold in list(gate.held()):
        try:
            gate.abandon(hold.gate)
        except BaseException:
            gate.logger.exception("A seat on %s was not given back well.", hold.gate.device)
    left = modes.leave_all()
    if left and returned is not None:
        gate.logger.error("%r returned inside %s, which is left. Use a `with` block.", returned, ", ".join(left))
    return lost if returned is not None else None
