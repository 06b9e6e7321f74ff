"""Where the gate and the contexts plug into the repairs, which stand below them in the import order.

Guarantees:
- Until they have registered, every hook does nothing, so a repair works without them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


def _no_scope(what: str) -> AbstractContextManager[None]:
    return nullcontext()


def _no_seats(device_index: int | None) -> AbstractContextManager[None]:
    return nullcontext()


def _no_recording(device_index: int, capture: bool) -> AbstractContextManager[None]:
    return nullcontext()


def _not_counted(what: str) -> None:
    return None


def _not_capturing() -> bool:
    return False


def _not_noted(error: object) -> None:
    return None


class Hooks:
    """What the gate and the contexts do for the repairs.

    Attributes:
        compile_scope: entered for the length of every compile in this thread (Dynamo's, and a lazy backward's); the
            argument names what is compiled. It gives the thread's seats back meanwhile, marks the thread as compiling,
            and raises where the thread is capturing. It may be left more than once, and where entering it has failed.
        seat_scope: entered around what may overlap no other thread's capture, and meet no other thread's generator:
            a shared seat on the CUDA device with that index; None: on every device used so far, the CPU too. For a
            thread that holds a seat or captures it does nothing.
        recording_scope: entered where torch's graph trees warm up or (``capture``) record on the CUDA device with that
            index. The thread is alone on the device then, with its own generator in place of the default one.
        compiled: told of every frame that was compiled, with its name; under the compile lock.
        capturing: whether this thread is inside a capture of its own.
        saw_error: told of an error of this thread's, which may be why another thread's capture fails.
    """

    def __init__(self) -> None:
        self.compile_scope: Callable[[str], AbstractContextManager[None]] = _no_scope
        self.seat_scope: Callable[[int | None], AbstractContextManager[None]] = _no_seats
        self.recording_scope: Callable[[int, bool], AbstractContextManager[None]] = _no_recording
        self.compiled: Callable[[str], None] = _not_counted
        self.capturing: Callable[[], bool] = _not_capturing
        self.saw_error: Callable[[object], None] = _not_noted


hooks = Hooks()
