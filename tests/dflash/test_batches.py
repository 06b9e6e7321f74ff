"""Packing documents to fixed shapes, and drawing anchors."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.dflash.batches import (
    batch_specs,
    batches,
    eligible_anchors,
    empty_batch,
    num_batches,
    share_anchors,
)
from examples.dflash.config import PRESETS, InputError
from examples.dflash.data import Document

CONFIG = dataclasses.replace(PRESETS["demo"], token_budget=64, num_anchors=12, block_size=4, seed=3)


def document(number, prompt_length, answer_length):
    tokens = [1000 * (number + 1) + place for place in range(prompt_length + answer_length)]
    return Document(number, tokens, [False] * prompt_length + [True] * answer_length, prompt_length)


DOCUMENTS = [document(number, 3 + number % 4, 4 + 5 * (number % 5)) for number in range(23)]


@given(st.lists(st.booleans(), max_size=40), st.integers(2, 9))
def test_eligible_anchors_are_supervised_with_a_supervised_label_in_the_block(mask, block_size):
    expected = [a for a, flag in enumerate(mask) if flag and any(mask[a + 1 : a + block_size])]
    assert eligible_anchors(Document(0, [0] * len(mask), mask, 0), block_size) == expected


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20)), min_size=1, max_size=12), st.integers(1, 60))
def test_shares_use_every_anchor_within_the_limits(sizes, num_anchors):
    eligible = [count for count, _ in sizes]
    supervised = [count + more for count, more in sizes]
    shares = share_anchors(supervised, eligible, num_anchors)
    assert sum(shares) == min(num_anchors, sum(eligible))
    assert all(0 <= share <= count for share, count in zip(shares, eligible, strict=True))
    if len(sizes) <= num_anchors:
        assert min(shares) >= 1


def test_shares_are_in_proportion_to_supervised_tokens():
    assert share_anchors([10, 30, 60], [100, 100, 100], 20) == pytest.approx([2, 6, 12], abs=1)


def test_an_epoch_holds_each_document_once_and_whole():
    seen = []
    for batch in batches(DOCUMENTS, CONFIG, epoch=0):
        for index in range(int(batch["document_ids"].max()) + 1):
            rows = batch["document_ids"] == index
            seen.append(tuple(batch["tokens"][rows].tolist()))
            assert batch["positions"][rows].tolist() == list(range(int(rows.sum())))
    assert sorted(seen) == sorted(tuple(document.tokens) for document in DOCUMENTS)


def test_batches_have_the_shapes_of_their_specs():
    specs = batch_specs(CONFIG)
    for batch in [*batches(DOCUMENTS, CONFIG, epoch=0), empty_batch(CONFIG)]:
        assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
            name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items()
        }


def test_anchors_are_eligible_sorted_and_first():
    by_start = {document.tokens[0]: document for document in DOCUMENTS}
    for batch in batches(DOCUMENTS, CONFIG, epoch=1):
        valid = batch["anchor_valid"]
        count = int(valid.sum())
        assert valid[:count].all()
        anchors = batch["anchors"][:count]
        assert (anchors.diff() > 0).all()
        assert (batch["anchors"][count:] == 0).all()
        for anchor in anchors.tolist():
            place = int(batch["positions"][anchor])
            source = by_start[int(batch["tokens"][anchor - place])]
            assert place in eligible_anchors(source, CONFIG.block_size)
        drawn = set(batch["document_ids"][anchors].tolist())
        assert drawn == set(range(int(batch["document_ids"].max()) + 1))


def test_epochs_differ_and_repeat_exactly():
    def epoch(number):
        return [{name: t.tolist() for name, t in batch.items()} for batch in batches(DOCUMENTS, CONFIG, number)]

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)


def test_places_drawn_in_a_document_do_not_depend_on_its_neighbours():
    mine, other = document(5, 4, 20), document(6, 7, 20)

    def drawn(documents, num_anchors):
        batch = next(batches(documents, dataclasses.replace(CONFIG, num_anchors=num_anchors), epoch=2))
        tokens = batch["tokens"][batch["anchors"][batch["anchor_valid"]]].tolist()
        return [token for token in tokens if token in mine.tokens]

    assert len(drawn([mine], 4)) == 4
    assert drawn([mine], 4) == drawn([mine, other], 8)


def test_num_batches_is_what_batches_yields():
    for number in range(3):
        assert num_batches(DOCUMENTS, CONFIG, number) == len(list(batches(DOCUMENTS, CONFIG, number)))


def test_document_without_an_eligible_place_is_left_out():
    useless = Document(99, [1, 2, 3], [False, False, True], 2)
    tokens = torch.cat([batch["tokens"] for batch in batches([*DOCUMENTS[:2], useless], CONFIG, 0)])
    assert not set(useless.tokens) & set(tokens.tolist())
    with pytest.raises(InputError, match="nothing to train on"):
        next(batches([useless], CONFIG, 0))


def test_empty_batch_is_all_padding():
    batch = empty_batch(CONFIG)
    assert (batch["document_ids"] == -1).all()
    assert not batch["anchor_valid"].any()
    assert not batch["loss_mask"].any()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 40)), min_size=1, max_size=40), st.integers(0, 5))
def test_packing_never_exceeds_the_budget_and_loses_nothing(sizes, epoch):
    documents = [document(number, *size) for number, size in enumerate(sizes)]
    rows = list(batches(documents, CONFIG, epoch))
    assert sum(int((row["document_ids"] >= 0).sum()) for row in rows) == sum(len(d.tokens) for d in documents)
