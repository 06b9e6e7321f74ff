"""``smoke``: a drafter's step at full shape with random weights and features: does it fit, how fast is it, is it flat?

No target is loaded and no data is read: what is tried is the drafter's step, which needs the most memory. Slots of a
ring are filled beforehand and trained on in turn, as in the pipeline, so the host makes nothing while steps are timed.

Guarantees:
- A step's time is the device's, from the step's first work to its last; on the CPU the host's.
- Useful operations are those of ``cost``, and the estimate of memory is that of ``plan``, for what is here.
- What was found is in OUT/smoke.json too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import graphsafe

from . import cost
from .batches import batch_specs
from .config import Config, InputError
from .drafter import Drafter, DrafterConfig
from .pipeline import MAX_AHEAD, Topology
from .plan import GIB, Need, describe_needs, drafter_config, drafter_needs, read_shape, topology
from .profiling import NUM_PROFILED_STEPS, profile_steps
from .replicas import Replica
from .step import COMPUTE_DTYPES, NUM_WARMUP_STEPS, DrafterStep, target_specs
from .tables import Table, show

DOCUMENT_TOKENS = 512
GROWTH = 0.01  # of the peak: as much is no leak
TERA = 1e12


def random_batch(config: Config, vocab_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A full row of documents of random tokens, anchors spread evenly over it."""
    tokens = config.token_budget
    places = torch.arange(tokens)
    return {
        "tokens": torch.randint(0, vocab_size, (tokens,), generator=generator),
        "document_ids": places // DOCUMENT_TOKENS,
        "positions": places % DOCUMENT_TOKENS,
        "loss_mask": torch.ones(tokens, dtype=torch.bool),
        "anchors": torch.linspace(1, tokens - 2, config.num_anchors).long(),
        "anchor_valid": torch.ones(config.num_anchors, dtype=torch.bool),
    }


def mean_document(tokens: int) -> float:
    """Length of the document that a token of ``random_batch`` is in, on average over tokens."""
    whole, rest = divmod(tokens, DOCUMENT_TOKENS)
    return (whole * DOCUMENT_TOKENS**2 + rest**2) / tokens


@dataclass
class Found:
    """What was measured.

    Attributes:
        warm_memory, memory: bytes at most in use after each step of the warm-up, and after each timed one.
        losses: of all steps; step_ms: of the timed ones.
        device_used_bytes: of a CUDA device, by all that runs on it, after the timed steps.
        kernels: of the profile, where one was made.
    """

    warm_memory: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    device_used_bytes: int | None = None
    kernels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        return max(self.memory) <= max(self.warm_memory) * (1 + GROWTH)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


def smoke(config: Config) -> int:
    """The command. Returns its exit code: 1 where memory still grows after the warm-up, or a loss is not finite."""
    devices = topology(config)
    shape, _ = read_shape(config)
    drafter, device = drafter_config(config, shape), devices.drafters[0]
    needs = smoke_needs(config, drafter, device)
    try:
        with graphsafe.thread_context(device, seed=config.seed, name="smoke") as context:
            found = _measure(config, drafter, device, context.synchronize)
    except torch.OutOfMemoryError as exc:
        raise InputError(f"Out of memory: {str(exc).splitlines()[0]}\n{describe_needs(device, needs)}") from exc
    record = describe(config, drafter, device, found, needs)
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "smoke.json").write_text(json.dumps(record, indent=2) + "\n")
    show([_speed_table(record), _memory_table(record)])
    warm, end = max(found.warm_memory), max(found.memory)
    print(
        f"peak after warm-up {warm / GIB:.3f} GiB, at the end {end / GIB:.3f} GiB: "
        f"{'flat' if found.is_flat else 'GROWS'}"
    )
    if not found.is_finite:
        print("a loss is not finite")
    return 0 if found.is_finite and found.is_flat else 1


def smoke_needs(config: Config, drafter: DrafterConfig, device: torch.device) -> list[Need]:
    """The plan's estimate of what this command holds: one drafter fed by one target, which is not here itself."""
    elsewhere = torch.device("meta")
    return drafter_needs(config, drafter, Topology((elsewhere,), (device,)), 0, tied=True)


def make_slots(
    config: Config, drafter: DrafterConfig, device: torch.device, generator: torch.Generator
) -> list[graphsafe.StaticBuffers]:
    """The slots of a drafter's ring, each with a batch of its own."""
    specs = {**batch_specs(config), **target_specs(config, drafter)}
    width = specs["features"].shape[1]
    slots = []
    for _ in range(config.ring_depth):
        batch = random_batch(config, drafter.vocab_size, generator)
        features = torch.randn(config.token_budget, width, generator=generator).to(COMPUTE_DTYPES[config.dtype])
        if config.labels == "target":
            batch["target_tokens"] = batch["tokens"].roll(-1)
        slot = graphsafe.StaticBuffers(specs, device)
        slot.load({**batch, "features": features})
        slots.append(slot)
    return slots


def _measure(config: Config, drafter: DrafterConfig, device: torch.device, wait: Callable[[], object]) -> Found:
    generator, dtype = torch.Generator().manual_seed(config.seed), COMPUTE_DTYPES[config.dtype]
    head = (0.02 * torch.randn(drafter.vocab_size, drafter.hidden_size, generator=generator)).to(device, dtype)
    model = Drafter(drafter, seed=config.seed, gradient_checkpointing=config.gradient_checkpointing).to(device)
    slots = make_slots(config, drafter, device, generator)
    num_warm = NUM_WARMUP_STEPS + len(slots) + 1  # each slot is captured, and the first graph replayed
    num_steps = num_warm + config.smoke_steps + (NUM_PROFILED_STEPS if config.profile is not None else 0)
    step = DrafterStep(model, head, head, config, num_steps, Replica(0, 1, device, None))
    found = Found()
    try:
        for index in range(num_warm):
            began = time.perf_counter()
            found.losses.append(_loss(step(slots[index % len(slots)])))
            found.warm_memory.append(_memory_in_use(device))
            _say(index, found.losses[-1], (time.perf_counter() - began) * 1e3, found.warm_memory[-1])
        wait()
        measured = _timed_steps(step, slots, config.smoke_steps, device, found)
        wait()
        found.losses += map(_loss, measured)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            found.device_used_bytes = total - free
        for index in range(config.smoke_steps):
            place = num_warm + index
            _say(place, found.losses[place], found.step_ms[index], found.memory[index])
        if config.profile is not None:
            profile = profile_steps(lambda index: step(slots[index % len(slots)]), wait, device, config.profile)
            show(profile.tables())
            if not profile.kernels:
                print("The profiler saw no work of the device: CUPTI may be missing or not permitted here.")
            print(f"the trace of {profile.num_steps} steps is {config.profile}\n")
            found.kernels = profile.record()
    finally:
        step.close()
    return found


def _timed_steps(
    step: DrafterStep, slots: Sequence[Mapping[str, Tensor]], num_steps: int, device: torch.device, found: Found
) -> list[Tensor]:
    """Run and time steps at the pipeline's pace. Returns what they measured."""
    measured, marks = [], []
    for index in range(num_steps):
        slot = slots[index % len(slots)]
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            measured.append(step(slot))
            end.record()
            marks.append((begin, end))
            if index >= MAX_AHEAD:
                marks[index - MAX_AHEAD][1].synchronize()
        else:
            began = time.perf_counter()
            measured.append(step(slot))
            found.step_ms.append((time.perf_counter() - began) * 1e3)
        found.memory.append(_memory_in_use(device))
    if marks:
        marks[-1][1].synchronize()
        found.step_ms += [begin.elapsed_time(end) for begin, end in marks]
    return measured


def _loss(measured: Tensor) -> float:
    total, weight = measured[:2].tolist()
    return float(total / weight)


def _say(index: int, loss: float, step_ms: float, memory: int) -> None:
    print(f"step {index + 1:2}  loss {loss:7.4f}  {step_ms:8.1f} ms  {memory / GIB:.3f} GiB")


def describe(
    config: Config, drafter: DrafterConfig, device: torch.device, found: Found, needs: Sequence[Need]
) -> dict[str, Any]:
    """What smoke.json holds, as JSON values. Of an unknown device, or another dtype than bfloat16, there is no peak."""
    flops = cost.drafter_flops(config, drafter, mean_document(config.token_budget))
    ordered = sorted(found.step_ms)
    median_s = statistics.median(ordered) / 1e3
    name, peak = "cpu", None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = cost.peak_flops(name) if config.dtype == "bfloat16" else None
    tflop_per_s = flops.useful / TERA / median_s
    planned = sum(need.num_bytes for need in needs)
    memory: dict[str, Any] = {"planned_bytes": planned, "peak_bytes": max(*found.memory, *found.warm_memory)}
    memory["planned_over_peak"] = planned / memory["peak_bytes"]
    if device.type == "cuda":
        memory["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        memory["planned_over_reserved"] = planned / memory["peak_reserved_bytes"]
        memory["device_used_bytes"] = found.device_used_bytes
    memory["needs"] = {need.what: need.num_bytes for need in needs}
    return {
        "device": name,
        "torch": torch.__version__,
        "preset": config.preset,
        "step": config.step,
        "dtype": config.dtype,
        "token_budget": config.token_budget,
        "num_anchors": config.num_anchors,
        "block_size": config.block_size,
        "loss_chunk": config.loss_chunk,
        "step_ms": found.step_ms,
        "median_ms": median_s * 1e3,
        "p10_ms": _quantile(ordered, 0.1),
        "p90_ms": _quantile(ordered, 0.9),
        "tokens_per_s": config.token_budget / median_s,
        "useful_tflop": flops.useful / TERA,
        "useful_tflop_by_part": {part: value / TERA for part, value in flops.parts.items()},
        "recomputed_tflop": flops.recomputed / TERA,
        "tflop_per_s": tflop_per_s,
        "peak_tflop_per_s": None if peak is None else peak / TERA,
        "share_of_peak": None if peak is None else tflop_per_s * TERA / peak,
        "memory": memory,
        "flat": found.is_flat,
        "finite": found.is_finite,
        "losses": [loss if math.isfinite(loss) else None for loss in found.losses],
        **found.kernels,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """By the nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _speed_table(record: Mapping[str, Any]) -> Table:
    share = record["share_of_peak"]
    of_peak = "its peak is unknown" if share is None else f"{share:.1%} of {record['peak_tflop_per_s']:.0f}"
    spread = f"p10 {record['p10_ms']:.2f}, p90 {record['p90_ms']:.2f}, of {len(record['step_ms'])} steps"
    return Table(
        f"a drafter's steps on {record['device']}",
        [
            ("time", f"{record['median_ms']:.2f} ms ({spread})"),
            ("useful work", f"{record['useful_tflop']:.3g} TFLOP"),
            ("achieved", f"{record['tflop_per_s']:.3g} TFLOP/s, {of_peak}"),
            ("speed", f"{record['tokens_per_s']:,.0f} tokens/s"),
        ],
    )


def _memory_table(record: Mapping[str, Any]) -> Table:
    memory = record["memory"]
    rows = [
        ("planned", f"{memory['planned_bytes'] / GIB:.3f} GiB, without a target and CUDA's own"),
        ("peak in use", f"{memory['peak_bytes'] / GIB:.3f} GiB: planned is {memory['planned_over_peak']:.2f} of it"),
    ]
    if "peak_reserved_bytes" in memory:
        reserved, ratio = memory["peak_reserved_bytes"] / GIB, memory["planned_over_reserved"]
        rows.append(("peak reserved", f"{reserved:.3f} GiB: planned is {ratio:.2f} of it"))
        rows.append(("device in use", f"{memory['device_used_bytes'] / GIB:.3f} GiB, with CUDA's context"))
    return Table("memory", rows)


def _memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on a CUDA device so far; on the CPU, bytes of the tensors alive now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            with contextlib.suppress(NotImplementedError):  # a wrapper of vmap's has no memory of its own
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
