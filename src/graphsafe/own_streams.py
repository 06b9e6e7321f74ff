"""CUDA streams that nobody else is given.

``torch.cuda.Stream()`` hands out 32 streams of a device in turn. The 33rd is the first one again, and whoever works on
it during a capture would break the capture or be recorded into it. So contexts have streams that torch does not know.

Guarantees:
- A stream is taken by one user at a time, and serves the next one once it is given back: as many are made as were ever
  in use at once. They do not wait for the legacy default stream, as torch's own do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import Any

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _Streams:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; taken alone
        self._free: dict[int, list[torch.cuda.Stream]] = {}
        self._taken: set[int] = set()  # handles

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of the CUDA device, which has its index."""
        with self._lock:
            free = self._free.setdefault(device.index, [])
            stream = free.pop() if free else None
        if stream is None:
            stream = self._made(device)
        with self._lock:
            self._taken.add(stream.cuda_stream)
        return stream

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Its work may still run: the next user's follows it."""
        with self._lock:
            self._taken.discard(stream.cuda_stream)
            self._free.setdefault(stream.device.index, []).append(stream)

    def _made(self, device: torch.device) -> torch.cuda.Stream:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # so that the device's context is this thread's
            handle = ctypes.c_void_p()
            with contextlib.suppress(OSError, AttributeError):
                if _driver().cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == 0 and handle.value:
                    return torch.cuda.ExternalStream(handle.value, device=device)
            # A driver that cannot be reached: one of torch's, which no other context has.
            candidates = [torch.cuda.Stream(device) for _ in range(64)]
        with self._lock:
            return next((one for one in candidates if one.cuda_stream not in self._taken), candidates[0])


def _driver() -> Any:
    return ctypes.CDLL(_DRIVER)


_streams = _Streams()
take, give_back = _streams.take, _streams.give_back
