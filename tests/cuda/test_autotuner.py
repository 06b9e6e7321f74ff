"""First launches of autotuned kernels by eight threads at once (A12), on a GPU."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphsafe
from tests.helpers import run_threads

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.cuda

NUM_THREADS = 8
TIMEOUT_S = 300.0


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    was_installed = bool(graphsafe.installed())
    graphsafe.install()
    yield
    if not was_installed:
        graphsafe.uninstall()


@triton.jit
def add_in_place(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y[i] += x[i]"""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x + y, mask=mask)


def cold_kernel(tunings: list[int], hooked: list[tuple[int, int]]) -> Any:
    """An autotuned ``add_in_place`` with an empty cache, that logs its tunings and its hooks' tensors."""

    def prune(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
        tunings.append(named["n"])
        return configs

    def hook(named: dict[str, Any]) -> None:
        hooked.append((threading.get_ident(), named["x_ptr"].data_ptr()))

    configs = [triton.Config({"BLOCK": block}, num_warps=4, pre_hook=hook) for block in (128, 256, 512)]
    return triton.autotune(
        configs=configs, key=["n"], restore_value=["y_ptr"], prune_configs_by={"early_config_prune": prune}
    )(add_in_place)


def test_triton_autotuner_launched_first_by_eight_threads_tunes_once_a_key_and_every_result_is_right() -> None:
    assert graphsafe.installed()["A12"] in ("repaired", "absent", "pending")
    tunings: list[int] = []
    hooked: list[tuple[int, int]] = []
    kernel = cold_kernel(tunings, hooked)
    sizes = (10_000, 33_333)
    xs = [torch.randn(sizes[index % 2], device="cuda:0") for index in range(NUM_THREADS)]
    torch.cuda.synchronize()

    def body(index: int) -> torch.Tensor:
        x = xs[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            y = torch.ones_like(x)
            for _ in range(3):
                kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
            return y.cpu()

    results = run_threads(NUM_THREADS, body, TIMEOUT_S)
    for x, result in zip(xs, results, strict=True):
        expected = torch.ones_like(x) + x + x + x
        assert torch.equal(result, expected.cpu())
    assert sorted(tunings) == sorted(sizes)
    tensors = {ident: set() for ident, _ in hooked}  # type: ignore[var-annotated]
    for ident, address in hooked:
        tensors[ident].add(address)
    assert all(len(addresses) == 1 for addresses in tensors.values()), "a hook got another thread's tensor"


@pytest.mark.slow
@pytest.mark.parametrize("coordinate_descent", [False, True])
def test_inductor_kernels_launched_first_by_eight_threads_tune_once_and_every_result_is_right(
    coordinate_descent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.runtime.triton_heuristics as heuristics

    tuned: Counter[int] = Counter()
    kept: list[Any] = []  # so that no id is used twice
    original = heuristics.CachingAutotuner.autotune_to_one_config

    def autotune(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(self)
        tuned[id(self)] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(heuristics.CachingAutotuner, "autotune_to_one_config", autotune)
    constant = 1 + (time.time_ns() % 1_000_003) / 1e7  # in the kernel's source: no cache on disk has it

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x * constant) + y.t()).softmax(-1) * y

    options = {"max_autotune": True, "coordinate_descent_tuning": coordinate_descent}
    compiled = graphsafe.compile(fn, options=options)
    tensors = [[torch.randn(512, 512, device="cuda:0") for _ in range(2)] for _ in range(NUM_THREADS)]
    torch.cuda.synchronize()

    def body(index: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                result = compiled(*tensors[index])
            return result.cpu()

    for pair, result in zip(tensors, run_threads(NUM_THREADS, body, TIMEOUT_S), strict=True):
        assert torch.allclose(result, fn(*pair).cpu(), rtol=1e-4, atol=1e-5)
    assert not tuned or max(tuned.values()) == 1


def test_first_launches_beside_captures_neither_hang_nor_break_them() -> None:
    tunings: list[int] = []
    kernel = cold_kernel(tunings, [])

    def body(index: int) -> torch.Tensor:
        with graphsafe.thread_context("cuda:0", seed=index) as context:
            if index % 2:
                x, y = torch.ones(5_000 + index, device="cuda:0"), torch.zeros(5_000 + index, device="cuda:0")
                with context.eager(rng=False):
                    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
                return y.cpu()
            total = torch.zeros(8, device="cuda:0")
            context.synchronize()
            for _ in range(5):
                with graphsafe.capture() as graph:
                    total.add_(1)
                graph.replay()
            context.synchronize()
            return total.cpu()

    results = run_threads(4, body, TIMEOUT_S)
    for index, result in enumerate(results):
        assert torch.equal(result, torch.full_like(result, 1.0 if index % 2 else 5.0))
    assert len(tunings) == 2
