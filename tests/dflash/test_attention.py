from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from examples.dflash.attention import attend, cache_mask, document_starts, flex_mask, sdpa_mask

from .models import packed_row

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BLOCK = 4
WINDOWS = [None, 1, 2, 4, 6, 100]  # none, the slot alone, within the block, the block, and beyond it


def dense(batch, window=None):
    """Who sees whom, said one pair at a time: [A * B, T + A * B]."""
    anchors, documents = batch["anchors"].tolist(), batch["document_ids"].tolist()
    num_context, num_slots = len(documents), len(anchors) * BLOCK
    visible = torch.zeros(num_slots, num_context + num_slots, dtype=torch.bool)
    for query in range(num_slots):
        block = query // BLOCK
        anchor = anchors[block]
        for place in range(num_context):
            if batch["anchor_valid"][block] and documents[anchor] >= 0:
                seen = place < anchor and documents[place] == documents[anchor]
                visible[query, place] = seen and (window is None or anchor + query % BLOCK - place < window)
        for slot in range(num_slots):
            seen = slot // BLOCK == block
            visible[query, num_context + slot] = seen and (window is None or 0 <= query - slot < window)
    return visible


def example():
    batch = packed_row((11, 9), 26, 6, BLOCK)
    batch["anchor_valid"][-1] = False
    batch["anchors"][-1] = 0
    return batch


def mask_of(make, batch, **kwargs):
    return make(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK, **kwargs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks_a_row", [1, 2, 3, 6])
def test_sdpa_mask_says_who_sees_whom(blocks_a_row, window):
    batch, expected = example(), dense(example(), window)
    mask = mask_of(sdpa_mask, batch, blocks_a_row=blocks_a_row, window=window)
    length = blocks_a_row * BLOCK
    assert mask.shape == (6 // blocks_a_row, 1, length, 26 + length)
    for row in range(len(mask)):
        queries = slice(row * length, (row + 1) * length)
        own = expected[queries, 26 + row * length : 26 + (row + 1) * length]
        assert torch.equal(mask[row, 0], torch.cat([expected[queries, :26], own], dim=1))


@pytest.mark.parametrize("window", WINDOWS)
def test_flex_mask_says_who_sees_whom(window):
    batch = example()
    mask = mask_of(flex_mask, batch, window=window)
    queries, keys = torch.meshgrid(torch.arange(24), torch.arange(50), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, queries, keys), dense(batch, window))


@pytest.mark.parametrize("window", [None, 3, 40, 300])
@pytest.mark.parametrize(
    ("documents", "num_tokens", "num_anchors", "block_size"),
    [((200, 90, 300), 640, 48, 8), ((500,), 512, 16, 16), ((3, 2, 130), 300, 37, 10), ((), 256, 32, 8)],
)
def test_flex_mask_visits_the_tiles_that_hold_a_visible_pair(documents, num_tokens, num_anchors, block_size, window):
    batch = packed_row(documents, num_tokens, num_anchors, block_size)
    ours = flex_mask(batch["anchors"], batch["anchor_valid"], batch["document_ids"], block_size, window)
    num_queries = num_anchors * block_size
    theirs = create_block_mask(ours.mask_mod, None, None, num_queries, num_tokens + num_queries, device="cpu")

    def tiles(numbers, places):
        found = torch.zeros(places.shape[-2:], dtype=torch.bool)
        for line, (number, row) in enumerate(zip(numbers[0, 0], places[0, 0], strict=True)):
            found[line, row[:number]] = True
        return found

    partial = tiles(ours.kv_num_blocks, ours.kv_indices)
    full = tiles(ours.full_kv_num_blocks, ours.full_kv_indices)
    exact_partial = tiles(theirs.kv_num_blocks, theirs.kv_indices)
    exact_full = tiles(theirs.full_kv_num_blocks, theirs.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(partial | full, exact_partial | exact_full)
    assert torch.equal(full, exact_full)
    assert torch.equal(tiles(ours.q_num_blocks, ours.q_indices), partial.T)


def test_flex_mask_of_a_row_of_padding_shows_each_block_itself():
    batch = packed_row((), 256, 32, 8)
    mask = flex_mask(batch["anchors"], batch["anchor_valid"], batch["document_ids"], 8)
    queries, keys = torch.meshgrid(torch.arange(256), torch.arange(512), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, queries, keys), keys - 256 == queries // 8 * 8 + (keys - 256) % 8)


def test_document_starts_are_where_each_tokens_document_begins():
    documents = torch.tensor([0, 0, 0, 1, 2, 2, -1, -1])
    assert document_starts(documents).tolist() == [0, 0, 0, 3, 4, 4, 6, 6]


def test_sdpa_mask_splits_evenly_whatever_the_number_of_anchors():
    for num_anchors in (1, 7, 37, 64, 96):
        batch = packed_row((60, 60), 120, num_anchors, BLOCK)
        mask = mask_of(sdpa_mask, batch)
        assert mask.shape[0] * mask.shape[2] == num_anchors * BLOCK


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shared_heads", [1, 2])
def test_attend_by_flex_equals_attend_by_sdpa(shared_heads, window):
    torch.manual_seed(0)
    batch = example()
    heads = 2 * shared_heads
    queries = torch.randn(1, heads, 24, 16)
    context = torch.randn(1, 2, 26, 16), torch.randn(1, 2, 26, 16)
    own = torch.randn(1, 2, 24, 16), torch.randn(1, 2, 24, 16)
    by_flex = attend(queries, context, own, mask_of(flex_mask, batch, window=window), sliding=window is not None)

    def rows(x, n):
        return x.unflatten(2, (n, -1))[0].transpose(0, 1)

    for blocks_a_row in (2, 6):
        n = 6 // blocks_a_row
        by_sdpa = attend(
            rows(queries, n),
            context,
            (rows(own[0], n), rows(own[1], n)),
            mask_of(sdpa_mask, batch, blocks_a_row=blocks_a_row, window=window),
        )
        torch.testing.assert_close(by_sdpa, rows(by_flex, n), rtol=1e-5, atol=1e-5)
    assert by_flex.isfinite().all()


def test_cache_mask_shows_each_row_its_own_length_and_never_the_last_place():
    mask = cache_mask(torch.tensor([0, 2, 9]), 5, 3)
    assert mask.shape == (3, 1, 3, 8)
    assert mask[:, 0, 0].int().tolist() == [
        [0, 0, 0, 0, 0, 1, 1, 1],
        [1, 1, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 0, 1, 1, 1],
    ]


def test_cache_mask_of_a_sliding_layer_is_a_causal_window_over_cache_and_block():
    mask = cache_mask(torch.tensor([0, 2, 4]), 6, 3, window=3)
    assert mask.shape == (3, 1, 3, 9)
    for row, length in enumerate((0, 2, 4)):
        for slot in range(3):
            visible = [length + slot - 2 <= place < length for place in range(6)]
            visible += [slot - 2 <= other <= slot for other in range(3)]
            assert mask[row, 0, slot].tolist() == visible


def test_cache_mask_of_a_window_over_all_shows_what_a_full_one_shows_but_later_slots():
    lengths = torch.tensor([0, 2, 9])
    full, sliding = cache_mask(lengths, 5, 3), cache_mask(lengths, 5, 3, window=100)
    assert torch.equal(sliding[..., :5], full[..., :5])
    assert torch.equal(sliding[:, 0, :, 5:], torch.ones(3, 3, dtype=torch.bool).tril().expand(3, -1, -1))


def test_masks_need_no_value_on_the_host():
    batch = {name: tensor.to("meta") for name, tensor in example().items()}
    for window in (None, 5):
        assert mask_of(sdpa_mask, batch, window=window).shape == (1, 1, 24, 50)
        assert cache_mask(batch["anchors"], 7, BLOCK, window).shape == (6, 1, BLOCK, 7 + BLOCK)
