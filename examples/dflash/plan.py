"""``plan``: the run's topology and shapes, the memory that it needs, and the time that it takes. Nothing is run.

Guarantees:
- No model is loaded and nothing is fetched but, for a target that is not known here, its configuration.
- Estimates say what they assume; where a device is unknown there is no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from . import batches as packing
from . import cost
from .config import Config, InputError
from .data import load_training_documents
from .devices import check_devices
from .drafter import DrafterConfig
from .fetch import local_directory, target_settings
from .memory import (
    GIB,
    Need,
    describe_needs,
    device_bytes,
    drafter_config,
    drafter_needs,
    estimate,
    features_a_token,
    host_needs,
    num_parameters,
    target_needs,
)
from .pipeline import Topology
from .replicas import check_replica_devices
from .step import is_compiled, mask_maker
from .tables import Table, show
from .target import TargetShape, model_class

__all__ = [
    "GIB",
    "Need",
    "describe_needs",
    "drafter_config",
    "drafter_needs",
    "estimate",
    "num_parameters",
    "plan",
    "read_shape",
    "target_needs",
    "topology",
]

MAX_DATA_BYTES = 64 * 2**20  # more would take minutes to read, for an estimate
MIB, TERA = 2**20, 1e12


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


@dataclass(frozen=True)
class TargetFacts:
    """A target without its weights.

    Attributes:
        shape: what a drafter must know.
        num_parameters: all of them.
        layer_parameters: that a token meets in a layer's matrices, on average over layers; of experts, those chosen.
    """

    shape: TargetShape
    num_parameters: int
    layer_parameters: float


def read_target(config: Config) -> TargetFacts:
    """The target's shape and size, without its weights.

    Raises:
        InputError: there is no such target, or its documents cannot be packed.
    """
    settings = target_settings(config.target)
    try:
        shape = TargetShape.of(settings)
    except ValueError as exc:
        raise InputError(str(exc)) from exc
    with torch.device("meta"):
        model = model_class(settings).from_config(settings)
    text = settings.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = (getattr(text, "num_experts_per_tok", None) or 1) / experts
    layers = model.get_decoder().layers
    matrices = [(name, parameter) for name, parameter in layers.named_parameters() if parameter.dim() >= 2]
    met = sum(parameter.numel() * (chosen if ".experts." in name else 1) for name, parameter in matrices)
    total = sum(parameter.numel() for parameter in model.parameters())
    return TargetFacts(shape, total, met / len(layers))


def read_shape(config: Config) -> tuple[TargetShape, int]:
    """The target's shape and its number of parameters, without its weights.

    Raises:
        InputError: there is no such target, or its documents cannot be packed.
    """
    facts = read_target(config)
    return facts.shape, facts.num_parameters


@dataclass(frozen=True)
class DataFacts:
    """The training data, or why it was not read.

    Attributes:
        lengths: tokens of each document.
        num_batches: of an epoch.
        unread: the reason; empty where the data was read.
    """

    lengths: Sequence[int] = ()
    num_batches: int = 0
    unread: str = ""

    @property
    def document_tokens(self) -> float:
        """Length of the document that a token is in, on average over tokens; assumed where the data was not read."""
        return sum(n * n for n in self.lengths) / sum(self.lengths) if self.lengths else float(cost.ASSUMED_DOCUMENT)


def read_data(config: Config, drafter: DrafterConfig) -> DataFacts:
    """What the run would train on, where that can be told without fetching a tokenizer or reading for minutes."""
    path = config.training_path
    if not path.is_file():
        hint = ": regenerate writes it" if config.regenerate else ""
        return DataFacts(unread=f"{path} is not there{hint}")
    if path.stat().st_size > MAX_DATA_BYTES:
        return DataFacts(unread=f"{path} has over {MAX_DATA_BYTES // MIB} MiB, too much to read for a plan")
    try:
        documents = load_training_documents(
            config, _local_tokenizer(config), drafter.mask_token_id, say=lambda text: None
        )
        return DataFacts([len(document.tokens) for document in documents], packing.num_batches(documents, config, 0))
    except InputError as exc:
        return DataFacts(unread=" ".join(str(exc).split("\n")[:2]))


def _local_tokenizer(config: Config) -> object | None:
    """The target's tokenizer if it is on this machine; pre-tokenised data needs none."""
    from transformers import AutoTokenizer

    directory = local_directory(config.target)
    try:
        return None if directory is None else AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError, ImportError, AttributeError):
        return None


def plan(config: Config) -> int:
    """The command. Returns its exit code."""
    devices = topology(config, must_exist=False)
    facts = read_target(config)
    drafter = drafter_config(config, facts.shape)
    data = read_data(config, drafter)
    tables = [
        _models(config, facts, drafter),
        _topology_table(config, devices),
        _batch_table(config, drafter, devices),
        *_memory_tables(estimate(config, facts.shape, facts.num_parameters, devices)),
        _host_table(config, devices),
        _data_table(config, drafter, data),
        *_time_tables(config, facts, drafter, devices, data),
    ]
    show(tables)
    return 0


def _models(config: Config, facts: TargetFacts, drafter: DrafterConfig) -> Table:
    layers = ", ".join(map(str, drafter.target_layer_ids))
    return Table(
        "models",
        [
            ("target", f"{config.target}: {facts.num_parameters / 1e6:.0f} M parameters, {config.dtype}"),
            (
                "drafter",
                f"{num_parameters(drafter) / 1e6:.1f} M parameters, {drafter.num_layers} layers, float32 weights",
            ),
            ("features", f"of layers {layers}; mask token {drafter.mask_token_id}"),
        ],
    )


def _topology_table(config: Config, devices: Topology) -> Table:
    rows = []
    for number, device in enumerate(devices.targets):
        fed = ", ".join(str(d) for t, d in devices.pairs() if t == number)
        rows.append((f"-> target {number} on {device} -> drafters {fed}",))
    for number, device in enumerate(devices.drafters):
        rows.append((f"   drafter {number} on {device}: step {_describe_step(config, device)}",))
    return Table("reader", rows)


def _describe_step(config: Config, device: torch.device) -> str:
    compiled = "compiled" if is_compiled(config, device) else "eager"
    if config.step != "graph":
        return compiled
    return f"{compiled}, captured whole" if device.type == "cuda" else f"{compiled}, checked as a capture would"


def _batch_table(config: Config, drafter: DrafterConfig, devices: Topology) -> Table:
    slots = config.num_anchors * config.block_size
    row_bytes = config.token_budget * features_a_token(config, drafter)
    links = ", ".join(f"{_seconds(row_bytes / rate)} over {name}" for name, rate in cost.LINKS.items())
    width, num_rows = len(drafter.target_layer_ids) * drafter.hidden_size, len(devices.drafters)
    return Table(
        "a batch",
        [
            (f"{config.token_budget} tokens, {config.num_anchors} blocks of {config.block_size} = {slots} slots",),
            (f"features of a batch: [{config.token_budget}, {width}], {row_bytes / 1e9:.2f} GB: {links}",),
            (f"a step: {num_rows} batch{'es' if num_rows > 1 else ''}, one a drafter",),
        ],
    )


def _memory_tables(needs: dict[torch.device, list[Need]]) -> list[Table]:
    """One for each group of devices that need and have the same."""
    groups: dict[tuple[tuple[Need, ...], int | None], list[torch.device]] = {}
    for device, of_device in needs.items():
        groups.setdefault((tuple(of_device), device_bytes(device)), []).append(device)
    tables = []
    for (same, have), members in groups.items():
        total = sum(need.num_bytes for need in same)
        of = "" if have is None else f" of {have / GIB:.1f}"
        each = " each" if len(members) > 1 else ""
        note = ""
        if have is not None and total > have:
            note = f"DOES NOT FIT: {(total - have) / GIB:.1f} GiB more than there is. Lower what stands first."
        names = ", ".join(map(str, members))
        tables.append(Table(f"{names}: about {total / GIB:.2f}{of} GiB{each}", _need_rows(same), note=note))
    return tables


def _need_rows(needs: Sequence[Need]) -> list[tuple[str, ...]]:
    ordered = sorted(needs, key=lambda need: -need.num_bytes)
    return [
        (f"{need.num_bytes / GIB:8.2f} GiB", need.what, f"(lower: {need.lower})" if need.lower else "")
        for need in ordered
    ]


def _host_table(config: Config, devices: Topology) -> Table:
    needs = host_needs(config, devices)
    total = sum(need.num_bytes for need in needs)
    note = "" if config.cache_dir is None else f"On the disk: up to {config.cache_disk:g} GiB in {config.cache_dir}."
    return Table(f"host: about {total / GIB:.2f} GiB, and the data", _need_rows(needs), note=note)


def _data_table(config: Config, drafter: DrafterConfig, data: DataFacts) -> Table:
    a_token = features_a_token(config, drafter)
    if data.unread:
        size = f"{1e6 * a_token / GIB:.1f} GiB a million tokens, for --cache-features and --cache-disk"
        return Table("data", [("not read", data.unread), ("features", size)])
    tokens, features = sum(data.lengths), sum(data.lengths) * a_token
    rows = [
        ("documents", f"{len(data.lengths)}, {tokens} tokens; {data.num_batches} batches an epoch"),
        ("filled", f"{tokens / (data.num_batches * config.token_budget):.0%} of the rows; the rest is padding"),
        ("features", f"of all documents: {features / GIB:.2f} GiB"),
    ]
    if config.cache_dir is not None:
        fits = min(1.0, config.cache_disk * GIB / features)
        rows.append(("", f"--cache-disk {config.cache_disk:g} holds {fits:.0%} of them"))
    if config.cache_features > 0:
        fits = min(1.0, config.cache_features * GIB / features)
        rows.append(("", f"--cache-features {config.cache_features:g} holds {fits:.0%} of them, a target thread"))
    return Table("data", rows)


def _time_tables(
    config: Config, facts: TargetFacts, drafter: DrafterConfig, devices: Topology, data: DataFacts
) -> list[Table]:
    num_layers = cost.num_target_layers(config, drafter)
    document = min(data.document_tokens, float(config.token_budget))
    step = cost.drafter_flops(config, drafter, document)
    target = cost.target_flops(config, facts.shape, num_layers, document, facts.layer_parameters)
    whose = "in the data" if data.lengths else "assumed"
    again = f", and {step.recomputed / TERA:.2f} again for gradients" if step.recomputed else ""
    parts = ", ".join(f"{name} {value / step.useful:.0%}" for name, value in step.parts.items())
    work = Table(
        "work of a batch, in useful TFLOP",
        [
            ("drafter's step", f"{step.useful / TERA:.2f}{again}"),
            ("", parts),
            ("target's pass", f"{target.useful / TERA:.2f}, {num_layers} of {facts.shape.num_layers} layers"),
        ],
        note=f"Documents of {document:.0f} tokens ({whose}), blocks in their middle on average.",
    )
    speeds = _speeds(config, devices, target, step, num_layers)
    if not speeds:
        return [work, Table("time", [("unknown for these devices and this dtype; measured in smoke",)])]
    rows = [
        (label, *(describe(speed) for speed in speeds.values()))
        for label, describe in _time_rows(config, devices, data)
    ]
    note = (
        f"Assumed: useful work at {cost.DRAFTER_EFFICIENCY:.0%} of the dense bfloat16 peak in the drafter and at "
        f"{cost.TARGET_EFFICIENCY:.0%} in the target, whose layers take {cost.HOST_S_A_TARGET_LAYER * 1e3:.2f} ms each "
        "at least, for their launches; full rows, hand-over hidden, no compiling. smoke measures a drafter's step."
    )
    return [work, Table("time, estimated", rows, ("", *speeds), note)]


def _speeds(
    config: Config, devices: Topology, target: cost.Flops, step: cost.Flops, num_layers: int
) -> dict[str, cost.Speed]:
    """By a name: of the devices as they are, or of known ones where these are not here; none where unknown."""
    both = (*devices.targets, *devices.drafters)
    if config.dtype != "bfloat16" or any(device.type != "cuda" for device in both):
        return {}

    def on(peak: Callable[[torch.device], float | None]) -> cost.Speed | None:
        return cost.speed(devices, target, step, num_layers, peak)

    if all(device_bytes(device) is not None for device in both):
        names = {device: torch.cuda.get_device_name(device) for device in both}
        speed = on(lambda device: cost.peak_flops(names[device]))
        return {} if speed is None else {", ".join(dict.fromkeys(names.values())): speed}
    peaks = {name: cost.peak_flops(name) for name in cost.REFERENCE_DEVICES}
    speeds = {f"on {name}s": on(partial(_same, peak)) for name, peak in peaks.items()}
    return {name: speed for name, speed in speeds.items() if speed is not None}


def _same(peak: float | None, device: torch.device) -> float | None:
    """Every device's peak, where all are of one kind."""
    return peak


def _time_rows(config: Config, devices: Topology, data: DataFacts) -> list[tuple[str, Callable[[cost.Speed], str]]]:
    def tokens_per_s(speed: cost.Speed) -> float:
        return speed.batches_per_s * config.token_budget

    def best(speed: cost.Speed) -> str:
        num_targets, num_drafters = speed.best_split(num_devices)
        faster = max(speed.target_s) / num_targets, max(speed.drafter_s) / num_drafters
        return f"{num_targets} and {num_drafters}: {config.token_budget / max(faster):,.0f} tokens/s"

    def run(speed: cost.Speed) -> str:
        batches = data.num_batches * config.epochs
        if config.max_steps is not None:
            batches = min(batches, config.max_steps * len(devices.drafters))
        return f"{_seconds(batches / speed.batches_per_s)} for {batches} batches"

    num_devices = len({*devices.targets, *devices.drafters})
    rows: list[tuple[str, Callable[[cost.Speed], str]]] = [
        ("a drafter's step", lambda speed: _seconds(max(speed.drafter_s))),
        ("a target's pass", lambda speed: _seconds(max(speed.target_s))),
        ("bounded by", lambda speed: speed.bottleneck),
        ("drafters busy", lambda speed: f"{speed.drafters_busy:.0%}"),
        ("targets busy", lambda speed: f"{speed.targets_busy:.0%}"),
        ("tokens/s", lambda speed: f"{tokens_per_s(speed):,.0f}"),
        ("a million tokens", lambda speed: _seconds(1e6 / tokens_per_s(speed))),
        ("two devices over one", lambda speed: f"{speed.gain_of_two:.2f}x at best"),
    ]
    if num_devices > 1:
        rows.append(("fastest targets and drafters", best))
    if data.num_batches:
        rows.append(("the run", run))
    return rows


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
