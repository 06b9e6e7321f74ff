"""Where the gate plugs into the repairs, which stand below it in the import order.

Guarantees:
- Until the gate has registered, every hook does nothing, so a repair works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


def _no_scope(what: str) -> AbstractContextManager[None]:
    return nullcontext()


def _no_wait(device_index: int | None) -> None:
    return None


class Hooks:
    """What the gate does for the repairs.

    Attributes:
        compile_scope: entered for the length of every compile in this thread (Dynamo's, and a lazy backward's); the
            argument names what is compiled. It gives the thread's seats back meanwhile, marks the thread as compiling,
            and raises where the thread is capturing.
        wait_for_captures: returns once no other thread captures on the CUDA device with that index (None: on any);
            at once for a thread that holds a seat or captures itself.
        generator_scope: entered around every seeding, setting and reading of the default generators; while it lasts, no
            other thread's generator stands in for them. For a thread that holds a seat or captures it does nothing.
    """

    def __init__(self) -> None:
        self.generator_scope: Callable[[], AbstractContextManager[None]] = nullcontext
        self.compile_scope: Callable[[str], AbstractContextManager[None]] = _no_scope
        self.wait_for_captures: Callable[[int | None], None] = _no_wait


hooks = Hooks()
