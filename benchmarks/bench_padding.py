"""Fixed-shape operations beside those of torch that synchronise or permute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsafe as gs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 49_152


@pytest.fixture
def mask() -> torch.Tensor:
    return (torch.rand(N, generator=torch.Generator().manual_seed(0)) < 0.5).to(DEVICE)


def test_fixed_nonzero(benchmark: Any, mask: torch.Tensor) -> None:
    benchmark(gs.padding.fixed_nonzero, mask, N)


def test_torch_nonzero(benchmark: Any, mask: torch.Tensor) -> None:
    benchmark(torch.nonzero, mask)


def test_random_topk(benchmark: Any, mask: torch.Tensor) -> None:
    benchmark(gs.padding.random_topk, mask, 512)


def test_torch_randperm_of_nonzero(benchmark: Any, mask: torch.Tensor) -> None:
    def choose() -> torch.Tensor:
        places = mask.nonzero().squeeze(-1)
        return places[torch.randperm(places.numel(), device=places.device)[:512]].sort().values

    benchmark(choose)


def test_pack(benchmark: Any) -> None:
    documents = [torch.ones(n, dtype=torch.int64) for n in range(100, 400, 3)]
    benchmark(gs.padding.pack, documents, N)
