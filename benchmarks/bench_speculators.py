"""A drafter's training step of the example against that of the library speculators, at equal shapes.

    python -m benchmarks.bench_speculators --preset qwen3-4b --num-anchors 1536

Each side runs in a process of its own, on the same weights, tokens, features and precision, with cross-entropy against
the target's first choice and AdamW. It prints both step times, tokens/s, memory, and the loss before the first step,
which must agree: speculators divides by the number of slots, the example by the sum of their weights, so theirs is
converted. Then come all differences that are left. The last line is JSON. Where speculators is not importable, it says
so and measures nothing; the modules that only its command line needs may be missing. Its step here is that of its
trainer (train/trainer.py, 0.9.0) less what it does to log, which waits for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import graphsafe as gs
from examples.dflash import cost
from examples.dflash.batches import batch_specs
from examples.dflash.config import Config, preset
from examples.dflash.drafter import Drafter, DrafterConfig
from examples.dflash.loss import labels_and_weights
from examples.dflash.plan import drafter_config, read_shape
from examples.dflash.replicas import Replica
from examples.dflash.smoke import mean_document, random_batch
from examples.dflash.step import COMPUTE_DTYPES, NUM_WARMUP_STEPS, DrafterStep, target_specs

GIBIBYTE = 2**30
SIDES = ("ours", "theirs")
NUM_WARMUP = NUM_WARMUP_STEPS + 2
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}  # of the losses, relative
COMMAND_LINE_MODULES = ("datasets", "hs_connectors", "httpx", "loguru", "openai", "pydantic_settings")
MISSING = (
    "speculators is not importable here, so there is nothing to compare with. Install it (pip install --no-deps "
    "speculators==0.9.0), or unpack its wheel and name the directory in PYTHONPATH."
)
DIFFERENCES = (  # on CUDA: what, ours, theirs
    (
        "capture",
        "with --step graph one CUDA graph for forward, backward, clipping and optimizer",
        "none: launched from the host",
    ),
    (
        "compile",
        "but with --step eager the drafter whole (fullgraph)",
        "the forward, with a graph break around anchors and mask",
    ),
    ("anchors", "drawn beforehand by the reader, on the host", "drawn in each step on the device, which waits for it"),
    ("mask", "made from intervals, within the graph", "create_block_mask compiled on its own, from all pairs of tiles"),
    ("packing", "blocks end with their document", "blocks run on into the next document, where the row goes on"),
    (
        "labels",
        "the target's first choice comes with the features",
        "from the target's head, on all slots, in the step",
    ),
    ("head", "logits of the block's B - 1 slots", "logits of all B slots, the anchor's too"),
    ("loss", "in chunks, its gradient made in forward", "all logits at once; fused kernels read them, eager ones copy"),
    ("loss's mean", "over the sum of weights", "over the number of slots"),
    (
        "frozen weights",
        "one tensor for embedding and head, in the compute dtype",
        "three, in float32, cast in each step",
    ),
    ("precision", "weights cast as they are used", "torch.autocast"),
    ("optimizer", "AdamW fused, decay on matrices alone", "AdamW foreach, decay on all"),
    ("logging", "counts stay on the device", "left out here; there each logged step waits for the device"),
)


def make_config(arguments: argparse.Namespace) -> Config:
    """The preset with the options, on one device."""
    config = preset(arguments.preset)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    changes: dict[str, Any] = dict(targets=(device,), drafters=(device,), labels="target", loss="decay")
    for name in ("target", "token_budget", "num_anchors", "block_size", "num_layers", "num_features", "loss_chunk"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    for name in ("step", "dtype", "mask_token_id"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    config = dataclasses.replace(config, **changes)
    if not config.target.startswith("random:"):
        config = dataclasses.replace(config, target=f"random:{config.target}")
    return config


@dataclasses.dataclass(frozen=True)
class Work:
    """What both sides train on: the batch [T], features [T, K*H], the head [V, H], and the shape."""

    config: Config
    drafter: DrafterConfig
    device: torch.device
    batch: dict[str, Tensor]
    features: Tensor
    head: Tensor


def make_work(config: Config) -> Work:
    """Random weights and tokens, the same in every process. Anchors lie where their block ends within its document."""
    shape, _ = read_shape(config)
    drafter, dtype = drafter_config(config, shape), COMPUTE_DTYPES[config.dtype]
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(config, shape.vocab_size, generator)
    lengths = batch["document_ids"].bincount()[batch["document_ids"]]
    places = batch["positions"]
    fits = (places >= 1) & (places + drafter.block_size <= lengths)
    fits[-drafter.block_size :] = False  # as speculators has it
    candidates = fits.nonzero().flatten()
    if len(candidates) < config.num_anchors:
        raise SystemExit(f"--num-anchors is {config.num_anchors}, but the row has room for {len(candidates)}.")
    picked = torch.randperm(len(candidates), generator=generator)[: config.num_anchors]
    batch["anchors"] = candidates[picked].sort().values
    batch["target_tokens"] = batch["tokens"].roll(-1)
    width = len(drafter.target_layer_ids) * drafter.hidden_size
    features = torch.randn(config.token_budget, width, generator=generator).to(dtype)
    head = (0.02 * torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)).to(dtype)
    return Work(config, drafter, torch.device(config.drafters[0]), batch, features, head)


def slot_mean_factor(work: Work) -> float:
    """What turns a mean over slots into one over the sum of their weights."""
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    row = tuple(work.batch[name] for name in names)
    weights = labels_and_weights(*row, block_size=work.drafter.block_size, decay=work.config.gamma)[1]
    return float((weights > 0).sum() / weights.sum())


def run_ours(work: Work, num_steps: int) -> dict[str, Any]:
    config, device, began = work.config, work.device, time.perf_counter()
    with gs.thread_context(device, seed=0):
        head = work.head.to(device)
        model = Drafter(work.drafter, seed=0).to(device)
        step = DrafterStep(model, head, head, config, 10_000, Replica(0, 1, device, None))
        slot = gs.StaticBuffers({**batch_specs(config), **target_specs(config, work.drafter)}, device)
        slot.load({**work.batch, "features": work.features})
        first = step.measure(slot)[:2].tolist()
        timed = time_steps(lambda: step(slot), num_steps, device, began)
        last = step(slot)[:2].tolist()
        step.close()
    return {"loss": first[0] / first[1], "last_loss": last[0] / last[1], **timed, "attention": config.attention}


def run_theirs(work: Work, num_steps: int, loss: str) -> dict[str, Any]:
    config, device, began = work.config, work.device, time.perf_counter()
    core, model = make_theirs(work)
    hidden = work.head[work.batch["target_tokens"]]  # the target's last states: each points at its token's row
    mask = work.batch["loss_mask"].to(torch.float32)
    row: dict[str, Any] = dict(
        hidden_states=work.features,
        input_ids=work.batch["tokens"],
        loss_mask=mask,
        verifier_last_hidden_states=hidden,
        document_ids=work.batch["document_ids"],
        position_ids=work.batch["positions"],
    )
    row = {name: tensor[None].to(device) for name, tensor in row.items()}
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]

    settings = dict(loss_config=resolve_loss_config("ce", loss), gamma=config.gamma, max_anchors=config.num_anchors)
    dtype = COMPUTE_DTYPES[config.dtype]

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            result: Tensor = model(**row, **settings)[1]
        return result

    draws = core.select_anchors
    given = work.batch["anchors"].to(device), work.batch["anchor_valid"].to(device)
    core.select_anchors = lambda *args: given
    try:
        with torch.no_grad():
            first = forward().item()
    finally:
        core.select_anchors = draws
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=config.lr, weight_decay=config.weight_decay)

    def step() -> Tensor:
        value = forward()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        return value.detach()

    timed = time_steps(step, num_steps, device, began)
    factor = slot_mean_factor(work)
    attention = model._attn_impl
    return {
        "loss": first * factor,
        "last_loss": step().item() * factor,
        **timed,
        "attention": attention,
        "kernel": loss,
    }


def make_theirs(work: Work) -> tuple[Any, Any]:
    """Its module and its model with our weights, on the device."""
    from speculators.models.dflash import (  # type: ignore[import-not-found]
        DFlashDraftModel,
        DFlashSpeculatorConfig,
        core,
    )
    from transformers import Qwen3Config

    shape = work.drafter
    layers = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    layers._attn_implementation = "simple_flex_attention" if work.device.type == "cuda" else "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=list(shape.target_layer_ids),
        mask_token_id=shape.mask_token_id,
    )
    model = DFlashDraftModel(config).to(work.device)
    ours = Drafter(shape, seed=0).state_dict()
    left = model.load_state_dict(ours, strict=False)
    if left.unexpected_keys:
        raise RuntimeError(f"speculators has no weights {left.unexpected_keys}: this is another version of it.")
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight.data.copy_(work.head)
    model.verifier_norm.weight.data.fill_(1)
    named = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if named != set(ours):
        raise RuntimeError(f"speculators trains other weights: {sorted(named ^ set(ours))}")
    return core, model.train()


def time_steps(step: Callable[[], Any], num_steps: int, device: torch.device, began: float) -> dict[str, Any]:
    """Milliseconds of steps after a warm-up, by the device's clock, and memory at most in use.

    Args:
        began: when this side's work began, by ``time.perf_counter``.
    """
    for _ in range(NUM_WARMUP):
        step()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    ready_s = time.perf_counter() - began
    if device.type == "cuda":  # from a step's start to the next one's, with the host one step ahead
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
        for number, mark in enumerate(marks):
            mark.record()
            if number < num_steps:
                step()
            marks[max(0, number - 1)].synchronize()
        marks[-1].synchronize()
        times = [former.elapsed_time(later) for former, later in itertools.pairwise(marks)]
    else:
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
    found: dict[str, Any] = {"ms": statistics.median(times), "step_ms": times, "ready_s": ready_s}
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIBIBYTE
        found["reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIBIBYTE
    return found


def run_side(side: str, config: Config, num_steps: int, loss: str) -> dict[str, Any]:
    """One side in this process. With ``auto``, its fused loss, and its eager one where that cannot be."""
    work = make_work(config)
    if side == "ours":
        return run_ours(work, num_steps)
    stubbed = stub_missing(COMMAND_LINE_MODULES)
    fused_error = None
    if loss == "auto" and work.device.type == "cuda":
        try:
            return run_theirs(work, num_steps, "fused") | {"stubbed": stubbed}
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # whatever Dynamo, Inductor or Triton has against it
            fused_error = f"{type(exc).__name__}: {str(exc).splitlines()[0][:200]}"
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = run_theirs(work, num_steps, "eager" if loss == "auto" else loss)
    return found | {"stubbed": stubbed, "fused_error": fused_error}


class _Stub(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stub_missing(names: tuple[str, ...]) -> list[str]:
    """Stand-ins for those of these modules that are not installed. A step calls none of them. Returns which."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Stubs(set(missing)))
    return missing


def compare(config: Config, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios, and whether the losses before the first step agree."""
    shape, _ = read_shape(config)
    found: dict[str, Any] = {"results": results, "differences": [list(row) for row in DIFFERENCES]}
    ours, theirs = (results.get(side, {}) for side in SIDES)
    work = cost.drafter_flops(config, drafter_config(config, shape), mean_document(config.token_budget))
    for name, result in results.items():
        if "ms" in result:
            result["tokens_per_s"] = config.token_budget / result["ms"] * 1e3
            result["tflop_per_s"] = work.useful / 1e9 / result["ms"]
            print(show(name, result), flush=True)
        else:
            print(f"{name:7} failed: {result['error']}", flush=True)
    if theirs.get("fused_error"):
        print(f"its fused loss does not run here, so its eager one was taken: {theirs['fused_error']}")
    if theirs.get("stubbed"):
        print(f"not installed, and not used by a step: {', '.join(theirs['stubbed'])}")
    if "ms" in ours and "ms" in theirs:
        apart = abs(ours["loss"] - theirs["loss"]) / abs(ours["loss"])
        found["times_as_fast"] = theirs["ms"] / ours["ms"]
        found["losses_apart"], found["losses_agree"] = apart, apart <= TOLERANCES[config.dtype]
        print(f"ours is {found['times_as_fast']:.2f} times as fast; losses of equal weights are {apart:.2e} apart")
        if "peak_gib" in ours:
            found["memory_ratio"] = theirs["peak_gib"] / ours["peak_gib"]
            print(f"theirs holds {found['memory_ratio']:.2f} times as much memory")
    print("\nwhat differs: ours; theirs")
    for what, mine, other in DIFFERENCES:
        print(f"  {what:14}  {mine}; {other}")
    return found


def show(name: str, result: dict[str, Any]) -> str:
    memory = ""
    if "peak_gib" in result:
        memory = f"  peak {result['peak_gib']:.2f} GiB, reserved {result['reserved_gib']:.2f} GiB"
    speed = f"{result['tokens_per_s']:12,.0f} tokens/s  {result['tflop_per_s']:.3g} useful TFLOP/s"
    ready = f"ready after {result['ready_s']:.1f} s"
    return f"{name:7} {result['ms']:9.2f} ms/step  {speed}{memory}  {ready}  loss {result['loss']:.5f}"


def in_process(side: str, seconds: float) -> dict[str, Any]:
    """Run one side with this command's own options in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_speculators", *sys.argv[1:], "--side", side]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=Path(__file__).parents[1])
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--target", help="an architecture, as for the example; the preset's")
    for name in ("token-budget", "num-anchors", "block-size", "num-layers", "num-features", "loss-chunk"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--step", choices=("eager", "compile", "graph"))
    parser.add_argument("--dtype", choices=tuple(COMPUTE_DTYPES))
    parser.add_argument("--their-loss", choices=("auto", "fused", "eager"), default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds-limit", type=float, default=280.0, help="for each side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    config = make_config(arguments)
    if arguments.side is not None:
        print(json.dumps(run_side(arguments.side, config, arguments.steps, arguments.their_loss)))
        return 0
    if importlib.util.find_spec("speculators") is None:
        print(MISSING)
        return 0
    found = compare(config, {side: in_process(side, arguments.seconds_limit) for side in SIDES})
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, **found}))
    return 0 if found.get("losses_agree") else 1


if __name__ == "__main__":
    sys.exit(main())
