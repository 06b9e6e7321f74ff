"""Every exception and warning that graphsafe raises.

Guarantees:
- Each message says what happened, the rule behind it, and what to do.
- Each exception pickles: ``args`` are the constructor's arguments.
- Importing it under a torch older than graphsafe supports raises UnsupportedTorchError.
"""

from __future__ import annotations

import torch

MINIMUM_TORCH = (2, 9)


class GraphsafeError(RuntimeError):
    """Base class of graphsafe's errors, raised itself where no narrower class fits."""


class GraphsafeWarning(UserWarning):
    """Something works, but slower or less protected than it could be."""


class CaptureError(GraphsafeError):
    """A CUDA graph capture failed, or would fail on a GPU. Nothing else is harmed.

    Args:
        what: what happened.
        operation: the operator that broke the capture, where known.
        location: ``file:line`` in the user's code, where known.
        cure: what to do.
        others: CUDA errors that other threads saw meanwhile.
        thread: name of the thread that captured.

    Attributes:
        foreign: whether something outside the captured code broke it, so that a second try may succeed.
    """

    foreign = False

    def __init__(
        self,
        what: str,
        operation: str | None = None,
        location: str | None = None,
        cure: str | None = None,
        others: tuple[str, ...] = (),
        *,
        thread: str | None = None,  # pickled with the attributes
    ) -> None:
        self.what, self.operation, self.location = what, operation, location
        self.cure, self.others, self.thread = cure, tuple(others), thread
        super().__init__(what, operation, location, cure, self.others)

    def __str__(self) -> str:
        text = self.what
        if self.operation is not None:
            text += f" The operation: {self.operation}."
        if self.location is not None:
            text += f" The line: {self.location}."
        if self.thread is not None:
            text += f" The thread: {self.thread!r}."
        if self.cure is not None:
            text += f" {self.cure}"
        for other in self.others:
            text += f"\nMeanwhile in another thread: {other}"
        return text

    def attach(self, others: tuple[str, ...]) -> None:
        """Add what other threads saw."""
        self.others += tuple(others)
        self.args = (*self.args[:-1], self.others)


class ShapeMismatchError(GraphsafeError, ValueError):
    """A tensor differs from the one that was captured or specified. For the wrong thread see WrongThreadError.

    Args:
        name: which tensor.
        expected: what the spec or the captured signature says.
        actual: what was given.
        hint: what to do.
    """

    def __init__(self, name: str, expected: object, actual: object, hint: str | None = None) -> None:
        self.name, self.expected, self.actual, self.hint = name, expected, actual, hint
        super().__init__(name, expected, actual, hint)

    def __str__(self) -> str:
        hint = self.hint or "Pad or cast the input to the expected shape, dtype and device (see graphsafe.padding)."
        return f"{self.name}: expected {self.expected}, got {self.actual}. Nothing was written. {hint}"


class WrongThreadError(GraphsafeError):
    """An object that belongs to one thread (or asyncio task) was used from another.

    Args:
        what: the object.
        owner: name of the thread or task that owns it.
        caller: name of the thread or task that used it.
    """

    def __init__(self, what: str, owner: str, caller: str) -> None:
        self.what, self.owner, self.caller = what, owner, caller
        super().__init__(what, owner, caller)

    def __str__(self) -> str:
        return (
            f"{self.what} belongs to {self.owner!r} and was used from {self.caller!r}. "
            "A graph, a context and a seat are used only by the thread (and asyncio task) that made them. "
            "Make one in each thread; threads can share the function, the model and the compiled code."
        )


class NoContextError(GraphsafeError):
    """A call needs a thread context and this thread has none.

    Args:
        what: the call.
        device: the device a context is missing for, or None where any would do.
    """

    def __init__(self, what: str, device: str | None = None) -> None:
        self.what, self.device = what, device
        super().__init__(what, device)

    def __str__(self) -> str:
        where = f" for {self.device}" if self.device is not None else ""
        return (
            f"{self.what} needs a thread context{where}, and this thread has none. Captures and replays happen on a "
            "context's own stream with its own RNG. Wrap the code in `with graphsafe.thread_context(device):`, run it "
            "in a thread of graphsafe.spawn() or a graphsafe.Executor, or call graphsafe.attach(device) first in a "
            "thread that somebody else started."
        )


class GateTimeout(GraphsafeError, TimeoutError):
    """A wait for a device's gate or for a compile outlasted its deadline.

    Args:
        what: who waited for what.
        waited_s: how long, in seconds.
        report: who holds it since when, with the stack of each.
    """

    def __init__(self, what: str, waited_s: float, report: str = "") -> None:
        self.what, self.waited_s, self.report = what, waited_s, report
        super().__init__(what, waited_s, report)

    def __str__(self) -> str:
        return (
            f"{self.what} for {self.waited_s:.1f} s. A seat or a capture is held for one step, not over a wait for "
            "another thread. See the stacks below; if the holder is only slow, raise GRAPHSAFE_TIMEOUT_S.\n"
            f"{self.report}"
        )


class RingClosed(GraphsafeError):
    """A BufferRing is closed: at once for producers, and for consumers once it is drained.

    Args:
        role: ``"produce"`` or ``"consume"``.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__(role)

    def __str__(self) -> str:
        return (
            f"{self.role}() on a closed BufferRing: no item is handed over after close(). "
            "End the loop; this is how the other side says that it is done."
        )


class UnsupportedTorchError(GraphsafeError):
    """The installed torch is older than graphsafe supports.

    Args:
        found: the installed version.
        minimum: the oldest one supported.
    """

    def __init__(self, found: str, minimum: str) -> None:
        self.found, self.minimum = found, minimum
        super().__init__(found, minimum)

    def __str__(self) -> str:
        return (
            f"graphsafe needs torch {self.minimum} or newer and found {self.found}. "
            f"Install one: pip install 'torch>={self.minimum}'."
        )


def is_count(value: object, least: int) -> bool:
    """Whether an argument is an int of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(right: bool, text: str) -> None:
    """Raise GraphsafeError with ``text`` unless ``right``."""
    if not right:
        raise GraphsafeError(text)


def _require_torch() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < MINIMUM_TORCH:
        raise UnsupportedTorchError(torch.__version__, ".".join(map(str, MINIMUM_TORCH)))


_require_torch()
