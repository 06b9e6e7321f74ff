from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from examples.dflash import loss as loss_module
from examples.dflash.attention import sdpa_mask
from examples.dflash.loss import block_loss, dpace_weights, labels_and_weights, mean_loss

from .models import VOCAB, packed_row, random_drafter, tiny_target
from .test_replicas import check_two_replicas_train_as_one_drafter_that_takes_both_rows
from .test_train import configuration

BLOCK = 4


def of(batch, decay: float | None = 3.0):
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


def plain_dpace(chances, counted, smoothing):
    """D-PACE's weights, written down one block, slot and product at a time."""
    weights = [[0.0] * len(row) for row in chances]
    for block, (row, counts) in enumerate(zip(chances, counted, strict=True)):
        slots = [slot for slot in range(len(row)) if counts[slot]]  # the others are as if they were not there
        for j in slots:
            for m in (slot for slot in slots if slot >= j):
                weights[block][j] += math.prod((1 - smoothing) * row[i] + smoothing for i in slots if i <= m)
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9])
def test_dpace_weighs_a_slot_by_how_far_all_slots_from_it_on_are_reached(smoothing):
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(9, 7, generator=generator)
    counted = (torch.rand(9, 7, generator=generator) < 0.7).float()
    counted[0], counted[1] = 1, 0  # a whole block, and one of padding
    counted[2, 4:] = 0  # one that its document's end cuts off
    expected = plain_dpace(chances.tolist(), counted.tolist(), smoothing)
    torch.testing.assert_close(dpace_weights(chances, counted, smoothing).double(), expected, rtol=1e-5, atol=1e-7)


def test_dpace_weights_are_the_gradient_of_the_expected_number_of_accepted_tokens():
    log_chances = (-3 * torch.rand(4, 6, dtype=torch.float64)).requires_grad_()
    log_chances.exp().cumprod(1).sum().backward()
    weights = dpace_weights(log_chances.detach().exp(), torch.ones(4, 6, dtype=torch.float64), 0.0)
    torch.testing.assert_close(weights, log_chances.grad)


def test_dpace_turns_to_later_slots_as_the_first_ones_are_learnt():
    unsure, sure = torch.full((1, 5), 0.1), torch.tensor([[0.95, 0.95, 0.1, 0.1, 0.1]])
    weights = dpace_weights(torch.cat([unsure, sure]), torch.ones(2, 5), 0.5)
    shares = weights / weights.sum(1, keepdim=True)
    assert (weights.diff(dim=1) < 0).all()
    assert (shares[1, 2:] > shares[0, 2:]).all()


def test_dpace_of_a_block_that_its_documents_end_cuts_off_is_that_of_a_shorter_block():
    batch = packed_row((6, 6), 12, 2, BLOCK)
    batch["anchors"], batch["anchor_valid"] = torch.tensor([3, 4]), torch.tensor([True, True])
    _, counted = of(batch, decay=None)
    assert counted.tolist() == [[1, 1, 0], [1, 0, 0]]
    chances = torch.tensor([[0.2, 0.6, 0.9], [0.2, 0.9, 0.9]])
    weights = dpace_weights(chances, counted, 0.5)
    assert weights[0].tolist() == pytest.approx([0.6 + 0.6 * 0.8, 0.6 * 0.8, 0])
    assert weights[1].tolist() == pytest.approx([0.6, 0, 0])


@pytest.mark.parametrize("chunk", [1, 4, 7, 18, 1000])
def test_dpace_loss_equals_plain_cross_entropy_under_constant_weights(chunk):
    torch.manual_seed(0)
    hidden = (0.3 * torch.randn(7, BLOCK, 32)).requires_grad_()
    head, labels = torch.randn(VOCAB, 32), torch.randint(0, VOCAB, (7, BLOCK - 1))
    counted = torch.ones(7, BLOCK - 1)
    counted[0, 1] = counted[3, 1:] = counted[5] = 0
    loss = block_loss(hidden, head, labels, counted, chunk=chunk, smoothing=0.5)
    mean_loss(loss.weighted_sum, loss.weight).backward()

    plain = hidden.detach().double().requires_grad_()
    logits = plain[:, 1:].flatten(0, 1) @ head.double().T
    each = F.cross_entropy(logits, labels.flatten(), reduction="none").view(7, BLOCK - 1)
    weights = plain_dpace((-each).exp().tolist(), counted.tolist(), 0.5)
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(loss.weight.double(), weights.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((loss.weighted_sum / loss.weight).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-5, atol=1e-6)
    assert hidden.grad[:, 0].eq(0).all()
    assert loss.counts.total.tolist() == counted.sum(0).tolist()
    assert loss.counts.blocks == 6


@pytest.mark.parametrize(("chunk", "sizes"), [(2, [3] * 7), (3, [3] * 7), (8, [6] * 4), (100, [21])])
def test_dpace_loss_holds_whole_blocks_in_a_chunk(monkeypatch, chunk, sizes):
    found = []
    chunk_cross_entropy = loss_module.chunk_cross_entropy
    monkeypatch.setattr(
        loss_module,
        "chunk_cross_entropy",
        lambda hidden, *args: found.append(len(hidden)) or chunk_cross_entropy(hidden, *args),
    )
    hidden, labels = torch.randn(7, BLOCK, 32), torch.zeros(7, BLOCK - 1, dtype=torch.int64)
    block_loss(hidden, torch.randn(VOCAB, 32), labels, torch.ones(7, BLOCK - 1), chunk=chunk, smoothing=0.5)
    assert found == sizes


def test_dpace_chunk_compiled_equals_eager():
    torch.manual_seed(0)
    counted = torch.tensor([1.0, 1, 0, 1, 1, 1])
    args = torch.randn(6, 32), torch.randn(VOCAB, 32), torch.randint(0, VOCAB, (6,)), counted, 0.5, 3
    compiled = torch.compile(loss_module.chunk_cross_entropy, backend="aot_eager", fullgraph=True)(*args)
    for ours, expected in zip(compiled, loss_module.chunk_cross_entropy(*args), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_dpace_of_two_replicas_is_that_of_one_drafter_with_both_rows(tmp_path):
    config = configuration(tmp_path, loss="dpace", lr=1e-2)
    check_two_replicas_train_as_one_drafter_that_takes_both_rows(tiny_target(), config)
