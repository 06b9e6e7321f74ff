"""Where the device's time of some steps goes: a trace of them, and their kernels by what they are for.

Guarantees:
- Each kernel counts once; a step's kernels and its idle time add up to the time from its first to its last kernel.
- What a name does not tell is "other", with its name in the record: nothing is guessed.

The names are those of Inductor (``triton_poi``: pointwise; ``triton_red``, ``triton_per``: reductions; ``triton_tem``:
templates, named after operations), of cuBLAS and CUTLASS, and of torch's own kernels; on the CPU those of operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .tables import Table

NUM_PROFILED_STEPS = 3
NUM_SHOWN = 12  # single kernels, the longest first
_NAME_LENGTH = 72

# The first that matches counts. A loss chunk's matrix products look like all others, and count among them.
_KINDS: tuple[tuple[str, str], ...] = (
    (
        "attention backward",
        r"(flex_attention|flash|fmha|attention|sdpa).*(backward|bwd|dgrad)|(bwd|backward).*(flash|fmha)",
    ),
    ("attention forward", r"flex_attention|flash|fmha|sdpa|scaled_dot_product"),
    (
        "matrix products",
        r"gemm|nvjet|cutlass|cublas|wgmma|xmma|splitk|triton_tem|aten::(add|ba)?mm\b|aten::(add|ba)mm\b",
    ),
    ("loss chunk", r"log_?softmax|softmax|nll|cross_entropy|logsumexp|argmax|aten::(exp|amax|gather|max)\b"),
    ("optimizer and clipping", r"multi_tensor|adam|foreach|lpnorm|vector_norm|clip"),
    ("copies", r"memcpy|memset|aten::(copy_|cat|clone|fill_|zero_)\b|direct_copy|catarray|fill_?functor"),
    ("collectives", r"nccl|allreduce"),
    ("elementwise and reductions", r"triton_(poi|red|per)|elementwise|reduce_kernel|index|scan|sort|embedding|aten::"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel's runs in the profiled steps: its name, their number, and their time together."""

    name: str
    count: int
    ms: float

    @property
    def kind(self) -> str:
        """What it is for, told by its name."""
        name = self.name.lower()
        return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


@dataclass(frozen=True)
class Profile:
    """Kernels of some steps.

    Attributes:
        kernels: the longest first; num_steps: in how many steps.
        span_ms: from the first kernel's start to the last one's end.
    """

    kernels: tuple[Kernel, ...]
    num_steps: int
    span_ms: float

    @property
    def by_kind(self) -> dict[str, dict[str, float]]:
        """Milliseconds a step, share of the span, and launches a step of each kind; ``idle`` is what is left."""
        found: dict[str, dict[str, float]] = {}
        for kernel in self.kernels:
            entry = found.setdefault(kernel.kind, {"ms": 0.0, "launches": 0.0})
            entry["ms"] += kernel.ms / self.num_steps
            entry["launches"] += kernel.count / self.num_steps
        idle = (self.span_ms - sum(kernel.ms for kernel in self.kernels)) / self.num_steps
        found["idle"] = {"ms": max(0.0, idle), "launches": 0.0}
        for entry in found.values():
            entry["share"] = entry["ms"] * self.num_steps / self.span_ms if self.span_ms else 0.0
        return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))

    def tables(self) -> list[Table]:
        """For people: kinds, then single kernels."""
        kinds = [
            (kind, f"{entry['ms']:.2f} ms", f"{entry['share']:.1%}", f"{entry['launches']:.0f}")
            for kind, entry in self.by_kind.items()
        ]
        kernels = [
            (f"{k.ms / self.num_steps:.2f} ms", f"{k.ms / self.span_ms:.1%}", k.kind, k.name[:_NAME_LENGTH])
            for k in self.kernels[:NUM_SHOWN]
        ]
        note = "The loss chunk's matrix products are among the matrix products."
        return [
            Table("a step's kernels, by kind", kinds, ("", "a step", "share", "launches"), note),
            Table("the longest kernels", kernels, ("a step", "share", "kind", "name")),
        ]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        longest = [
            {"name": k.name, "kind": k.kind, "ms": k.ms / self.num_steps, "launches": k.count / self.num_steps}
            for k in self.kernels[: 4 * NUM_SHOWN]
        ]
        return {"kernels": self.by_kind, "longest_kernels": longest, "span_ms": self.span_ms / self.num_steps}


def profile_steps(
    run: Callable[[int], object], wait: Callable[[], object], device: torch.device, path: Path
) -> Profile:
    """Run a few steps under torch's profiler, and write their Chrome trace.

    Args:
        run: one step, given its number; wait: until the device is done.
        path: of the trace.
    Raises:
        OSError: the trace cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()  # before the work: the profiler itself says nothing of a file that it could not write
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    wait()
    with torch.profiler.profile(activities=kinds) as profiler:
        for number in range(NUM_PROFILED_STEPS):
            run(number)
        wait()
    profiler.export_chrome_trace(str(path))
    return read_events(profiler.events() or [], device, NUM_PROFILED_STEPS)


def read_events(events: Iterable[Any], device: torch.device, num_steps: int) -> Profile:
    """The profile that torch's events make: kernels of a CUDA device, or operations of the CPU less their callees."""
    on_cuda = device.type == "cuda"
    sums: dict[str, tuple[int, float]] = {}
    first, last = float("inf"), 0.0
    for event in events:
        is_kernel = event.device_type.name != "CPU"
        if is_kernel != on_cuda or getattr(event, "is_user_annotation", False):
            continue
        spent = event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
        count, us = sums.get(event.name, (0, 0.0))
        sums[event.name] = count + 1, us + spent
        first, last = min(first, event.time_range.start), max(last, event.time_range.end)
    kernels = (Kernel(name, count, us / 1e3) for name, (count, us) in sums.items())
    span_ms = max(0.0, last - first) / 1e3 if sums else 0.0
    return Profile(tuple(sorted(kernels, key=lambda kernel: -kernel.ms)), num_steps, span_ms)
