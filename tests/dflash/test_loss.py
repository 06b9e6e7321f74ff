from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from examples.dflash import loss as loss_module
from examples.dflash.attention import sdpa_mask
from examples.dflash.loss import block_loss, labels_and_weights, mean_loss

from .models import VOCAB, packed_row, random_drafter

BLOCK = 4


def of(batch, decay=3.0):
    names = ("tokens", "document_ids", "loss_mask", "anchors", "anchor_valid")
    return labels_and_weights(*(batch[name] for name in names), block_size=BLOCK, decay=decay)


def test_labels_are_the_tokens_at_the_slots_own_positions():
    batch = packed_row((19, 14), 40, 6, BLOCK)
    labels, weights = of(batch)
    for index, anchor in enumerate(batch["anchors"].tolist()):
        for slot in range(1, BLOCK):
            place = anchor + slot
            same = place < 40 and batch["document_ids"][place] == batch["document_ids"][anchor]
            if same and batch["loss_mask"][place]:
                assert labels[index, slot - 1] == batch["tokens"][place]
                assert weights[index, slot - 1].item() == pytest.approx(math.exp(-(slot - 1) / 3.0))
            else:
                assert weights[index, slot - 1] == 0


def test_labels_end_with_the_document_and_the_row():
    batch = packed_row((6, 6), 12, 2, BLOCK)
    batch["anchors"] = torch.tensor([4, 10])  # one token is left of each document
    batch["anchor_valid"] = torch.tensor([True, True])
    _, weights = of(batch)
    assert (weights > 0).tolist() == [[True, False, False], [True, False, False]]


def test_weights_are_zero_for_padded_blocks_and_unsupervised_labels():
    batch = packed_row((19,), 24, 3, BLOCK)
    batch["anchor_valid"][1:] = False
    batch["loss_mask"][batch["anchors"][0] + 2] = False
    _, weights = of(batch)
    assert (weights > 0).tolist() == [[True, False, True], [False] * 3, [False] * 3]


@pytest.mark.parametrize("chunk", [1, 7, 18, 1000])
def test_block_loss_equals_plain_cross_entropy_and_its_gradient(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(6, BLOCK, 32, requires_grad=True)
    head = torch.randn(VOCAB, 32)
    labels, weights = torch.randint(0, VOCAB, (6, BLOCK - 1)), torch.rand(6, BLOCK - 1)
    weights[0, 1] = 0
    loss = block_loss(hidden, head, labels, weights, chunk=chunk)
    mean_loss(loss.weighted_sum, loss.weight).backward()

    plain = hidden.detach().double().requires_grad_()
    logits = plain[:, 1:].flatten(0, 1) @ head.double().T
    each = F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten().double()
    expected = each.sum() / weights.double().sum()
    expected.backward()
    torch.testing.assert_close((loss.weighted_sum / loss.weight).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-5, atol=1e-6)
    assert hidden.grad[:, 0].eq(0).all()


def test_block_loss_never_holds_logits_of_more_than_a_chunk(monkeypatch):
    sizes = []
    chunk_cross_entropy = loss_module.chunk_cross_entropy

    def watched(hidden, *args):
        sizes.append(len(hidden))
        return chunk_cross_entropy(hidden, *args)

    monkeypatch.setattr(loss_module, "chunk_cross_entropy", watched)
    hidden = torch.randn(6, BLOCK, 32, requires_grad=True)
    head, labels = torch.randn(VOCAB, 32), torch.zeros(6, BLOCK - 1, dtype=torch.int64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = block_loss(hidden, head, labels, torch.ones(6, BLOCK - 1), chunk=4)
    loss.weighted_sum.backward()
    assert sizes == [4] * 5
    assert max(saved) <= hidden.numel()


def test_block_loss_counts_hits_by_slot_and_by_prefix():
    head = torch.eye(VOCAB)
    labels = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    guesses = torch.tensor([[1, 2, 3], [4, 0, 6], [7, 8, 9]])
    hidden = F.one_hot(torch.cat([torch.zeros(3, 1, dtype=torch.int64), guesses], 1), VOCAB).float()
    weights = torch.ones(3, 3)
    weights[2, 1:] = 0  # the document ends
    counts = block_loss(hidden, head, labels, weights, chunk=100).counts
    assert counts.correct.tolist() == [3, 1, 2]
    assert counts.total.tolist() == [3, 2, 2]
    assert counts.accepted.tolist() == [3, 1, 1]
    assert counts.blocks.item() == 3


def test_loss_of_a_batch_of_padding_is_zero_with_zero_gradients():
    batch = packed_row((), 16, 4, BLOCK)
    drafter = random_drafter()
    labels, weights = of(batch)
    mask = sdpa_mask(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK)
    hidden = drafter(torch.zeros(16, 64), torch.randn(4, BLOCK, 32), batch["positions"], torch.zeros(4, BLOCK), mask)
    loss = block_loss(hidden, torch.randn(VOCAB, 32), labels, weights, chunk=5)
    mean = mean_loss(loss.weighted_sum, loss.weight)
    mean.backward()
    assert mean.item() == 0
    assert loss.counts.blocks.item() == 0
    assert all(parameter.grad.eq(0).all() for parameter in drafter.parameters())


def test_every_parameter_moves_in_one_step_of_training_in_bfloat16():
    torch.manual_seed(0)
    batch = packed_row((19, 14), 40, 6, BLOCK)
    drafter = random_drafter()
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, weight_decay=0.0)
    labels, weights = of(batch)
    block_positions = batch["positions"][batch["anchors"]][:, None] + torch.arange(BLOCK)
    mask = sdpa_mask(batch["anchors"], batch["anchor_valid"], batch["document_ids"], BLOCK)
    blocks = torch.randn(6, BLOCK, 32, dtype=torch.bfloat16)
    hidden = drafter(torch.randn(40, 64, dtype=torch.bfloat16), blocks, batch["positions"], block_positions, mask)
    loss = block_loss(hidden, torch.randn(VOCAB, 32, dtype=torch.bfloat16), labels, weights, chunk=5)
    mean_loss(loss.weighted_sum, loss.weight).backward()
    optimizer.step()
    for name, weight in drafter.state_dict().items():
        assert not torch.equal(weight, before[name]), name


def test_chunk_cross_entropy_compiled_equals_eager():
    torch.manual_seed(0)
    args = torch.randn(5, 32), torch.randn(VOCAB, 32), torch.randint(0, VOCAB, (5,)), torch.rand(5)
    compiled = torch.compile(loss_module.chunk_cross_entropy, backend="aot_eager", fullgraph=True)(*args)
    for ours, expected in zip(compiled, loss_module.chunk_cross_entropy(*args), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
