"""Whether the devices that a command names are here."""

from __future__ import annotations

from collections.abc import Sequence

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
