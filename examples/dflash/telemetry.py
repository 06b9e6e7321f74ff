"""Where a run's time and memory go: each thread's busy share, and what rings, graphs, compiles and allocators did.

Guarantees:
- Nothing waits for a device: CUDA events are read once they are complete, and counters are the host's.
- A reading is plain numbers in nested dicts, so it can be written as JSON and sent from process to process.
- A thread's shares are of the time since the reading before, and add up to 1.

What is measured where:
- ``busy`` is the host's: all of a thread's time but its waits at rings and at the device's gate. A wait counts when it
  ends, so one that lasts over a reading belongs to the next.
- ``device_busy`` is the device's, from a timed block's first work to its last (``DeviceTimer``).
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import torch

import graphsafe

from .config import Config
from .pipeline import Rings, Topology

PACKAGES = ("accelerate", "numpy", "safetensors", "transformers", "triton")  # whose versions a run notes
WAITS = ("input", "room", "gate")  # for something to work on, for a free slot to put it in, for the device

T = TypeVar("T")


class DeviceTimer:
    """Seconds that a device spends on a thread's blocks: ``with timer: ...``, one after the other.

    On CUDA they go from when the device reaches a block until it is done with it, so what it waits for in between, as
    for launches of eager code or for other replicas, counts as well. On the CPU they are the host's.

    Args:
        device: that the blocks work on, on the thread's current stream there.

    Thread safety: blocks are one thread's; ``busy_s`` any thread's.
    Sync: none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._busy_s = 0.0
        self._lock = threading.Lock()  # guards the sum above and the events below; taken alone
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._block: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._began_s = 0.0

    def __enter__(self) -> None:
        if self.device.type != "cuda":
            self._began_s = time.perf_counter()
            return
        with self._lock:
            self._collect()
            block = self._spare.pop() if self._spare else (_timing_event(), _timing_event())
        block[0].record(torch.cuda.current_stream(self.device))
        self._block = block

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.device.type != "cuda":
            with self._lock:
                self._busy_s += time.perf_counter() - self._began_s
            return
        block, self._block = self._block, None
        if block is not None and error is None:  # after an error the stream may be of no use
            block[1].record(torch.cuda.current_stream(self.device))
            with self._lock:
                self._running.append(block)

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """``function`` as a block of this timer."""

        def timed(*args: Any, **kwargs: Any) -> T:
            with self:
                return function(*args, **kwargs)

        return timed

    @property
    def busy_s(self) -> float:
        """The seconds of all blocks that are done."""
        with self._lock:
            self._collect()
            return self._busy_s

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            start, end = block = self._running.popleft()
            self._busy_s += start.elapsed_time(end) / 1e3
            self._spare.append(block)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Telemetry:
    """The threads of one process's pipeline, and a reading of what they did since the one before.

    Args:
        rings: of the pipeline. Its threads and their contexts are named reader, target-N and drafter-N.

    Thread safety: ``read`` by one thread at a time, ``timer`` by any.
    """

    def __init__(self, rings: Rings) -> None:
        self._rings, topology = rings, rings.topology
        self._timers = {f"target-{number}": DeviceTimer(device) for number, device in enumerate(topology.targets)}
        self._timers |= {f"drafter-{number}": DeviceTimer(device) for number, device in enumerate(topology.drafters)}
        self._devices = sorted({*topology.targets, *topology.drafters}, key=str)
        self._first_drafter = topology.drafters[0]
        self.threads = ("reader", *self._timers)
        self._start_counts, self._start_compiles = _context_counts(self.threads), _num_compiles()
        self._compiles_warm: int | None = None
        self._read_s = time.monotonic()
        self._seconds = self._thread_seconds(self._start_counts)

    def timer(self, thread: str) -> DeviceTimer:
        """The timer of a target's or a drafter's device, such as ``target-0``."""
        return self._timers[thread]

    def warmed_up(self) -> None:
        """From now on nothing should be compiled; what is counts as a recompile."""
        self._compiles_warm = _num_compiles()

    def read(self) -> dict[str, Any]:
        """What happened since the last reading (shares), since the start (counts, seconds), and memory now.

        Returns:
            threads: by name, ``busy`` and ``wait_input``, ``wait_room``, ``wait_gate``, shares that add up to 1, and
                ``device_busy``; without those that have ended.
            drafter_busy: the mean of the drafters' ``busy``.
            rings: by name, ``num_ready`` of ``depth`` slots, and the seconds that both sides have waited.
            targets_waited_s: seconds that all targets have waited, for batches and for room for features.
            contexts: by thread, graphsafe's counts.
            captures, replays, eager_steps, compiles, recompiles: in all; recompiles are those after the warm-up.
            memory: by device, bytes in use, at most in use, and reserved; ``cpu`` is this process.
            memory_bytes: the most in use on the first drafter's device.
        Sync: none.
        """
        now = time.monotonic()
        counts = _context_counts(self.threads)
        seconds = self._thread_seconds(counts)
        ended = self._ended()
        threads = {
            name: _shares(seconds[name], self._seconds[name], max(now - self._read_s, 1e-9))
            for name in self.threads
            if name not in ended
        }
        self._read_s, self._seconds = now, seconds
        drafters = [shares["busy"] for name, shares in threads.items() if name.startswith("drafter")]
        since = {name: _less(counts[name], self._start_counts[name]) for name in self.threads}
        compiles = _num_compiles()
        memory = read_memory(self._devices)
        most = memory[str(self._first_drafter)]
        return {
            "threads": threads,
            "drafter_busy": sum(drafters) / len(drafters),
            "rings": self._read_rings(),
            "targets_waited_s": self._rings.target_wait_s(),
            "contexts": since,
            **{name: sum(c[name] for c in since.values()) for name in ("captures", "replays", "eager_steps")},
            "compiles": compiles - self._start_compiles,
            "recompiles": 0 if self._compiles_warm is None else compiles - self._compiles_warm,
            "memory": memory,
            "memory_bytes": most["peak_bytes"],
        }

    def _ended(self) -> set[str]:
        """Threads that have closed the rings that they fill."""
        open_rings = {"reader": [ring for ring in self._rings.batches if not ring.stats().closed]}
        for number in range(len(self._rings.batches)):
            rings = [ring for (target, _), ring in self._rings.features.items() if target == number]
            open_rings[f"target-{number}"] = [ring for ring in rings if not ring.stats().closed]
        return {name for name, rings in open_rings.items() if not rings}

    def _read_rings(self) -> dict[str, dict[str, float]]:
        named = {f"batches-{target}": ring for target, ring in enumerate(self._rings.batches)}
        named |= {f"features-{target}-{drafter}": ring for (target, drafter), ring in self._rings.features.items()}
        fields = ("depth", "num_ready", "produce_wait_s", "consume_wait_s")
        return {name: {field: getattr(stats, field) for field in fields} for name, stats in _stats_of(named)}

    def _thread_seconds(self, counts: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Seconds that each thread has waited so far, by what for, and that its device was busy."""
        seconds: dict[str, dict[str, float]] = {name: dict.fromkeys(WAITS, 0.0) for name in self.threads}
        for target, ring in enumerate(self._rings.batches):
            stats = ring.stats()
            seconds["reader"]["room"] += stats.produce_wait_s
            seconds[f"target-{target}"]["input"] += stats.consume_wait_s
        for (target, drafter), ring in self._rings.features.items():
            stats = ring.stats()
            seconds[f"target-{target}"]["room"] += stats.produce_wait_s
            seconds[f"drafter-{drafter}"]["input"] += stats.consume_wait_s
        for name in self.threads:
            seconds[name]["gate"] += counts[name]["wait_s"]
        for name, timer in self._timers.items():
            seconds[name]["device"] = timer.busy_s
        return seconds


def _stats_of(rings: Mapping[str, graphsafe.BufferRing]) -> Iterable[tuple[str, Any]]:
    return ((name, ring.stats()) for name, ring in rings.items())


def _shares(now: Mapping[str, float], before: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Shares of the elapsed time: of each wait, and of the rest. Waits that began earlier may fill it, not more."""
    waits = {kind: max(0.0, now[kind] - before[kind]) for kind in WAITS}
    total = max(elapsed_s, sum(waits.values()))
    shares = {f"wait_{kind}": seconds / total for kind, seconds in waits.items()}
    shares = {"busy": max(0.0, 1 - sum(shares.values())), **shares}
    if "device" in now:
        shares["device_busy"] = min(1.0, (now["device"] - before["device"]) / elapsed_s)
    return shares


_COUNTS = ("captures", "failed_captures", "replays", "eager_steps", "mismatches", "graph_bytes", "wait_s")


def _context_counts(names: Iterable[str]) -> dict[str, Counter[str]]:
    """graphsafe's counts of the contexts of these names so far, those that have ended too."""
    counts: dict[str, Counter[str]] = {name: Counter(dict.fromkeys(_COUNTS, 0)) for name in names}
    for context in graphsafe.stats().contexts:
        if context.name in counts:
            counts[context.name].update({field: getattr(context, field) for field in _COUNTS})
    return counts


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What was counted since; bytes are those in use now."""
    return {name: now[name] if name == "graph_bytes" else now[name] - before[name] for name in _COUNTS}


def _num_compiles() -> int:
    """How often something was compiled in this process since graphsafe's repairs were installed."""
    return sum(graphsafe.stats().compiles.values())


def read_memory(devices: Iterable[torch.device]) -> dict[str, dict[str, int]]:
    """Memory by device, in bytes; ``cpu`` is what the process holds.

    Returns:
        allocated_bytes: in use; peak_bytes: the most so far; reserved_bytes: on CUDA, what the allocator holds.
    Sync: none.
    """
    resident = psutil.Process().memory_info().rss
    memory = {"cpu": {"allocated_bytes": resident, "peak_bytes": max(resident, _peak_resident())}}
    for device in devices:
        if device.type == "cuda":
            memory[str(device)] = {
                "allocated_bytes": torch.cuda.memory_allocated(device),
                "peak_bytes": torch.cuda.max_memory_allocated(device),
                "reserved_bytes": torch.cuda.memory_reserved(device),
            }
    return memory


def _peak_resident() -> int:
    """The most memory that the process has held, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def describe_run(config: Config, devices: Topology) -> dict[str, Any]:
    """The configuration, versions and devices of a run, for its first record."""
    cuda = sorted({device for device in (*devices.targets, *devices.drafters) if device.type == "cuda"}, key=str)
    return {
        "config": {name: _plain(value) for name, value in asdict(config).items()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "graphsafe": _version("graphsafe") or "not installed",
            **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        },
        "devices": {
            "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads an operation",
            **{str(device): torch.cuda.get_device_name(device) for device in cuda},
        },
        "targets": [str(device) for device in devices.targets],
        "drafters": [str(device) for device in devices.drafters],
        "platform": platform.platform(),
    }


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
