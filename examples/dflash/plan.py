"""``plan``: the run's topology, its shapes, and what it needs of each device's memory. Nothing is run.

The estimate counts what is large; it is meant to say which option to lower, and errs on the high side by about a fifth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attention import SDPA_BLOCKS_A_ROW
from .config import Config, InputError
from .devices import check_devices
from .drafter import Drafter, DrafterConfig
from .fetch import resolve_target
from .pipeline import Topology
from .replicas import check_replica_devices
from .step import COMPUTE_DTYPES, is_compiled, mask_maker
from .target import TargetShape

GIB = 2**30


@dataclass(frozen=True)
class Need:
    """One large consumer of a device's memory.

    Attributes:
        what: for people.
        num_bytes: how much.
        lower: what to change to make it smaller.
    """

    what: str
    num_bytes: int
    lower: str


def topology(config: Config, *, must_exist: bool = True) -> Topology:
    """The devices of the run.

    Args:
        must_exist: whether they must be here; a plan may be for another machine.

    Raises:
        InputError: a device is not there, or cannot serve so many drafters.
    """
    devices = Topology(
        _devices(config.targets, "--targets", must_exist), _devices(config.drafters, "--drafters", must_exist)
    )
    check_replica_devices(devices.drafters)
    for device in devices.drafters:
        mask_maker(config, device)
    return devices


def _devices(names: Sequence[str], option: str, must_exist: bool) -> tuple[torch.device, ...]:
    if must_exist:
        check_devices(names, option)
    devices = map(torch.device, names)
    return tuple(torch.device("cuda", device.index or 0) if device.type == "cuda" else device for device in devices)


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


def read_shape(config: Config) -> tuple[TargetShape, int]:
    """The target's shape and its number of parameters, without its weights.

    Raises:
        InputError: there is no such target, or its documents cannot be packed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(str(resolve_target(config.target)))
    try:
        shape = TargetShape.of(settings)
    except ValueError as exc:
        raise InputError(str(exc)) from exc
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    return shape, sum(parameter.numel() for parameter in model.parameters())


def num_parameters(drafter: DrafterConfig) -> int:
    """The drafter's trained parameters."""
    with torch.device("meta"):
        layer = Drafter(DrafterConfig(**{**vars(drafter), "num_layers": 1}))
    one = sum(parameter.numel() for parameter in layer.parameters())
    each = sum(parameter.numel() for parameter in layer.layers.parameters())
    return one + (drafter.num_layers - 1) * each


def drafter_needs(config: Config, drafter: DrafterConfig, devices: Topology, number: int) -> list[Need]:
    """What drafter ``number`` needs on its device."""
    size = COMPUTE_DTYPES[config.dtype].itemsize
    tokens, slots = config.token_budget, config.num_anchors * config.block_size
    hidden, width = drafter.hidden_size, len(drafter.target_layer_ids) * drafter.hidden_size
    heads, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    parameters = num_parameters(drafter)
    rings = sum(1 for _, d in devices.pairs() if d == number) * devices.depth(number, config.ring_depth)
    flex = config.attention != "sdpa" and devices.drafters[number].type == "cuda"
    repeats = 1 if flex else -(-config.num_anchors // SDPA_BLOCKS_A_ROW)
    keys = (repeats * tokens + slots) * (kv if flex else heads) * 2
    layer = (slots * (6 * hidden + 4 * heads + 3 * drafter.intermediate_size) + tokens * 4 * kv + keys) * size
    kept = 1 if config.gradient_checkpointing else drafter.num_layers
    chunk = min(config.loss_chunk, slots)
    copies = 4 + (1 if len(devices.drafters) > 1 else 0)  # weights, gradients, two moments; the sum over replicas
    return [
        Need("weights, gradients, optimizer", parameters * (4 * copies + size), "--num-layers, --intermediate-size"),
        Need("embedding and head", 2 * drafter.vocab_size * hidden * size, "--dtype bfloat16"),
        Need(f"features in {rings} slots", rings * tokens * width * size, "--token-budget, --ring-depth"),
        Need(
            "activations",
            kept * layer + drafter.num_layers * slots * hidden * size + tokens * (width + 2 * hidden) * size,
            "--num-anchors, --token-budget, or use --gradient-checkpointing",
        ),
        Need("a chunk's logits", chunk * drafter.vocab_size * (4 + 2 * size), "--loss-chunk"),
    ]


def target_needs(config: Config, shape: TargetShape, parameters: int) -> list[Need]:
    """What a target needs on its device."""
    size = COMPUTE_DTYPES[config.dtype].itemsize
    row = 4 * shape.intermediate_size + 8 * shape.hidden_size
    return [
        Need("the target's weights", parameters * size, "--dtype bfloat16"),
        Need("its activations", config.token_budget * row * size, "--token-budget"),
        Need(
            "its features", 2 * config.token_budget * config.num_features * shape.hidden_size * size, "--token-budget"
        ),
    ]


def estimate(config: Config, shape: TargetShape, parameters: int, devices: Topology) -> dict[torch.device, list[Need]]:
    """What each device must hold."""
    needs: dict[torch.device, list[Need]] = {}
    drafter = drafter_config(config, shape)
    for device, count in Counter(devices.targets).items():
        weights, *others = target_needs(config, shape, parameters)  # targets on a device share the weights
        needs.setdefault(device, []).extend([weights, *(others * count)])
    for number, device in enumerate(devices.drafters):
        needs.setdefault(device, []).extend(drafter_needs(config, drafter, devices, number))
    return needs


def describe_needs(device: torch.device, needs: Sequence[Need]) -> str:
    """A device's needs as text, the largest first."""
    total = sum(need.num_bytes for need in needs)
    here = device.type == "cuda" and device.index < torch.cuda.device_count()
    have = f" of {torch.cuda.mem_get_info(device)[1] / GIB:.1f}" if here else ""
    lines = [f"{device}: about {total / GIB:.2f}{have} GiB"]
    for need in sorted(needs, key=lambda need: -need.num_bytes):
        lines.append(f"  {need.num_bytes / GIB:8.2f} GiB  {need.what} (lower: {need.lower})")
    return "\n".join(lines)


def _describe_step(config: Config, device: torch.device) -> str:
    compiled = "compiled" if is_compiled(config, device) else "eager"
    if config.step != "graph":
        return compiled
    return f"{compiled}, captured whole" if device.type == "cuda" else f"{compiled}, checked as a capture would"


def plan(config: Config) -> int:
    """The command. Returns its exit code."""
    devices = topology(config, must_exist=False)
    shape, parameters = read_shape(config)
    drafter = drafter_config(config, shape)
    slots = config.num_anchors * config.block_size
    print(f"target   {config.target}: {parameters / 1e6:.0f} M parameters, {config.dtype}")
    print(f"drafter  {num_parameters(drafter) / 1e6:.1f} M parameters, {drafter.num_layers} layers, float32 weights")
    print(f"features of layers {', '.join(map(str, drafter.target_layer_ids))}, mask token {drafter.mask_token_id}")
    print("\nreader")
    for number, device in enumerate(devices.targets):
        fed = ", ".join(str(d) for t, d in devices.pairs() if t == number)
        print(f"  -> target {number} on {device} -> drafters {fed}")
    for number, device in enumerate(devices.drafters):
        print(f"     drafter {number} on {device}: step {_describe_step(config, device)}")
    print(
        f"\na batch: {config.token_budget} tokens, {config.num_anchors} blocks of {config.block_size} = {slots} slots"
    )
    print(f"features of a batch: [{config.token_budget}, {len(drafter.target_layer_ids) * drafter.hidden_size}]")
    print(f"a step: {len(devices.drafters)} batches, one a drafter\n")
    for device, needs in estimate(config, shape, parameters, devices).items():
        print(describe_needs(device, needs))
    return 0
