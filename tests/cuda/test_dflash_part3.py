"""What goes wrong in public trainers, on a GPU: see ``tests/dflash/test_pitfalls.py``."""

from __future__ import annotations

import pytest
import torch

from examples.dflash.feature_cache import MemoryCache
from examples.dflash.features import FeatureSource
from examples.dflash.target import Target
from graphsafe import thread_context
from tests.dflash.models import packed_row, tiny_target
from tests.helpers import run_threads

pytestmark = pytest.mark.cuda
FIRST = torch.device("cuda", 0)
IDS = (1, 3)


def on_gpu(dtype=torch.float32):
    return Target(tiny_target().model.to(FIRST, dtype))


def test_first_batch_is_computed_even_if_all_of_it_is_cached():
    target, batches = on_gpu(), [packed_row((60, 30), 128, 8, 4, seed=seed) for seed in range(2)]
    torch.compiler.reset()
    with thread_context(FIRST), torch.no_grad():
        first = FeatureSource(target, IDS, MemoryCache(2**20))
        first(batches[0])
        torch.compiler.reset()  # as in a later run, which finds the first rows on the disk
        later = FeatureSource(target, IDS, first.cache)
        found = later(batches[0])["features"]
        with torch.compiler.set_stance("fail_on_recompile"):
            later(batches[0])
            fresh = later(batches[1])["features"]
        torch.testing.assert_close(found[:90], first(batches[0])["features"][:90])
        torch.testing.assert_close(fresh[:90], FeatureSource(target, IDS)(batches[1])["features"][:90])


@pytest.mark.parametrize("label_chunk", [None, 50])
def test_cached_rows_are_not_overwritten_by_the_targets_graph(label_chunk):
    """The graph's tensors are its own: what is kept of them must be a copy, whatever is replayed next."""
    target = on_gpu(torch.bfloat16)
    batches = [packed_row((60 - seed, 30 + seed), 128, 8, 4, seed=seed) for seed in range(8)]
    with thread_context(FIRST), torch.no_grad():
        plain = FeatureSource(target, IDS, label_chunk=label_chunk)
        cached = FeatureSource(target, IDS, MemoryCache(2**24), label_chunk=label_chunk, graphed=True)
        for batch in batches * 2:  # computed by eager calls, a capture and replays; then found
            ours, expected = cached(batch), plain(batch)
            for name, tensor in expected.items():
                assert torch.equal(ours[name][:90], tensor[:90]), name


def test_two_threads_share_a_target_on_one_device():
    target = on_gpu(torch.bfloat16)
    batches = [packed_row((60 - seed, 30 + seed), 128, 8, 4, seed=seed) for seed in range(12)]
    with thread_context(FIRST), torch.no_grad():
        plain = FeatureSource(target, IDS)
        expected = [plain(batch)["features"].cpu() for batch in batches]

    def body(rank):
        found = []
        with thread_context(FIRST) as context, torch.no_grad():
            source = FeatureSource(target, IDS, graphed=True)
            for batch in batches[rank::2]:
                with context.eager(rng=False):
                    features = source(batch)["features"]
                found.append(features.cpu())
        return found

    for rank, found in enumerate(run_threads(2, body)):
        for ours, theirs in zip(found, expected[rank::2], strict=True):
            assert torch.equal(ours[:90], theirs[:90])
