"""What a batch costs: floating-point operations of the drafter's step and of the target's pass, and the time they take.

Useful operations are what the mathematics needs: matrix products, two operations a multiply-add; a weight that is
trained counts three times (forward, its gradient, its input's gradient), the frozen head twice; attention over visible
positions alone. What gradient checkpointing and attention's backward compute again is counted apart.

Guarantees:
- Matrix products are those that torch runs, to the last one: a test counts them.
- Times are estimates, from a device's peak and the share of it that is assumed; they say so. Unknown devices have none.

Symbols: T tokens, A blocks of B slots, K features, H hidden, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .config import Config
from .drafter import DrafterConfig
from .pipeline import Topology
from .target import TargetShape

# Shares of the peak that useful operations get. The drafter's: 43.5 % was published for the training of a Qwen3-8B
# drafter on H200s (SpecForge, docs/benchmarks/domino-disaggregated-performance.md), without graphs. The target's is a
# guess: one large forward pass of eager code, whose products are as large as the batch.
DRAFTER_EFFICIENCY = 0.45
TARGET_EFFICIENCY = 0.55
# A layer of the target is eager code, so the host bounds small ones: 216,000 tokens/s in batches of 8,192 through 28
# layers (docs/benchmarks/2026-11-30-smollm2-h200.md).
HOST_S_A_TARGET_LAYER = 1.35e-3
ASSUMED_DOCUMENT = 1024  # tokens of a document, where the data is not read
LINKS = {"NVLink (H100)": 450e9, "PCIe 5.0 x16": 50e9, "PCIe 4.0 x16": 25e9}  # bytes/s in one direction, about

# Dense bfloat16 peaks with float32 accumulation, TFLOP/s, from the makers' data sheets. The first that matches counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300|GB200", 2500),
    (r"B300|B200", 2250),
    (r"B100", 1750),
    (r"(H200|H100) NVL", 835),
    (r"H100 PCIe", 756),
    (r"GH200|H200|H100|H800", 989),
    (r"H20", 148),
    (r"A100|A800", 312),
    (r"A40", 150),
    (r"A30", 165),
    (r"A10", 125),
    (r"L40S", 362),
    (r"L40", 181),
    (r"L4", 121),
    (r"RTX PRO 6000", 504),
    (r"RTX 6000 Ada", 364),
    (r"RTX A6000", 155),
    (r"RTX 5090", 209),
    (r"RTX 4090", 165),
    (r"RTX 3090", 71),
    (r"MI300X|MI325X", 1307),
)
_PART_OF_ONE = re.compile(r"\bMIG\b|laptop|max-q", re.IGNORECASE)  # another peak under the same name
REFERENCE_DEVICES = ("NVIDIA H200", "NVIDIA A100", "NVIDIA B200")  # shown for devices that are not here


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a device by the name that torch has for it; None where unknown."""
    if _PART_OF_ONE.search(device_name):
        return None
    return next((peak * 1e12 for pattern, peak in _PEAKS if re.search(rf"\b({pattern})\b", device_name)), None)


@dataclass(frozen=True)
class Flops:
    """Operations of one batch.

    Attributes:
        parts: useful ones, by what they are for.
        recomputed: those that are done a second time, for gradients.
    """

    parts: Mapping[str, float]
    recomputed: float = 0.0

    @property
    def useful(self) -> float:
        return sum(self.parts.values())


def drafter_flops(config: Config, drafter: DrafterConfig, document_tokens: float) -> Flops:
    """Operations of a drafter's step on one full batch.

    Args:
        document_tokens: length of the document that a token is in, on average over tokens. An anchor is taken to lie
            in its middle.
    """
    tokens, slots = config.token_budget, config.num_anchors * config.block_size
    labels = config.num_anchors * (config.block_size - 1)
    hidden, layers = drafter.hidden_size, drafter.num_layers
    width, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    layer = 2 * hidden * width + 2 * hidden * kv + 3 * hidden * drafter.intermediate_size
    context = 2.0 * tokens * 2 * hidden * kv * layers  # forward
    blocks = 2.0 * slots * layer * layers
    attention = (
        4.0 * slots * width * sum(_visible(config, drafter, kind, document_tokens) for kind in drafter.layer_types)
    )
    parts = {
        "fc": 2 * 2.0 * tokens * len(drafter.target_layer_ids) * hidden * hidden,  # features need no gradient
        "context keys and values": 3 * context,
        "layers over block slots": 3 * blocks,
        "attention": 3 * attention,
        "frozen head": 2 * 2.0 * labels * hidden * drafter.vocab_size,
    }
    again = attention / 2  # attention's backward computes the scores again
    if config.gradient_checkpointing:  # a layer again but for its last product, which nothing needs
        again += context + attention + blocks - 2.0 * slots * hidden * drafter.intermediate_size * layers
    return Flops(parts, again)


def _visible(config: Config, drafter: DrafterConfig, layer_type: str, document_tokens: float) -> float:
    """Keys that a slot sees on average."""
    context = min(document_tokens, config.token_budget) / 2
    if layer_type == "sliding_attention" and drafter.sliding_window is not None:
        return min(context, drafter.sliding_window) + (config.block_size + 1) / 2  # causal within the block
    return context + config.block_size


def target_flops(
    config: Config,
    shape: TargetShape,
    num_layers: int,
    document_tokens: float,
    layer_parameters: float | None = None,
) -> Flops:
    """Operations of a target's pass over one full batch.

    Args:
        num_layers: how many of its layers are run.
        document_tokens: as ``drafter_flops``.
        layer_parameters: that a token meets in a layer's matrices. None: those of a dense layer of that shape.
    """
    tokens = config.token_budget
    width, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if layer_parameters is None:
        layer_parameters = 2 * shape.hidden_size * (width + kv) + 3 * shape.hidden_size * shape.intermediate_size
    parts = {
        "layers": 2.0 * tokens * layer_parameters * num_layers,
        "attention": 4.0 * tokens * width * (min(document_tokens, tokens) + 1) / 2 * num_layers,
    }
    if config.labels == "target":
        parts["head"] = 2.0 * tokens * shape.hidden_size * shape.vocab_size
    return Flops(parts)


def num_target_layers(config: Config, drafter: DrafterConfig) -> int:
    """Layers of the target that a batch runs through: up to the last that is read, or all for the target's labels."""
    return drafter.num_target_layers if config.labels == "target" else max(drafter.target_layer_ids) + 1


@dataclass(frozen=True)
class Speed:
    """How fast a pipeline is if all goes as assumed: its slowest device bounds it.

    Attributes:
        topology: of the pipeline.
        target_s: for each target, seconds of a batch; drafter_s: for each drafter.
    """

    topology: Topology
    target_s: tuple[float, ...]
    drafter_s: tuple[float, ...]

    @property
    def loads_s(self) -> dict[torch.device, float]:
        """Seconds that each device works for one batch of the pipeline: batches go round, and a device may do both."""
        loads: dict[torch.device, float] = {}
        for devices, times in ((self.topology.targets, self.target_s), (self.topology.drafters, self.drafter_s)):
            for device, seconds in zip(devices, times, strict=True):
                loads[device] = loads.get(device, 0.0) + seconds / len(devices)
        return loads

    @property
    def batches_per_s(self) -> float:
        """Batches of the whole pipeline; the busiest device bounds it, since batches go round."""
        return 1 / max(self.loads_s.values())

    @property
    def targets_busy(self) -> float:
        """Share of the time that the busiest target works."""
        return max(self.target_s) / len(self.target_s) * self.batches_per_s

    @property
    def drafters_busy(self) -> float:
        """Share of the time that the busiest drafter works."""
        return max(self.drafter_s) / len(self.drafter_s) * self.batches_per_s

    @property
    def bottleneck(self) -> str:
        """Which side the other waits for: ``targets``, ``drafters``, or ``devices that do both``."""
        slowest = max(self.loads_s, key=self.loads_s.__getitem__)
        is_target, is_drafter = slowest in self.topology.targets, slowest in self.topology.drafters
        return "devices that do both" if is_target and is_drafter else "targets" if is_target else "drafters"

    def best_split(self, num_devices: int) -> tuple[int, int]:
        """Targets and drafters, each on a device of its own, that so many devices are fastest with."""
        target, drafter = max(self.target_s), max(self.drafter_s)
        splits = ((n, num_devices - n) for n in range(1, num_devices))
        return min(splits, key=lambda split: max(target / split[0], drafter / split[1]))

    @property
    def gain_of_two(self) -> float:
        """How much faster two devices, one a side, are at best than one that does both."""
        target, drafter = max(self.target_s), max(self.drafter_s)
        return (target + drafter) / max(target, drafter)


def speed(
    topology: Topology,
    target: Flops,
    drafter: Flops,
    num_target_layers: int,
    peak: Callable[[torch.device], float | None],
) -> Speed | None:
    """The pipeline's speed; None where a device's peak is unknown.

    Args:
        target, drafter: operations of a batch.
        num_target_layers: that a batch runs through.
        peak: operations a second of a device.
    """
    target_peaks, drafter_peaks = [peak(d) for d in topology.targets], [peak(d) for d in topology.drafters]
    if None in target_peaks or None in drafter_peaks:
        return None
    host_s = num_target_layers * HOST_S_A_TARGET_LAYER
    return Speed(
        topology,
        tuple(max(target.useful / (p * TARGET_EFFICIENCY), host_s) for p in target_peaks if p is not None),
        tuple(drafter_step_s(drafter, p) for p in drafter_peaks if p is not None),
    )


def drafter_step_s(drafter: Flops, peak: float) -> float:
    """Seconds of a drafter's step. The assumed share is of a step that recomputes nothing but attention's scores."""
    attention = drafter.parts["attention"] / 6
    return (drafter.useful + drafter.recomputed - attention) / (peak * DRAFTER_EFFICIENCY)
