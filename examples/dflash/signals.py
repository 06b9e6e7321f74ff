"""SIGINT and SIGTERM: the first asks for a stop at the end of a round, the second ends the run at once.

A terminal's Ctrl-C and many job schedulers signal a whole process group. Inductor's pool of compiling processes, which
a thread starts at its first compile, would die of it, and a compile under way wait for ever. A process takes over the
blocked signals of the thread that starts it, so the run's threads block both (``shielded``).
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .pipeline import Pipeline


class Signals:
    """Which signals have come, and what all processes have agreed on.

    Attributes:
        received: numbers of the signals, in their order.
        agreed: the signal that ends the run, of this process or another; 0: none.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.received: list[int] = []
        self.agreed = 0

    @property
    def twice(self) -> bool:
        return len(self.received) > 1

    def stops(self, agree: Callable[[int], int]) -> bool:
        """Whether the run is to end before the next round. The reader of every process asks before every round.

        Args:
            agree: gives the largest of all processes' numbers.
        """
        number = self.received[0] if self.received else signal.SIGTERM if self._pipeline.stop.is_set() else 0
        agreed = agree(int(number))
        if agreed:  # a second signal may have come meanwhile, which nobody has to agree with
            self.agreed = agreed
        return agreed != 0


@contextmanager
def shielded() -> Iterator[None]:
    """A block in which this thread and the processes that it starts take neither signal; the main thread still does."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def listen(pipeline: Pipeline) -> Iterator[Signals]:
    """Listen to both signals within a block. Only the main thread can; from another one none are heard.

    A handler runs between any two instructions of the main thread, which may hold a lock then. So it only notes the
    signal in a queue that is made for that, and a thread does what follows.
    """
    signals = Signals(pipeline)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def handle(number: int, frame: object) -> None:
        signals.received.append(number)
        came.put(number)

    def answer() -> None:
        while came.get():
            if signals.twice:
                signals.agreed = signals.received[0]
                pipeline.abort()
            else:
                pipeline.stop.set()
                with suppress(OSError):  # the signal may have ended whoever read that
                    os.write(2, b"\nstopping at the end of the round; once more stops at once\n")

    answering = threading.Thread(target=answer, name="signals", daemon=True)
    answering.start()
    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        came.put(0)
        answering.join()
