from __future__ import annotations

import pytest
import torch

from examples.dflash.attention import attend, cache_mask, flex_mask, sdpa_mask

from .models import packed_row

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BLOCK = 4


def dense(batch):
    """Who sees whom, said one pair at a time: [A * B, T + A * B]."""
    anchors, documents = batch["anchors"].tolist(), batch["document_ids"].tolist()
    num_context, num_slots = len(documents), len(anchors) * BLOCK
    visible = torch.zeros(num_slots, num_context + num_slots, dtype=torch.bool)
    for query in range(num_slots):
        block = query // BLOCK
        anchor = anchors[block]
        for place in range(num_context):
            if batch["anchor_valid"][block] and documents[anchor] >= 0:
                visible[query, place] = place < anchor and documents[place] == documents[anchor]
        for slot in range(num_slots):
            visible[query, num_context + slot] = slot // BLOCK == block
    return visible


def example():
    batch = packed_row((11, 9), 26, 6, BLOCK)
    batch["anchor_valid"][-1] = False
    batch["anchors"][-1] = 0
    return batch


def mask_of(make, batch, **kwargs):
    return make(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK, **kwargs)


@pytest.mark.parametrize("blocks_a_row", [1, 2, 3, 6])
def test_sdpa_mask_says_who_sees_whom(blocks_a_row):
    batch, expected = example(), dense(example())
    mask = mask_of(sdpa_mask, batch, blocks_a_row=blocks_a_row)
    length = blocks_a_row * BLOCK
    assert mask.shape == (6 // blocks_a_row, 1, length, 26 + length)
    for row in range(len(mask)):
        queries = slice(row * length, (row + 1) * length)
        own = expected[queries, 26 + row * length : 26 + (row + 1) * length]
        assert torch.equal(mask[row, 0], torch.cat([expected[queries, :26], own], dim=1))


def test_flex_mask_says_who_sees_whom():
    batch = example()
    mask = mask_of(flex_mask, batch)
    queries, keys = torch.meshgrid(torch.arange(24), torch.arange(50), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, queries, keys), dense(batch))


def test_sdpa_mask_splits_evenly_whatever_the_number_of_anchors():
    for num_anchors in (1, 7, 37, 64, 96):
        batch = packed_row((60, 60), 120, num_anchors, BLOCK)
        mask = mask_of(sdpa_mask, batch)
        assert mask.shape[0] * mask.shape[2] == num_anchors * BLOCK


@pytest.mark.parametrize("shared_heads", [1, 2])
def test_attend_by_flex_equals_attend_by_sdpa(shared_heads):
    torch.manual_seed(0)
    batch = example()
    heads = 2 * shared_heads
    queries = torch.randn(1, heads, 24, 16)
    context = torch.randn(1, 2, 26, 16), torch.randn(1, 2, 26, 16)
    own = torch.randn(1, 2, 24, 16), torch.randn(1, 2, 24, 16)
    by_flex = attend(queries, context, own, mask_of(flex_mask, batch))

    def rows(x, n):
        return x.unflatten(2, (n, -1))[0].transpose(0, 1)

    for blocks_a_row in (2, 6):
        n = 6 // blocks_a_row
        by_sdpa = attend(
            rows(queries, n),
            context,
            (rows(own[0], n), rows(own[1], n)),
            mask_of(sdpa_mask, batch, blocks_a_row=blocks_a_row),
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


def test_masks_need_no_value_on_the_host():
    batch = {name: tensor.to("meta") for name, tensor in example().items()}
    assert mask_of(sdpa_mask, batch).shape == (1, 1, 24, 50)
