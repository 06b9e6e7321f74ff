"""A drafter's training step four ways: plain eager, torch.compile, its reduce-overhead mode, and TrainStep.

    python -m benchmarks.bench_drafter_step --shape tiny --seconds-limit 120

Each way runs alone, from a reset Dynamo, on the same model, batch and optimizer (AdamW, fused). It prints each as soon
as it is measured: the median step in ms, the peak of allocated memory over what was there before, and what stays
reserved between steps, graph pools included, once the allocator's cache is emptied. The last line is JSON. Plain
torch.compile runs without graphsafe's repairs. Without a GPU the shape is "mini" and graphs are no gain.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphsafe as gs

from .drafter_shapes import SHAPES, Shape, make_batch, make_mask, make_model

KINDS = ("eager", "compile", "reduce-overhead", "TrainStep")
GOALS = {  # shape -> how many times as fast TrainStep is as each; and its peak memory is no higher
    "tiny": {"reduce-overhead": 3.0, "compile": 7.0},
    "small": {"reduce-overhead": 1.25, "compile": 2.3},
    "q4b-like": {"reduce-overhead": 1.03, "compile": 1.04},
}
NUM_WARMUP, NUM_STEPS = 8, 40
LOSS_TOLERANCE = 0.02  # between kernels that round differently, after all steps of training in half precision
GIBIBYTE = 2**30


def make_step(kind: str, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """One training step, as a call without arguments that returns the loss."""
    model = make_model(shape, device, compiled_whole=kind != "eager")
    mask, batch = make_mask(shape, device), make_batch(shape, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    x, features, targets, weights = batch
    if kind == "TrainStep":
        compiled = gs.compile(model, dynamic=False)
        # As in the other ways, the loss is good until the next step.
        step = gs.TrainStep(lambda x, f, t, w: compiled(x, f, mask, t, w), optimizer, model=model, outputs="alias")
        return lambda: step(x, features, targets, weights)
    call: Callable[..., Any] = model
    if kind != "eager":
        call = torch.compile(model, dynamic=False, mode="reduce-overhead" if kind == "reduce-overhead" else None)

    def plain() -> Any:
        if kind == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = call(x, features, mask, targets, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return plain


def run(kind: str, shape: Shape, device: torch.device, until: float) -> dict[str, Any]:
    """Warm up, then time steps one by one, until ``until`` at the latest (``time.monotonic()``)."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    reserved_before = torch.cuda.memory_reserved(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.monotonic()
    step = make_step(kind, shape, device)
    loss, times = torch.zeros(()), []
    for number in range(NUM_WARMUP + NUM_STEPS):
        began = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.current_stream(device).synchronize()
        if number >= NUM_WARMUP:
            times.append((time.perf_counter() - began) * 1e3)
            if time.monotonic() > until:
                break
        if number == NUM_WARMUP - 1:
            ready_s = time.monotonic() - start
    result = {"ms": statistics.median(times), "num_steps": len(times), "ready_s": ready_s, "loss": loss.item()}
    if cuda:
        result["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / GIBIBYTE
        torch.cuda.empty_cache()
        result["held_gib"] = (torch.cuda.memory_reserved(device) - reserved_before) / GIBIBYTE
    return result


def measure(kind: str, shape: Shape, device: torch.device, until: float = float("inf")) -> dict[str, Any]:
    """Run one kind from a clean start, and leave nothing of it behind."""
    torch._dynamo.reset()
    gs.uninstall()
    try:
        if kind != "TrainStep":
            return run(kind, shape, device, until)
        with gs.thread_context(device, seed=0):
            return run(kind, shape, device, until)
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # or only the first kind would pay for it
            torch.cuda.empty_cache()


def ratios(shape: Shape, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast TrainStep is as each other kind measured, and whether the goals are met."""
    ours = results.get("TrainStep")
    if ours is None:
        return {}
    faster = {kind: other["ms"] / ours["ms"] for kind, other in results.items() if kind != "TrainStep"}
    goals = {kind: goal for kind, goal in GOALS.get(shape.name, {}).items() if kind in faster}
    met = {kind: faster[kind] >= goal for kind, goal in goals.items()}
    peaks = [
        results[kind]["peak_gib"] for kind in ("compile", "reduce-overhead") if "peak_gib" in results.get(kind, {})
    ]
    if peaks:
        met["peak memory"] = ours["peak_gib"] <= min(peaks)
    return {"times_as_fast": faster, "goals": goals, "met": met}


def show(shape: Shape, kind: str, result: dict[str, Any]) -> None:
    memory = (
        f"peak {result['peak_gib']:7.3f} GiB  held {result['held_gib']:7.3f} GiB" if "peak_gib" in result else "(CPU)"
    )
    print(
        f"{shape.name:9} {kind:16} {result['ms']:9.3f} ms/step  {memory}  ready after {result['ready_s']:6.1f} s  "
        f"loss {result['loss']:.4f}",
        flush=True,
    )


def measure_all(
    shape: Shape, device: torch.device, kinds: tuple[str, ...] = KINDS, until: float = float("inf")
) -> dict[str, Any]:
    """Measure and print each kind in turn; those that have no time left are left out."""
    results: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        if time.monotonic() > until:
            print(f"{shape.name:9} {kind:16} not measured: out of time", flush=True)
            continue
        try:
            results[kind] = measure(kind, shape, device, until)
        except Exception as error:  # the other kinds are measured all the same
            print(f"{shape.name:9} {kind:16} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        show(shape, kind, results[kind])
    return {
        "shape": shape.name,
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "results": results,
        **ratios(shape, results),
    }


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mini", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.cuda) for name in SHAPES if name != "mini"),
    ],
)
def test_drafter_step(benchmark: Any, name: str) -> None:
    found = measure_all(SHAPES[name], default_device())
    assert set(found["results"]) == set(KINDS)
    losses = [result["loss"] for result in found["results"].values()]
    spread = (max(losses) - min(losses)) / abs(losses[0])
    assert spread < LOSS_TOLERANCE, f"the losses after the same steps differ: {losses}"
    found["check"] = f"the losses after {NUM_WARMUP + NUM_STEPS} steps agree within {spread:.1e}"
    benchmark.extra_info.update(found)
    print(json.dumps(found))
    benchmark.pedantic(lambda: None, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    device = default_device()
    shapes = [name for name in SHAPES if (name == "mini") != (device.type == "cuda")]
    parser.add_argument("--shape", nargs="*", choices=[*SHAPES, "all"], default=["all"])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="begin nothing after this")
    arguments = parser.parse_args()
    if device.type == "cpu":
        torch.set_num_threads(min(4, torch.get_num_threads()))
    until = time.monotonic() + arguments.seconds_limit
    names = shapes if "all" in arguments.shape else arguments.shape
    kinds = tuple(kind for kind in KINDS if kind in arguments.kinds)
    found = [measure_all(SHAPES[name], device, kinds, until) for name in names]
    for one in found:
        for kind, ratio in one.get("times_as_fast", {}).items():
            goal = one["goals"].get(kind)
            print(
                f"{one['shape']:9} TrainStep is {ratio:5.2f} times as fast as {kind}"
                + (f" (goal {goal})" if goal else "")
            )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
