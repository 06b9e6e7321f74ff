"""The configuration of a run: one frozen dataclass, its presets, and the checks of what users type.

Guarantees:
- A ``Config`` that exists is valid: each check runs when it is made, and says which option to change.
- Nothing here touches a device, a file or the network.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEMO_PROMPTS = Path(__file__).parent / "prompts" / "demo.jsonl"
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class InputError(ValueError):
    """What the user gave cannot be used. The command line prints it without a traceback and exits with 2."""


@dataclass(frozen=True)
class Config:
    """All options of all commands; each command reads those it needs."""

    preset: str = "smollm2"
    """Named defaults for everything below: demo, smollm2, qwen3-4b or qwen3-8b."""

    # what is read and written
    target: str = "smollm2"
    """Target model: 'smollm2', a Hugging Face directory, or a name on the Hub. 'random:' before one of these takes its
    architecture with random weights, for measurements only: no weights and no tokenizer are fetched."""
    data: Path = DEMO_PROMPTS
    """JSONL with one {"messages": [...]} or {"conversations": [...]} a line: prompts, with or without an assistant's
    answers; or {"input_ids": [...], "loss_mask": [...]}, tokens as they are."""
    out: Path = Path("runs/dflash")
    """The run's directory: answers, drafter, metrics."""
    num_held_out: int = 200
    """The last so many conversations of the data are kept out of training, for evaluate."""
    num_validation: int = 64
    """The last so many documents before those are not trained on: their acceptance picks the best checkpoint."""
    assistant_mask: Literal["auto", "template", "prefixes"] = "auto"
    """How answers are found in a conversation: by the chat template's own marks, or by rendering its prefixes."""
    regenerate: bool = True
    """Train on the target's own answers, which `regenerate` writes; --no-regenerate trains on those in the data."""

    # where it runs
    targets: tuple[str, ...] = ("cuda:0",)
    """A target thread on each of these devices: cuda:0,cuda:1 or cpu."""
    drafters: tuple[str, ...] = ("cuda:0",)
    """A drafter replica on each of these devices; a device may serve both."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the forward passes; the drafter's master weights are float32."""
    step: Literal["eager", "compile", "graph"] = "graph"
    """How the drafter's step runs: as eager code, compiled, or compiled and captured whole, as the target's pass then
    is, too."""
    target_step: Literal["eager", "compile"] = "eager"
    """How the target's layers run for features: as eager code, or on CUDA compiled, one form for all layers."""
    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """auto is flex_attention on CUDA and scaled_dot_product_attention elsewhere."""
    gradient_checkpointing: bool = False
    """Recompute the drafter's layers in backward: less memory, about a third more work."""
    ring_depth: int = 2
    """Slots of each ring between threads."""
    cache_features: float = 0.0
    """GiB of host memory in which a target thread keeps features of documents for later epochs; 0: none."""
    cache_dir: Path | None = None
    """Where features of documents are kept on disk for later epochs and runs; None: nowhere."""
    cache_disk: float = 64.0
    """GiB that all target threads together may keep in --cache-dir."""

    # shapes, fixed for the whole run
    token_budget: int = 8192
    """Tokens of a packed row; a step trains on one row a drafter."""
    num_anchors: int = 1024
    """Blocks of a packed row, shared out over its documents."""
    loss_chunk: int = 2048
    """Block positions whose logits exist at once."""

    # the drafter
    block_size: int = 8
    """Tokens of a block: the anchor and block_size - 1 drafted ones."""
    num_layers: int = 5
    """Layers of the drafter."""
    num_features: int = 5
    """Layers of the target whose outputs the drafter reads."""
    intermediate_size: int | None = None
    """Width of the drafter's feed-forward layers; None: the target's."""
    mask_token_id: int | None = None
    """A token of the target's vocabulary that no text uses; None: the one known for the target."""
    sliding_window: int | None = None
    """Tokens that a sliding layer of the drafter looks back, the own one included; None: all layers see everything."""
    num_full_layers: int = 1
    """With --sliding-window: the last so many layers see everything all the same."""

    # training
    loss: Literal["decay", "dpace"] = "decay"
    """How much each drafted token weighs: less along the block (--loss-decay), or by D-PACE."""
    loss_decay: float | None = None
    """gamma: the k-th drafted token weighs exp(-(k - 1) / gamma). None: 4 for blocks of 8, 5 for 10, 7 for 16."""
    dpace_smoothing: float = 0.5
    """D-PACE's a: a slot's chance to be right is taken as (1 - a) q + a."""
    labels: Literal["data", "target"] = "data"
    """What a block should predict: the tokens of the data, or what the target holds most likely after each."""
    lr: float = 6e-4
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: fall along a cosine, or stay and fall to 0 over the last --cooldown-ratio (warm-up, stable,
    decay), as 1 - sqrt."""
    cooldown_ratio: float = 0.2
    """Share of the steps over which the wsd schedule falls at its end."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    epochs: int = 6
    """Passes over the data; anchors are drawn afresh in each."""
    max_steps: int | None = None
    """Stop after so many optimizer steps; None: after the epochs."""
    seed: int = 0
    """Of the drafter's weights, the order of documents and the anchors."""
    log_every: int = 10
    """Steps between two readings of the metrics."""
    save_every: int | None = 500
    """Steps between two checkpoints and measurements on the validation documents; None: at the end only."""
    keep_checkpoints: int = 2
    """So many of the newest checkpoints stay; the drafter of the best one always does."""
    resume: bool = True
    """Go on from the newest checkpoint in --out; --no-resume begins anew and keeps the former drafter, renamed."""
    peer_timeout_s: float = 60.0
    """Several processes: one that has not been heard of for so long is taken for dead, and the others end."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too (needs the tensorboard package)."""

    # decoding: regenerate and evaluate
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    decode_batch: int = 256
    """Prompts that are decoded together."""
    temperature: float = 0.0
    """Of regenerated answers; 0: greedy. evaluate is always greedy."""
    num_samples: int = 0
    """Further answers to each prompt, drawn at --sample-temperature: more to learn from the same prompts."""
    sample_temperature: float = 0.7
    """Of the further answers."""
    min_acceptance: float = 1.0
    """evaluate fails below this acceptance length."""
    drafter: Path | None = None
    """The drafter that evaluate and export read: a .safetensors of train, or an exported directory. None: --out's."""

    # smoke
    smoke_steps: int = 10
    """Steps that smoke times, after its warm-up."""
    profile: Path | None = None
    """Where smoke writes a Chrome trace of three further steps; None: nowhere, and no table of kernels."""

    # export
    export_format: Literal["servers", "speculators"] = "servers"
    """The format of vLLM and SGLang, or that of the library speculators."""
    export_dir: Path | None = None
    """Where export writes; None: export-FORMAT in --out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _split(self.targets))
        object.__setattr__(self, "drafters", _split(self.drafters))
        _validate(self)

    @property
    def gamma(self) -> float:
        """``loss_decay``, or the paper's for this block size: 4 for 8, 5 for 10, 7 for 16; in between along lines."""
        if self.loss_decay is not None:
            return self.loss_decay
        return 4 + (self.block_size - 8) / 2 if self.block_size <= 10 else 5 + (self.block_size - 10) / 3

    @property
    def answers_path(self) -> Path:
        """Where regenerate writes the target's answers."""
        return self.out / "answers.jsonl"

    @property
    def drafter_path(self) -> Path:
        """The weights that train writes at its end; the configuration is beside it, as .json."""
        return self.out / "drafter.safetensors"

    @property
    def best_path(self) -> Path:
        """The weights of the checkpoint with the best acceptance on the validation documents."""
        return self.out / "best.safetensors"

    @property
    def metrics_path(self) -> Path:
        """Where train writes its metrics, one JSON object a line."""
        return self.out / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        """Where train writes its checkpoints, a directory each."""
        return self.out / "checkpoints"

    @property
    def split_path(self) -> Path:
        """Where train notes which prompts it has left out."""
        return self.out / "split.json"

    @property
    def training_path(self) -> Path:
        """The conversations that train reads."""
        return self.answers_path if self.regenerate else self.data


def _split(devices: tuple[str, ...]) -> tuple[str, ...]:
    """``("cuda:0,cuda:1",)`` and ``("cuda:0", "cuda:1")`` mean the same."""
    parts = (part.strip() for device in devices for part in device.split(","))
    return tuple(part for part in parts if part)


def _validate(config: Config) -> None:
    def require(condition: bool, name: str, rule: str) -> None:
        if not condition:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} is {getattr(config, name)!r}, but it must be {rule}.")

    for name in ("targets", "drafters"):
        devices = getattr(config, name)
        require(len(devices) > 0, name, "at least one device, such as cuda:0 or cpu")
        for device in devices:
            require(_DEVICE.fullmatch(device) is not None, name, f"devices such as cuda:0 or cpu ({device!r} is not)")
        require(
            all(device.startswith("cpu") for device in devices) or "cpu" not in devices,
            name,
            "all on cuda or all on cpu",
        )
    positive = (
        "ring_depth",
        "token_budget",
        "num_anchors",
        "loss_chunk",
        "num_layers",
        "num_features",
        "epochs",
        "log_every",
        "max_new_tokens",
        "decode_batch",
        "keep_checkpoints",
        "num_full_layers",
        "smoke_steps",
    )
    for name in positive:
        require(getattr(config, name) >= 1, name, "at least 1")
    for name in ("intermediate_size", "max_steps", "save_every", "sliding_window"):
        value = getattr(config, name)
        require(value is None or value >= 1, name, "at least 1, or left out")
    for name in ("lr", "max_grad_norm", "peer_timeout_s", "sample_temperature"):
        require(getattr(config, name) > 0, name, "above 0")
    require(config.loss_decay is None or config.loss_decay > 0, "loss_decay", "above 0, or left out")
    not_negative = (
        "num_held_out",
        "num_validation",
        "cache_features",
        "cache_disk",
        "weight_decay",
        "temperature",
        "num_samples",
        "min_acceptance",
        "seed",
    )
    for name in not_negative:
        require(getattr(config, name) >= 0, name, "0 or more")
    require(0 <= config.dpace_smoothing < 1, "dpace_smoothing", "at least 0 and below 1")
    require(0 < config.cooldown_ratio <= 1, "cooldown_ratio", "above 0 and at most 1")
    require(
        config.schedule != "wsd" or config.warmup_ratio + config.cooldown_ratio <= 1,
        "cooldown_ratio",
        f"at most what the warm-up leaves, with --warmup-ratio {config.warmup_ratio}",
    )
    require(
        config.sliding_window is None or config.num_full_layers < config.num_layers,
        "num_full_layers",
        f"below the number of layers, which is {config.num_layers}, or --sliding-window would be of no layer",
    )
    require(
        config.target_step == "eager" or config.step != "eager",
        "target_step",
        "eager with --step eager, which compiles as little as can be",
    )
    require(config.block_size >= 2, "block_size", "at least 2: the anchor and one drafted token")
    require(0 <= config.warmup_ratio < 1, "warmup_ratio", "at least 0 and below 1")
    require(config.mask_token_id is None or config.mask_token_id >= 0, "mask_token_id", "a token id, or left out")
    require(
        config.token_budget > config.block_size, "token_budget", f"above the block size, which is {config.block_size}"
    )
    require(config.num_anchors <= config.token_budget, "num_anchors", "at most the token budget: an anchor is a token")
    require(
        config.min_acceptance <= config.block_size,
        "min_acceptance",
        f"at most the block size, which is {config.block_size}",
    )


# Eight GPUs. Blocks, loss, learning rate and epochs are the paper's (arXiv 2602.06036, A.1); the data is the user's.
_LARGE: dict[str, Any] = dict(
    targets=tuple(f"cuda:{index}" for index in range(6)),
    drafters=("cuda:6", "cuda:7"),
    token_budget=49152,
    block_size=16,
    num_layers=5,
    num_features=5,
    lr=6e-4,
    warmup_ratio=0.04,
    epochs=6,
    save_every=500,
    max_new_tokens=2048,
)

PRESETS: dict[str, Config] = {
    "demo": Config(
        preset="demo",
        out=Path("runs/demo"),
        num_held_out=20,
        num_validation=8,
        targets=("cpu",),
        drafters=("cpu",),
        dtype="float32",
        step="graph",
        cache_features=1.0,
        token_budget=512,
        num_anchors=96,
        loss_chunk=768,
        num_layers=2,
        lr=1e-3,
        epochs=8,
        max_steps=100,
        max_new_tokens=48,
        decode_batch=32,
        min_acceptance=1.3,
    ),
    "smollm2": Config(preset="smollm2", out=Path("runs/smollm2")),
    "qwen3-4b": Config(
        preset="qwen3-4b",
        target="Qwen/Qwen3-4B",
        out=Path("runs/qwen3-4b"),
        num_anchors=2048,  # a step's work and memory go by them, more than by tokens: the plan says 47 GiB
        decode_batch=128,
        **_LARGE,
    ),
    "qwen3-8b": Config(
        preset="qwen3-8b",
        target="Qwen/Qwen3-8B",
        out=Path("runs/qwen3-8b"),
        # The plan says 60 GiB. As many are published to fit 80 GB beside a longer row (speculators, issue 979).
        num_anchors=1536,
        decode_batch=64,  # keys and values of 2,560 tokens are 24 GB, beside 16 GB of weights
        **_LARGE,
    ),
}


def note_split(config: Config) -> None:
    """Write which prompts training has left out, for ``check_split``."""
    config.out.mkdir(parents=True, exist_ok=True)
    record = {"data": str(config.data.resolve()), "num_held_out": config.num_held_out}
    config.split_path.write_text(json.dumps(record) + "\n")


def check_split(config: Config) -> None:
    """Raise InputError where the run was trained on some of the prompts that it would be evaluated on."""
    if not config.split_path.is_file():
        return
    trained = json.loads(config.split_path.read_text())
    if trained["data"] == str(config.data.resolve()) and config.num_held_out > trained["num_held_out"]:
        raise InputError(
            f"--num-held-out is {config.num_held_out}, but the drafter was trained with {trained['num_held_out']}. It "
            "has seen some of these prompts: give evaluate the same --num-held-out as train, or less."
        )


def preset(name: str) -> Config:
    """The preset of that name, or an InputError that lists the names."""
    if name not in PRESETS:
        raise InputError(f"--preset is {name!r}, but it must be one of {', '.join(PRESETS)}.")
    return PRESETS[name]
