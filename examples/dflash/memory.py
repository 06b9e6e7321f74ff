"""What a run needs of each device's memory and of the host's.

Guarantees:
- What is large is counted, at its peak; the estimate is meant to say which option to lower, and errs on the high side.
- Nothing is run.

Symbols: T tokens, S block slots, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attention import SDPA_BLOCKS_A_ROW
from .config import Config, InputError
from .drafter import Drafter, DrafterConfig
from .pipeline import Topology
from .step import COMPUTE_DTYPES, is_compiled
from .target import TargetShape

GIB = 2**30
# What no tensor shows: CUDA's context with its loaded kernels (about 0.6 GiB) and the workspaces of the matrix
# libraries on each device; NCCL's buffers where drafters sum their gradients.
DEVICE_OVERHEAD = int(1.0 * GIB)
NCCL_OVERHEAD = int(0.5 * GIB)
POOL_SHARE = 0.1  # of what a step allocates: lost between blocks of the graphs' pool
BATCH_BYTES_A_TOKEN = 3 * 8 + 1  # tokens, document ids and positions; the loss mask
BATCH_BYTES_AN_ANCHOR = 8 + 1


@dataclass(frozen=True)
class Need:
    """One large consumer of a device's memory.

    Attributes:
        what: for people.
        num_bytes: how much.
        lower: what to change to make it smaller; empty where nothing does.
    """

    what: str
    num_bytes: int
    lower: str


def drafter_config(config: Config, shape: TargetShape) -> DrafterConfig:
    """The drafter that the run trains.

    Raises:
        InputError: the target cannot have such a drafter.
    """
    try:
        return DrafterConfig.from_target(
            shape,
            num_layers=config.num_layers,
            block_size=config.block_size,
            num_features=config.num_features,
            intermediate_size=config.intermediate_size,
            mask_token_id=config.mask_token_id,
            sliding_window=config.sliding_window,
            num_full_layers=config.num_full_layers,
        )
    except ValueError as exc:
        raise InputError(str(exc)) from exc


def num_parameters(drafter: DrafterConfig) -> int:
    """The drafter's trained parameters."""
    with torch.device("meta"):
        layer = Drafter(DrafterConfig(**{**vars(drafter), "num_layers": 1}))
    one = sum(parameter.numel() for parameter in layer.parameters())
    each = sum(parameter.numel() for parameter in layer.layers.parameters())
    return one + (drafter.num_layers - 1) * each


def features_a_token(config: Config, drafter: DrafterConfig) -> int:
    """Bytes of a token's features."""
    return len(drafter.target_layer_ids) * drafter.hidden_size * COMPUTE_DTYPES[config.dtype].itemsize


def drafter_needs(
    config: Config, drafter: DrafterConfig, devices: Topology, number: int, *, tied: bool = False
) -> list[Need]:
    """What drafter ``number`` needs on its device.

    Args:
        tied: whether the target's embedding and head are one.
    """
    size, device = COMPUTE_DTYPES[config.dtype].itemsize, devices.drafters[number]
    tokens, slots = config.token_budget, config.num_anchors * config.block_size
    hidden, width = drafter.hidden_size, drafter.intermediate_size
    parameters = num_parameters(drafter)
    rings = sum(1 for _, d in devices.pairs() if d == number) * devices.depth(number, config.ring_depth)
    row = tokens * (features_a_token(config, drafter) + BATCH_BYTES_A_TOKEN)
    copies = 4 + (1 if len(devices.drafters) > 1 else 0)  # weights, gradients, two moments; the sum over replicas
    layer = _layer_activations(config, drafter, device)
    kept = 1 if config.gradient_checkpointing else drafter.num_layers
    layer_inputs = drafter.num_layers * slots * hidden if config.gradient_checkpointing else 0
    # The context before and after its norm, its gradient and the norm's float32 values; the layers' output likewise.
    around = (4 * tokens + 3 * slots) * hidden
    # A layer's backward: gradients of its widest activations, of queries and of the keys and values of the context.
    backward = slots * (2 * hidden + 2 * width) + 2 * (tokens + slots) * 2 * drafter.num_kv_heads * drafter.head_dim
    loss = 3 * config.num_anchors * (config.block_size - 1) * hidden  # hidden states, their padded copy, their gradient
    activations = (kept * layer + layer_inputs + around + backward + loss) * size
    # In compute dtype: logits, and their gradient. Eager code holds them in float32 beside, twice for a moment.
    logits = min(config.loss_chunk, slots) * drafter.vocab_size * (2 * size + (4 if is_compiled(config, device) else 8))
    needs = [
        Need("weights, gradients, optimizer", parameters * (4 * copies + size), "--num-layers, --intermediate-size"),
        Need(f"features in {rings} slots", rings * row, "--token-budget, --ring-depth"),
        Need("activations", activations, "--num-anchors, --token-budget, or use --gradient-checkpointing"),
        Need("a chunk's logits", logits, "--loss-chunk"),
    ]
    if device not in devices.targets:  # else the target's own serve
        head = (1 if tied else 2) * drafter.vocab_size * hidden * size
        needs.append(Need("embedding and head", head, "--dtype bfloat16"))
    if device.type == "cuda":
        if config.step == "graph":
            needs.append(Need("lost in the graphs' pool", int(POOL_SHARE * (activations + logits)), "--step compile"))
        if len(devices.drafters) > 1:
            needs.append(Need("NCCL", NCCL_OVERHEAD, ""))
    return needs


def _layer_activations(config: Config, drafter: DrafterConfig, device: torch.device) -> int:
    """Numbers that a layer keeps for backward."""
    tokens, slots = config.token_budget, config.num_anchors * config.block_size
    heads, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    # A slot: the residual before and after attention, both norms' outputs; queries before and after norm and rotation,
    # attention's output; gate, up, and their product.
    slot = 4 * drafter.hidden_size + 4 * heads + 3 * drafter.intermediate_size
    # Keys and values of context and slots: projected, normed, rotated, and side by side. sdpa repeats the context for
    # each row of blocks and keys for each head.
    flex = config.attention != "sdpa" and device.type == "cuda"
    repeats = 1 if flex else -(-config.num_anchors // SDPA_BLOCKS_A_ROW)
    joined = (repeats * tokens + slots) * (kv if flex else heads) * 2
    return slots * slot + (tokens + slots) * 3 * kv + joined


def target_needs(config: Config, shape: TargetShape, parameters: int) -> list[Need]:
    """What a target needs on its device: its weights, then what each thread of it adds."""
    size = COMPUTE_DTYPES[config.dtype].itemsize
    width = shape.num_heads * shape.head_dim
    # Nothing is kept: at most the feed-forward's gate, up and product, or queries while they are normed and rotated,
    # beside the residual, its norm and that one's float32 values.
    row = max(3 * shape.intermediate_size, 6 * width) + 6 * shape.hidden_size
    features = config.token_budget * config.num_features * shape.hidden_size * size
    needs = [
        Need("the target's weights", parameters * size, "--dtype bfloat16"),
        Need("its activations", config.token_budget * row * size, "--token-budget"),
        Need("its features, of two batches", 2 * features, "--token-budget"),
    ]
    if config.labels == "target":
        chunk = min(config.loss_chunk, config.token_budget)
        needs.append(Need("its logits", chunk * shape.vocab_size * (4 + size), "--loss-chunk"))
    return needs


def estimate(config: Config, shape: TargetShape, parameters: int, devices: Topology) -> dict[torch.device, list[Need]]:
    """What each device must hold."""
    needs: dict[torch.device, list[Need]] = {}
    drafter = drafter_config(config, shape)
    for device, count in Counter(devices.targets).items():
        weights, *others = target_needs(config, shape, parameters)  # targets on a device share the weights
        needs.setdefault(device, []).extend([weights, *(others * count)])
    for number, device in enumerate(devices.drafters):
        needs.setdefault(device, []).extend(drafter_needs(config, drafter, devices, number, tied=shape.tied))
    for device, of_device in needs.items():
        if device.type == "cuda":
            of_device.append(Need("CUDA's context and libraries", DEVICE_OVERHEAD, ""))
    return needs


def host_needs(config: Config, devices: Topology) -> list[Need]:
    """What the host must hold, the data and Python itself aside."""
    batch = config.token_budget * BATCH_BYTES_A_TOKEN + config.num_anchors * BATCH_BYTES_AN_ANCHOR
    rings = config.ring_depth * len(devices.targets)
    needs = [Need(f"batches in {rings} pinned slots", rings * batch, "--ring-depth")]
    if config.cache_features > 0:
        cache = int(config.cache_features * GIB) * len(devices.targets)
        needs.append(Need(f"features in memory, {len(devices.targets)} threads' caches", cache, "--cache-features"))
    return needs


def describe_needs(device: torch.device, needs: Sequence[Need]) -> str:
    """A device's needs as text, the largest first, with a line more where they exceed what the device has."""
    total, have = sum(need.num_bytes for need in needs), device_bytes(device)
    of = "" if have is None else f" of {have / GIB:.1f}"
    lines = [f"{device}: about {total / GIB:.2f}{of} GiB"]
    for need in sorted(needs, key=lambda need: -need.num_bytes):
        lower = f" (lower: {need.lower})" if need.lower else ""
        lines.append(f"  {need.num_bytes / GIB:8.2f} GiB  {need.what}{lower}")
    if have is not None and total > have:
        lines.append(f"  DOES NOT FIT: {(total - have) / GIB:.1f} GiB more than {device} has")
    return "\n".join(lines)


def device_bytes(device: torch.device) -> int | None:
    """The memory of a CUDA device that is here; None for others."""
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return torch.cuda.mem_get_info(device)[1]
    return None
