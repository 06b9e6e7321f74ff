from __future__ import annotations

import torch

from examples.dflash.feature_cache import MemoryCache
from examples.dflash.features import FeatureSource

from .models import packed_row, tiny_target

IDS = (1, 3)


def swapped(batch, lengths):
    """The same documents in the other order."""
    first, second = lengths
    order = torch.cat([torch.arange(first, first + second), torch.arange(first), torch.arange(first + second, 40)])
    changed = {name: batch[name][order] for name in ("tokens", "positions", "loss_mask")}
    changed["document_ids"] = torch.tensor([0] * second + [1] * first + [-1] * (40 - first - second))
    return {**batch, **changed}


def test_source_gives_cached_documents_their_features_wherever_they_lie():
    target = tiny_target()
    calls = []
    features = target.features
    target.features = lambda tokens, *rest: calls.append(len(tokens)) or features(tokens, *rest)
    batch = packed_row((11, 7), 40, 4, 4)
    source = FeatureSource(target, IDS, MemoryCache(2**20))
    first = source(batch)["features"]
    again = source(swapped(batch, (11, 7)))["features"]
    assert calls == [18]
    assert torch.equal(again[:7], first[11:18])
    assert torch.equal(again[7:18], first[:11])
    assert again[18:].eq(0).all()
    torch.testing.assert_close(first, FeatureSource(tiny_target(), IDS)(batch)["features"])


def test_source_computes_what_does_not_fit_again():
    target = tiny_target()
    batch = packed_row((11, 7), 40, 4, 4)
    source = FeatureSource(target, IDS, MemoryCache(11 * 64 * 4))  # the first document's, exactly
    expected = FeatureSource(target, IDS)(batch)
    for _ in range(3):
        torch.testing.assert_close(source(batch), expected, rtol=1e-5, atol=1e-5)
    assert source.cache.num_bytes == 11 * 64 * 4


def test_source_takes_a_batch_of_padding():
    source = FeatureSource(tiny_target(), IDS, MemoryCache(2**20))
    assert source(packed_row((), 16, 4, 4))["features"].eq(0).all()


def test_memory_cache_never_exceeds_its_limit_and_keeps_copies():
    cache = MemoryCache(100)
    features = torch.ones(4, 5)
    entry = {"features": features}
    cache.put(torch.tensor([1, 2]), entry)
    cache.put(torch.tensor([1, 3]), entry)  # does not fit any more
    features.zero_()
    assert cache.num_bytes == 80
    assert cache.get(torch.tensor([1, 2]))["features"].eq(1).all()
    assert cache.get(torch.tensor([1, 3])) is None
