"""Contexts for threads that graphsafe did not start: a pool's, a server's, the main one.

Guarantees:
- An attached context ends in its own thread, its graphs with it: by ``close()``, with the ``with`` block that it was
  attached in, or when the thread ends. (The last that a thread of Python's runs is its ``_delete``. In a thread that
  Python did not start, the values of a ``threading.local`` die, and the dying thread runs their finaliser.) The main
  thread's end when the interpreter exits; those of a daemon thread that still runs then are not touched.
- What could not end in its own thread is kept, so that no graph is destroyed from elsewhere, and that is logged.
- An error at a thread's end is logged, and the thread's other contexts end all the same.
- A forked child has the contexts of the thread that forked, and never touches a graph of its parent's.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from dataclasses import dataclass

import torch

from . import context as contexts
from . import gate
from .context import ThreadContext, active_contexts, resolve_device
from .errors import GraphsafeError
from .repairs import private


@dataclass(frozen=True)
class _Found:
    """What to leave behind when the last of the contexts that were attached together ends.

    Attributes:
        device_index: the current CUDA device; None for a context on the CPU, which leaves it alone.
        multithreading: whether autograd used its device threads.
        process: that attached it; a forked child cannot use its CUDA.
    """

    device_index: int | None
    multithreading: bool
    process: int


class _Attached:
    """The contexts that one thread attached. Held by a ``threading.local`` alone, so it dies in the dying thread."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._process = os.getpid()
        self._found: dict[ThreadContext, _Found] = {}
        self._contexts = contexts._per_thread.contexts  # for the finaliser, which finds every threading.local empty
        self._held = gate.held()

    def enter(self, context: ThreadContext) -> None:
        self._found[context] = self._state(context)
        context.closer = _close
        try:
            context.__enter__()
        except BaseException:
            del self._found[context]
            raise

    def _together(self) -> list[ThreadContext]:
        """The attached contexts that no ``with`` block separates from now, outermost first."""
        together: list[ThreadContext] = []
        for context in reversed(self._contexts):
            if context.closer is None:
                break
            together.insert(0, context)
        return together

    def _state(self, context: ThreadContext) -> _Found:
        others = [self._found[other] for other in self._together()]
        multithreading = others[0].multithreading if others else private.multithreading_enabled()
        index = next((other.device_index for other in others if other.device_index is not None), None)
        if context.device.type == "cpu":
            index = None
        elif index is None:
            index = torch.cuda.current_device()
        return _Found(index, multithreading, os.getpid())

    def make_current(self, context: ThreadContext) -> None:
        """Have an attached context be the thread's innermost again, unless a block has been entered since."""
        if context not in self._together():
            return
        if gate.capturing() is not None:
            raise GraphsafeError("attach() was called for another device inside a capture. Call it before.")
        self._contexts.remove(context)
        self._contexts.append(context)
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)

    def close(self, context: ThreadContext) -> None:
        """End one context, in any order; the innermost that is left becomes the thread's current one."""
        found = self._found.pop(context)
        try:
            context.end()
        finally:
            left = self._together()
            torch.autograd.set_multithreading_enabled(not left and found.multithreading)
            if found.device_index is not None:
                on_cuda = [other.device.index for other in left if other.device.type == "cuda"]
                torch.cuda.set_device(on_cuda[-1] if on_cuda else found.device_index)

    def end(self) -> None:
        """End all, innermost first, in their thread, which does nothing after it. Never raises."""
        mine = [context for context in self._contexts if context in self._found]
        if not mine:
            return
        captured = gate.capturing()
        if captured is not None and captured.device.type != "cpu":
            self._leave_behind("it ended inside a capture")
            return
        if self._held:
            gate.logger.error("Thread %r ended with a seat held, which is given back.", mine[-1].name)
            for hold in list(self._held):
                gate.abandon(hold.gate)
        for context in reversed(mine):
            if self._found[context].process != os.getpid() and context.device.type == "cuda":
                contexts.left_behind.append(context)  # the parent's
                del self._found[context]
                continue
            try:
                self.close(context)
            except BaseException:
                contexts.left_behind.append(context)
                gate.logger.exception("The context %r did not end well with its thread.", context.name)

    def _leave_behind(self, why: str) -> None:
        names = ", ".join(repr(context.name) for context in self._found)
        contexts.left_behind.extend(self._found)
        self._found.clear()
        gate.logger.error("A thread did not end its contexts (%s): %s. Their graphs are kept for good.", names, why)

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing() or not self._found:  # at the process's end modules' names are gone
            return
        if threading.get_ident() == self._ident:
            # The thread is being deleted since its count of PyGILState_Ensure has come to 0. Torch's own Ensure and
            # Release would bring it to 0 again, and Python before 3.12.5 would delete the running thread a second time.
            ctypes.pythonapi.PyGILState_Ensure()
            contexts._per_thread.contexts = self._contexts
            gate.held()[:] = self._held
            self.end()
        elif os.getpid() == self._process:  # else a forked child clears away the threads that it has not
            self._leave_behind("another thread let go of them")


def _close(context: ThreadContext) -> None:
    if gate.capturing() is not None:
        raise GraphsafeError("A thread context was closed inside a capture. End the capture first.")
    alive = active_contexts()
    for inside in alive[alive.index(context) + 1 :]:
        if inside.closer is None:
            raise GraphsafeError(
                f"The context {context.name!r} was closed inside the block of {inside.name!r}, which was entered "
                "later. Leave that block first."
            )
    contexts._per_thread.attached.close(context)


def _end_with(thread: threading.Thread, attached: _Attached) -> None:
    last = getattr(thread, "_delete", None)  # threads that Python did not start, and the main one, never call it
    if last is None:
        return
    attached_ref = weakref.ref(attached)

    def end_then_delete() -> None:
        vars(thread).pop("_delete", None)
        try:
            record = attached_ref()
            if record is not None:
                record.end()
        finally:
            last()

    vars(thread)["_delete"] = end_then_delete


def attach(
    device: torch.device | str | int | None = None, *, seed: int | None = None, name: str | None = None
) -> ThreadContext:
    """This thread's context on ``device``, for a thread that graphsafe did not start. Makes it where there is none.

    The context is entered: device, stream and confinement are set for the thread, without a ``with``. It ends when the
    thread ends, with the ``with thread_context()`` block that it was attached in, or by ``close()``; after that
    ``attach()`` makes a new one. In a thread that Python did not start, the thread ends for Python when its outermost
    call into Python returns.

    Called again it returns the same context. That becomes the thread's current one once more, where another device was
    attached since; a context of a ``with`` block is returned as it is.

    Args:
        device: as for ``thread_context()``; None: this thread's innermost context, else the current CUDA device, else
            the CPU.
        seed: as for ``thread_context()``. Threads that shall differ get a seed each.
        name: for reports; the thread's by default.
    Raises:
        GraphsafeError: there is no such device; the thread has a context there with another seed or name; or it would
            have to enter or change contexts inside a capture.

    As an initializer: ``ThreadPoolExecutor(4, initializer=graphsafe.attach, initargs=("cuda:0",))``. For calls that
    hand tensors over, ``graphsafe.Executor`` does more.
    """
    alive = active_contexts()
    wanted = alive[-1].device if device is None and alive else resolve_device(device)
    attached: _Attached | None = contexts._per_thread.attached
    context = next((one for one in alive if one.device == wanted), None)
    if context is not None:
        for what, asked, has in (("seed", seed, context.seed), ("name", name, context.name)):
            if asked is not None and asked != has:
                raise GraphsafeError(
                    f"This thread has a context on {wanted} already, with {what} {has!r}, not {asked!r}. Leave {what} "
                    "out to get it as it is, or close() it first."
                )
        if attached is not None and context is not alive[-1]:
            attached.make_current(context)
        return context
    context = ThreadContext(wanted, seed=seed, name=name)
    if attached is None:
        attached = contexts._per_thread.attached = _Attached()
        _end_with(threading.current_thread(), attached)
    attached.enter(context)
    return context


def _at_exit() -> None:
    attached: _Attached | None = contexts._per_thread.attached
    if attached is not None:
        attached.end()


def _after_fork() -> None:
    contexts._registry_lock, contexts._seeding_lock = threading.Lock(), threading.Lock()
    for context in list(contexts._live):
        context._resources_lock = threading.RLock()
        if context._ident != threading.get_ident():
            contexts.retire(context)
            contexts.left_behind.append(context)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
