"""Whether the devices that a command names are here, and the CPU's cores among threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .config import InputError


def check_devices(devices: Sequence[str], option: str) -> None:
    """Raise InputError for a device that this machine lacks."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in map(torch.device, devices):
        if device.type == "cuda" and (device.index or 0) >= count:
            raise InputError(
                f"{option} names {device}, and torch sees {count} CUDA devices here. Name others, such as "
                f"{option} cpu, or take --preset demo."
            )


@contextmanager
def cores_shared_out(num_threads: int) -> Iterator[None]:
    """A block in which each of so many threads that start computes with its share of the cores, one at least."""
    num_cores = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores // num_threads))  # threads that start later take it over
    try:
        yield
    finally:
        torch.set_num_threads(num_cores)
