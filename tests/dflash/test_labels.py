"""Labels that the target says: computed in chunks, kept in caches, and at the right places."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from examples.dflash.data import Document
from examples.dflash.feature_cache import MemoryCache
from examples.dflash.features import FeatureSource
from examples.dflash.loss import labels_and_weights
from examples.dflash.target import Target

from .models import MASK_TOKEN, VOCAB, packed_row, tiny_target
from .test_features import swapped
from .test_train import configuration, run
from .texts import counting_target

IDS = (1, 3)
BLOCK = 4


def said(target, batch, **kwargs):
    return target.features_and_tokens(batch["tokens"], batch["document_ids"], batch["positions"], IDS, **kwargs)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_target_tokens_are_what_the_model_says_to_each_document_alone(chunk):
    target, batch = tiny_target(), packed_row((11, 7, 13), 40, 1, BLOCK)
    features, tokens = said(target, batch, chunk=chunk)
    for start, length in ((0, 11), (11, 7), (18, 13)):
        document = slice(start, start + length)
        logits = target.model(batch["tokens"][None, document]).logits[0]
        assert torch.equal(tokens[document], logits.argmax(-1))
    assert tokens.dtype == torch.int64
    assert tokens[31:].eq(0).all()
    assert torch.equal(features, target.features(batch["tokens"], batch["document_ids"], batch["positions"], IDS))


class Largest(TorchDispatchMode):
    """Remembers the most rows of a product that was as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "mm" in function._schema.name and out.shape[-1] == VOCAB:
            self.rows = max(self.rows, out.numel() // VOCAB)
        return out


def test_target_tokens_need_logits_of_a_chunk_at_once_and_features_alone_need_none():
    target, batch = tiny_target(), packed_row((11, 7, 13), 40, 1, BLOCK)
    with Largest() as largest:
        said(target, batch, chunk=8)
    assert largest.rows == 8
    with Largest() as largest:
        target.features(batch["tokens"], batch["document_ids"], batch["positions"], IDS)
    assert largest.rows == 0


def test_target_tokens_of_padding_alone_are_zero():
    features, tokens = said(tiny_target(), packed_row((), 16, 4, BLOCK))
    assert features.eq(0).all()
    assert tokens.eq(0).all()


def test_target_without_its_last_layers_says_nothing():
    target = tiny_target()
    target.drop_layers_after(3)
    with pytest.raises(RuntimeError, match="last layers have been dropped"):
        said(target, packed_row((11,), 16, 1, BLOCK))


def test_label_of_a_slot_is_what_the_target_says_one_place_before_it():
    batch = packed_row((19, 14), 40, 6, BLOCK)
    batch["anchors"][-1] = 31  # two tokens before its document's end
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    args = [batch[name] for name in names]
    target_tokens = 1000 + torch.arange(40)  # to follow the token at p
    data, weights = labels_and_weights(*args, block_size=BLOCK, decay=3.0)
    labels, same_weights = labels_and_weights(*args, block_size=BLOCK, decay=3.0, target_tokens=target_tokens)
    assert torch.equal(weights, same_weights)
    for index, anchor in enumerate(batch["anchors"].tolist()):
        for slot in range(1, BLOCK):
            if weights[index, slot - 1] > 0:
                assert labels[index, slot - 1] == 1000 + anchor + slot - 1
                assert data[index, slot - 1] == batch["tokens"][anchor + slot]
    assert (weights[-1] > 0).tolist() == [True, False, False]


def test_source_gives_cached_documents_their_target_tokens_wherever_they_lie():
    target, batch, calls = tiny_target(), packed_row((11, 7), 40, 4, BLOCK), []
    both = target.features_and_tokens
    target.features_and_tokens = lambda tokens, *rest: calls.append(len(tokens)) or both(tokens, *rest)
    source = FeatureSource(target, IDS, MemoryCache(2**20), label_chunk=5)
    first, again = source(batch), source(swapped(batch, (11, 7)))
    assert calls == [18]
    assert first.keys() == again.keys() == {"features", "target_tokens"}
    for name in first:
        assert torch.equal(again[name][:7], first[name][11:18])
        assert torch.equal(again[name][7:18], first[name][:11])
        assert again[name][18:].eq(0).all()
    features, tokens = said(tiny_target(), batch)
    torch.testing.assert_close(first["features"], features)
    assert torch.equal(first["target_tokens"], tokens)
    assert source.cache.num_bytes == 18 * (64 * 4 + 8)


def test_source_computes_documents_again_whose_target_tokens_it_does_not_have():
    target, batch = tiny_target(), packed_row((11, 7), 40, 4, BLOCK)
    source = FeatureSource(target, IDS, MemoryCache(2**20))
    source(batch)
    labelled = FeatureSource(target, IDS, label_chunk=5)
    labelled.cache = source.cache  # which holds features alone
    assert torch.equal(labelled(batch)["target_tokens"], said(target, batch)[1])


def counting(count=12):
    """Documents in which the counting target is always right."""
    return [
        Document(number, [(5 * number + place) % 50 for place in range(20)], [place >= 4 for place in range(20)], 4)
        for number in range(count)
    ]


def noise(count=300, seed=0):
    """Documents that nobody can foresee."""
    rng = random.Random(seed)
    return [
        Document(number, [rng.randrange(50) for _ in range(20)], [place >= 4 for place in range(20)], 4)
        for number in range(count)
    ]


@pytest.mark.parametrize("cache_features", [0.0, 0.1])
def test_train_on_what_the_target_says_equals_training_on_data_that_it_agrees_with(tmp_path, cache_features):
    settings = dict(max_steps=5, cache_features=cache_features, mask_token_id=MASK_TOKEN)
    _, data = run(configuration(tmp_path / "data", **settings), counting(), counting_target(50, VOCAB))
    config = configuration(tmp_path / "target", labels="target", **settings)
    _, target = run(config, counting(), counting_target(50, VOCAB), num_targets=2)
    assert [record["loss"] for record in target] == [record["loss"] for record in data]


def test_train_on_what_the_target_says_learns_it_and_not_the_data(tmp_path):
    settings = dict(max_steps=100, log_every=20, lr=1e-2, mask_token_id=MASK_TOKEN)
    accuracy = {}
    for labels in ("data", "target"):
        config = configuration(tmp_path / labels, labels=labels, **settings)
        _, log = run(config, noise(), counting_target(50, VOCAB))
        accuracy[labels] = log[-1]["slot_accuracy"]
    assert accuracy["target"][0] > 0.4 > 0.2 > accuracy["data"][0]  # one more than the anchor's token, which it sees
    assert accuracy["target"][1] < 0.2  # one more than a token that it does not


def test_train_on_data_does_not_ask_the_target_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "features_and_tokens", lambda *args: pytest.fail("the head ran"))
    target = tiny_target()
    code, _ = run(configuration(tmp_path, max_steps=2), target=target)
    assert code == 0
    assert len(target.decoder.layers) == 4  # up to the last that is read


def test_train_on_what_the_target_says_keeps_all_its_layers(tmp_path):
    target = tiny_target()
    code, _ = run(configuration(tmp_path, max_steps=2, labels="target"), target=target, num_drafters=2)
    assert code == 0
    assert len(target.decoder.layers) == target.num_layers
