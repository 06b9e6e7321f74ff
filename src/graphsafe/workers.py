"""Threads that carry a context and hand their value, or their exception, back.

Guarantees:
- A worker starts in one known state: grad mode on, autocast off, no default device, and a copy of the spawner's context
  variables (torch's config overrides are among them since torch 2.12, so they reach the worker).
- Tensors cross safely both ways: the worker's stream waits for the spawner's, the caller of ``result()`` waits for the
  worker's, and what crosses is recorded on the stream that will use it.
- A group ends whole: the first failure sets ``stop``, all are joined, and every failure is in one ExceptionGroup.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from . import cuda_errors, gate, walk
from .context import ThreadContext, active_contexts, draw_seed, resolve_device
from .deadlines import timeout_s
from .errors import GraphsafeError
from .waits import wait_for

T = TypeVar("T")


class Handover:
    """Work on tensors that another thread goes on with: its streams wait for that work, and the tensors' memory is not
    reused before its streams are done with it.

    Made by the thread that hands over, on its current streams. Without CUDA in use it does nothing.

    Args:
        roots: what reaches the tensors.
        devices: those whose work is handed over besides the tensors' own.
    """

    def __init__(self, roots: tuple[Any, ...], devices: Iterable[torch.device]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._devices: list[torch.device] = []
        self._events: list[torch.cuda.Event] = []
        if torch.cuda.is_initialized():
            self.tensors = [tensor for tensor in walk.tensors(*roots) if tensor.is_cuda]
            found = {tensor.device for tensor in self.tensors} | {one for one in devices if one.type == "cuda"}
            self._devices = sorted(found, key=str)
            self._events = [torch.cuda.current_stream(device).record_event() for device in self._devices]

    def take(self) -> None:
        """Have this thread's current streams wait for the work, and record the tensors on them."""
        for device in self._devices:
            stream = torch.cuda.current_stream(device)
            for event in self._events:
                stream.wait_event(event)
            for tensor in self.tensors:
                if tensor.device == device and tensor.layout is torch.strided:
                    tensor.record_stream(stream)


class Worker(Generic[T]):
    """A started thread with a context of its own. Made by ``spawn()``.

    Attributes:
        name: of the thread and of its context.
        device: where it works.
    """

    def __init__(
        self,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | str | int | None,
        seed: int | None,
        name: str | None,
        daemon: bool = False,
        on_end: Callable[[Worker[Any]], None] | None = None,
    ) -> None:
        if gate.capturing() is not None:
            raise GraphsafeError("spawn() was called inside a capture. Start workers before it, or after.")
        if not callable(fn):
            raise GraphsafeError(f"spawn() takes a function and its arguments; {fn!r} cannot be called.")
        if device is None and active_contexts():
            device = active_contexts()[-1].device
        self.device = resolve_device(device)
        seed = draw_seed() if seed is None else seed
        self._done = threading.Condition(threading.Lock())  # guards the four below; taken alone
        self._ended = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._retrieved = False  # whether someone has seen the error
        self._handed_back: Handover | None = None
        self._on_end = on_end
        self._arguments = (args, kwargs)
        handed = Handover((args, kwargs, fn), [self.device, *(context.device for context in active_contexts())])
        run_in = contextvars.copy_context().run
        self._thread = threading.Thread(target=run_in, args=(self._main, fn, handed, seed), name=name, daemon=daemon)
        self.name = self._thread.name
        self._thread.start()

    def _main(self, fn: Callable[..., T], handed: Handover, seed: int) -> None:
        args, kwargs = self._arguments
        value: T | None = None
        error: BaseException | None = None
        back: Handover | None = None
        try:
            with ThreadContext(self.device, seed=seed, name=self.name):
                handed.take()
                handed.tensors.clear()
                value = fn(*args, **kwargs)
                back = Handover((value,), (self.device,))
        except BaseException as exc:
            cuda_errors.note(exc)
            exc.add_note(f"In worker {self.name!r}.")
            error, value, back = exc, None, None
            self._traceback = exc.__traceback__
        finally:
            del args, kwargs
            self._arguments = ((), {})
            with self._done:
                self._value, self._error, self._handed_back = value, error, back
                self._ended = True
                self._done.notify_all()
            if self._on_end is not None:
                self._on_end(self)

    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._ended

    def result(self, timeout: float | None = None) -> T:
        """What the function returned; the caller's stream waits for the worker's work on it.

        Args:
            timeout: seconds to wait; None: for ever, with a report in the log now and then.
        Raises:
            TimeoutError: the worker is still running.
            BaseException: what the function raised, with its traceback.
        """
        if not self._ended:
            with gate.released(), self._done:
                if not wait_for(self._done, lambda: self._ended, timeout, f"the result of worker {self.name!r}"):
                    raise TimeoutError(
                        f"Worker {self.name!r} has not ended within {timeout} s. It runs on; call result() again."
                    )
        if self._error is not None:
            self._retrieved = True
            raise self._error.with_traceback(self._traceback)  # as it was, however often it is asked for
        if self._handed_back is not None:
            self._handed_back.take()
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "runs" if not self._ended else "has failed" if self._error is not None else "has ended"
        return f"<Worker {self.name!r} on {self.device} {state}>"

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._retrieved:
            gate.logger.error("Worker %r failed, and nobody asked for its result.", self.name, exc_info=error)

    def stack(self) -> str:
        """The stack of the thread as it is now; empty once it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def spawn(
    fn: Callable[..., T],
    *args: Any,
    device: torch.device | str | int | None = None,
    seed: int | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Worker[T]:
    """Start ``fn(*args, **kwargs)`` in a thread with a context of its own.

    Args:
        device: the context's; None: the device of the spawner's innermost context, else the current one.
        seed: of the context; None draws one from the spawner's generator.
        name: of the thread and the context.
    Raises:
        GraphsafeError: there is no such device. Nothing was started.

    For a function with parameters of these names use ``functools.partial``.
    """
    return Worker(fn, args, kwargs, device, seed, name)


class WorkerGroup:
    """Workers that end together: on the first failure ``stop`` is set, and leaving the block joins them all.

    Args:
        timeout: how long, in seconds, the workers may take to end once ``stop`` is set; None: for ever.

    Attributes:
        stop: a ``threading.Event`` for the workers' loops to watch.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.stop = threading.Event()
        self._workers: list[Worker[Any]] = []
        self._changed = threading.Condition(threading.Lock())  # guards the list below and _deadline; taken alone
        self._failed: list[Worker[Any]] = []
        self._entered = self._left = False

    def spawn(
        self,
        fn: Callable[..., T],
        *args: Any,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Worker[T]:
        """As ``graphsafe.spawn``, within the group. Raises GraphsafeError outside the ``with`` block."""
        if not self._entered or self._left:
            raise GraphsafeError("WorkerGroup.spawn() was called outside the group's `with` block. Spawn inside it.")
        worker = Worker(fn, args, kwargs, device, seed, name, daemon=True, on_end=self._on_end)
        self._workers.append(worker)
        return worker

    def _on_end(self, worker: Worker[Any]) -> None:
        with self._changed:
            if worker._error is not None:
                if not self.stop.is_set():  # the first: said now, since others may take long to end
                    gate.logger.error(
                        "Worker %r failed; its group is told to stop.", worker.name, exc_info=worker._error
                    )
                worker._retrieved = True  # the group raises it
                self._failed.append(worker)
                self.stop.set()
            self._changed.notify_all()

    def __enter__(self) -> WorkerGroup:
        if self._entered:
            raise GraphsafeError("A WorkerGroup is entered once. Make a new one.")
        self._entered = True
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        if exc is not None:
            self.stop.set()
        errors = [exc] if exc is not None else []
        try:
            self._join()
        except BaseException as interrupt:  # Ctrl-C while joining: the workers are told, and joined all the same
            self.stop.set()
            errors.append(interrupt)
            self._join()
        self._left = True
        errors += [w._error for w in self._failed if w._error is not None and w._error not in errors]
        for worker in self._workers:
            if not worker.done():
                errors.append(
                    TimeoutError(
                        f"Worker {worker.name!r} was still running {self.timeout} s after the group was told to stop. "
                        f"Its loop should watch group.stop. Its stack:\n{worker.stack()}"
                    )
                )
        if len(errors) == 1 and not isinstance(errors[0], Exception) and not self._failed:
            if errors[0] is exc:
                return  # Ctrl-C alone goes on as it is
            raise errors[0]
        if not errors:
            return
        raise BaseExceptionGroup("workers failed", errors) from None

    def _join(self) -> None:
        stopped_at: float | None = None

        def ended() -> bool:
            nonlocal stopped_at
            if self.stop.is_set() and stopped_at is None:
                stopped_at = time.monotonic()
            late = self.timeout is not None and stopped_at is not None and time.monotonic() - stopped_at >= self.timeout
            return late or all(worker.done() for worker in self._workers)

        next_report = time.monotonic() + timeout_s()
        with gate.released(), self._changed:
            while not ended():
                if time.monotonic() >= next_report:
                    next_report += timeout_s()
                    running = [worker for worker in self._workers if not worker.done()]
                    stacks = "\n".join(f"{worker.name}:\n{worker.stack()}" for worker in running)
                    gate.logger.warning("A WorkerGroup still waits for %d workers.\n%s", len(running), stacks)
                # Once stop is set the wait is bounded; before, a worker's end or the poll for stop wakes it.
                left = (
                    None if stopped_at is None or self.timeout is None else stopped_at + self.timeout - time.monotonic()
                )
                wait_for(self._changed, ended, min(gate.POLL_S, left) if left is not None else gate.POLL_S, "workers")
        for worker in self._workers:
            if worker.done():
                worker._thread.join()
