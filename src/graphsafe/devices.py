"""The CUDA devices of this machine, as torch sees them, with how they are linked.

Guarantees:
- Where torch sees no device, CUDA is not initialised. Where it does, nothing is allocated beyond torch's own context.
- ``nvidia-smi`` is asked where it is installed, with a deadline; without it the report says less.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 30.0  # for one call of nvidia-smi, which is slow where its daemon does not run
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_PCIE = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPUs of one NUMA node",
    "SYS": "PCIe, between NUMA nodes",
}


@dataclass(frozen=True)
class Device:
    """One CUDA device.

    Attributes:
        index: torch's.
        capability: compute capability, such as ``"9.0"``.
        total_bytes, free_bytes: its memory; None where it could not be asked.
        mig: whether it is a slice of a GPU.
        uuid: NVIDIA's, without prefix; None where this torch does not tell.
    """

    index: int
    name: str
    capability: str
    total_bytes: int
    free_bytes: int | None
    mig: bool
    uuid: str | None


@dataclass(frozen=True)
class Link:
    """How two devices, by torch's indices, are joined.

    Attributes:
        peer_access: whether each can read the other's memory.
        label: ``nvidia-smi topo``'s word, such as ``"NV18"``; None where it is not known.
        kind: the same for people.
    """

    first: int
    second: int
    peer_access: bool
    label: str | None
    kind: str


@dataclass(frozen=True)
class Devices:
    """All devices.

    Attributes:
        driver: version of NVIDIA's driver, None where none is found.
        links: one for each pair.
        notes: what restricts or hides devices.
        attention: what is wrong with them.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    driver: str | None
    notes: tuple[str, ...]
    attention: tuple[str, ...]


def look() -> Devices:
    """Ask torch and, where it is installed, ``nvidia-smi``."""
    listed = _listed_gpus(_nvidia_smi("--query-gpu=index,uuid,driver_version", "--format=csv,noheader"))
    driver = next((driver for _, driver in listed.values()), None) or _driver_of_the_kernel()
    notes, attention = [], []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        notes.append(f"CUDA_VISIBLE_DEVICES={visible!r} chooses and renumbers the devices of this process")
    devices: list[Device] = []
    links: tuple[Link, ...] = ()
    if torch.cuda.is_available():
        try:
            devices = [_device(index) for index in range(torch.cuda.device_count())]
            topology = parse_topology(_nvidia_smi("topo", "-m")) if len(devices) > 1 else {}
            links = _links(devices, {uuid: index for uuid, (index, _) in listed.items()}, topology)
        except RuntimeError as error:
            attention.append(f"torch cannot use the CUDA devices: {str(error).splitlines()[0]}")
    elif listed and visible is None:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA does not start"
        attention.append(f"nvidia-smi lists {len(listed)} GPU(s) and torch sees none: {why}")
    for device in devices:
        if device.mig:
            notes.append(f"cuda:{device.index} is a MIG slice: a process sees one, and slices have no peer access")
        if device.free_bytes is None:
            attention.append(f"cuda:{device.index} does not tell its free memory; another process may hold it alone")
    return Devices(tuple(devices), links, driver, tuple(notes), tuple(attention))


def parse_topology(text: str) -> Mapping[tuple[int, int], str]:
    """The label of each ordered pair of GPUs in what ``nvidia-smi topo -m`` prints; empty where it is none."""
    header: list[str] = []
    labels: dict[tuple[int, int], str] = {}
    for line in _ANSI.sub("", text).splitlines():
        cells = line.split()
        if not header and re.match(r"\s*GPU0\b", line) and line[:1].isspace():
            header = cells
        elif header and cells and (row := re.fullmatch(r"GPU(\d+)", cells[0])):
            for column, label in zip(header, cells[1:], strict=False):  # after them come affinities, of several words
                if (other := re.fullmatch(r"GPU(\d+)", column)) is None:
                    break
                if other[1] != row[1]:
                    labels[int(row[1]), int(other[1])] = label
    return labels


def kind_of_link(label: str | None) -> str:
    """What a label of ``nvidia-smi topo`` means."""
    if label is None:
        return "unknown"
    if bonded := re.fullmatch(r"NV(\d+)", label):
        return f"NVLink, {bonded[1]} links"
    return _PCIE.get(label, "unknown")


def _device(index: int) -> Device:
    properties: Any = torch.cuda.get_device_properties(index)
    try:
        free_bytes: int | None = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:
        free_bytes = None
    uuid = getattr(properties, "uuid", None)
    return Device(
        index=index,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        total_bytes=properties.total_memory,
        free_bytes=free_bytes,
        mig=" MIG " in f" {properties.name} ",
        uuid=str(uuid).removeprefix("GPU-") if uuid is not None else None,
    )


def _links(
    devices: list[Device], listed: Mapping[str, int], topology: Mapping[tuple[int, int], str]
) -> tuple[Link, ...]:
    """A link for each pair. Torch and nvidia-smi count devices differently, so they are matched by UUID."""
    found = []
    for position, first in enumerate(devices):
        for second in devices[position + 1 :]:
            one, other = first.index, second.index
            peers = torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
            pair = (listed.get(first.uuid or "", -1), listed.get(second.uuid or "", -1))
            label = topology.get(pair)
            found.append(Link(one, other, peers, label, kind_of_link(label)))
    return tuple(found)


def _listed_gpus(text: str) -> dict[str, tuple[int, str]]:
    """UUID -> (nvidia-smi's index, version of the driver)."""
    gpus = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            gpus[cells[1].removeprefix("GPU-")] = (int(cells[0]), cells[2])
    return gpus


def _driver_of_the_kernel() -> str | None:
    try:
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return version[0] if version else None


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is missing, fails or takes too long."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
