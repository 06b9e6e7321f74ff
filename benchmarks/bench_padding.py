"""Fixed-shape operations beside naive torch: loops over slices, and operations whose shapes depend on values.

The naive ones read values on the host, so no graph can hold them; the fixed ones pay for that with work on every place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsafe as gs

from .compare import compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []
N, K = 49_152, 512
BUCKETS = (128, 256, 512, 1024)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def mask() -> torch.Tensor:
    return (torch.rand(N, generator=torch.Generator().manual_seed(0)) < 0.5).to(DEVICE)


def test_pack(benchmark: Any) -> None:
    documents = [torch.arange(n) for n in range(100, 400, 3)]

    def naive() -> gs.padding.Packed:
        tokens, ids = torch.zeros(N, dtype=torch.int64), torch.full((N,), -1)
        positions, lengths = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.int64)
        start = 0
        for i, document in enumerate(documents):
            end = start + len(document)
            tokens[start:end] = document
            ids[start:end] = i
            positions[start:end] = torch.arange(len(document))
            lengths[i] = len(document)
            start = end
        return gs.padding.Packed(tokens, ids, positions, lengths, torch.tensor(start))

    sides = {"padding.pack": lambda: gs.padding.pack(documents, N), "a loop over slices": naive}
    compare(benchmark, sides, config={"device": "cpu", "documents": f"{len(documents)} of 100 to 397, budget {N}"})


@pytest.mark.parametrize("what", ["pad_to", "pad_to_bucket"])
def test_pad(benchmark: Any, what: str) -> None:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def ours() -> torch.Tensor:
        return gs.padding.pad_to(x, 512) if what == "pad_to" else gs.padding.pad_to_bucket(x, BUCKETS)

    def naive() -> torch.Tensor:
        length = 512 if what == "pad_to" else min(bucket for bucket in BUCKETS if bucket >= len(x))
        padded = x.new_full((length, 64), 0)
        padded[: len(x)] = x
        return padded

    config = {"device": DEVICE, "x": "float32 (300, 64) to 512"}
    compare(benchmark, {f"padding.{what}": ours, "new_full and a slice": naive}, config=config, after=synchronize)


def test_fixed_nonzero(benchmark: Any, mask: torch.Tensor) -> None:
    def naive() -> tuple[torch.Tensor, torch.Tensor]:
        found = mask.nonzero().squeeze(-1)
        indices = torch.full((N,), -1, device=DEVICE)
        indices[: len(found)] = found
        return indices, torch.tensor(len(found), device=DEVICE)

    sides = {"padding.fixed_nonzero": lambda: gs.padding.fixed_nonzero(mask, N), "nonzero and a slice": naive}
    compare(benchmark, sides, config={"device": DEVICE, "mask": f"{N} places, half of them true"}, after=synchronize)


def test_random_topk(benchmark: Any, mask: torch.Tensor) -> None:
    def ours() -> torch.Tensor:
        return gs.padding.random_topk(mask, K)[0]

    def naive() -> torch.Tensor:
        places = mask.nonzero().squeeze(-1)
        return places[torch.randperm(len(places), device=DEVICE)[:K]].sort().values

    def check() -> str:
        for chosen in (ours(), naive()):
            assert chosen.unique().numel() == K, "a place was chosen twice"
            assert bool(mask[chosen].all()), "a place that is false was chosen"
            assert torch.equal(chosen, chosen.sort().values), "the places are out of order"
        return f"both chose {K} different true places, ascending (which ones is random)"

    config = {"device": DEVICE, "mask": f"{N} places, half of them true", "k": K}
    sides = {"padding.random_topk": ours, "nonzero and randperm": naive}
    compare(benchmark, sides, config=config, check=check, after=synchronize)
