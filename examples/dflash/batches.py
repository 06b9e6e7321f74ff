"""Documents in, fixed-shape batches out: shuffled, packed to the token budget, with anchors drawn for each document.

A batch is a dict of CPU tensors; T is ``token_budget`` and A is ``num_anchors``:

    tokens [T] int64, document_ids [T] int64 (-1: padding), positions [T] int64 (from 0 in each document),
    loss_mask [T] bool, anchors [A] int64 (indices into the row, ascending; 0 where invalid),
    anchor_valid [A] bool (the valid ones first)

Guarantees:
- Everything is decided by (seed, epoch) and the documents: neither the number of drafters nor a resume changes a
  batch. The places drawn in a document come from a generator keyed by (seed, epoch, document id).
- A document is never cut or split; each with an eligible place gets an anchor, while they last.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graphsafe import Spec
from graphsafe.padding import pack, pad_to

from .config import Config, InputError
from .data import Document
from .schedule import Schedule

Batch = dict[str, Tensor]

# Rows that are filled side by side: more waste less padding, and mix documents over a longer stretch.
_NUM_OPEN_ROWS = 16

_VALIDATION_EPOCH = -1  # always the same order and anchors


def batch_specs(config: Config) -> dict[str, Spec]:
    """Shapes and dtypes of a batch's tensors."""
    row, blocks = (config.token_budget,), (config.num_anchors,)
    return {
        "tokens": Spec(row, torch.int64),
        "document_ids": Spec(row, torch.int64),
        "positions": Spec(row, torch.int64),
        "loss_mask": Spec(row, torch.bool),
        "anchors": Spec(blocks, torch.int64),
        "anchor_valid": Spec(blocks, torch.bool),
    }


def batches(documents: Sequence[Document], config: Config, epoch: int) -> Iterator[Batch]:
    """One epoch's batches.

    Raises:
        InputError: no document has a place for an anchor.
    """
    for row in _rows(_trainable(documents, config), config, epoch):
        yield _batch(row, config, epoch)


def num_batches(documents: Sequence[Document], config: Config, epoch: int) -> int:
    """How many batches ``batches`` yields for that epoch."""
    return sum(1 for _ in _rows(_usable(documents, config), config, epoch))


def num_training_batches(documents: Sequence[Document], config: Config, limit: int | None = None) -> int:
    """How many batches all epochs have, counted up to ``limit``."""
    usable = _usable(documents, config)
    rows = (row for epoch in range(config.epochs) for row in _rows(usable, config, epoch))
    return sum(1 for _ in itertools.islice(rows, limit))


def num_validation_rounds(validation: Sequence[Document], config: Config, num_drafters: int) -> int:
    """How many rounds of ``num_drafters`` batches the validation documents fill."""
    return -(-num_batches(validation, config, _VALIDATION_EPOCH) // num_drafters)


def scheduled_batches(
    documents: Sequence[Document],
    validation: Sequence[Document],
    config: Config,
    schedule: Schedule,
    ranks: Sequence[int],
    num_drafters: int,
) -> Iterator[Batch]:
    """For each round of the schedule, the batches of the drafters ``ranks`` of all ``num_drafters``, in this order.

    Training batch i is drafter ``i % num_drafters``'s, in round ``i // num_drafters``. What is missing in a last round
    is padding. Batches of other ranks and of steps that are done are not made, only counted.

    Raises:
        InputError: no document has a place for an anchor.
    """
    usable = _trainable(documents, config)
    rows: Iterator[tuple[list[Document], int]] = (
        (row, epoch) for epoch in range(config.epochs) for row in _rows(usable, config, epoch)
    )
    rows = itertools.islice(rows, schedule.first_step * num_drafters, None)
    measured = [(row, _VALIDATION_EPOCH) for row in _rows(_usable(validation, config), config, _VALIDATION_EPOCH)]
    for current in schedule.rounds():
        if current.validation:
            taken = measured[current.number * num_drafters :][:num_drafters]
        else:
            taken = list(itertools.islice(rows, num_drafters))
        for rank in ranks:
            row, epoch = taken[rank] if rank < len(taken) else ([], 0)
            yield _batch(row, config, epoch)


def empty_batch(config: Config) -> Batch:
    """All padding: it fills up a last incomplete round, and its loss is 0."""
    return _batch([], config, 0)


def eligible_anchors(document: Document, block_size: int) -> list[int]:
    """Places where a block may start: supervised, with a supervised label among the next ``block_size - 1`` tokens."""
    mask = document.loss_mask
    places = []
    next_supervised = len(mask) + block_size  # beyond any block
    for place in range(len(mask) - 1, -1, -1):
        if mask[place]:
            if next_supervised - place < block_size:
                places.append(place)
            next_supervised = place
    return places[::-1]


def share_anchors(num_supervised: Sequence[int], num_eligible: Sequence[int], num_anchors: int) -> list[int]:
    """How many anchors each document of a row gets.

    In proportion to its supervised tokens, at least one and at most as many as it has eligible places. Where there
    are more documents than anchors, the first ones get one each.
    """
    shares = [1 if index < num_anchors else 0 for index in range(len(num_supervised))]
    left = min(num_anchors, sum(num_eligible)) - sum(shares)
    # One at a time to the document that is furthest below its share: the proportion holds under both limits.
    open_documents = [index for index, count in enumerate(num_eligible) if shares[index] < count]
    while left > 0:
        total = sum(num_supervised[index] for index in open_documents)
        grants = {
            index: min(num_eligible[index] - shares[index], left * num_supervised[index] // total)
            for index in open_documents
        }
        if not any(grants.values()):
            neediest = sorted(open_documents, key=lambda index: (shares[index] / num_supervised[index], index))
            grants = {index: 1 for index in neediest[:left]}
        for index, grant in grants.items():
            shares[index] += grant
            left -= grant
        open_documents = [index for index in open_documents if shares[index] < num_eligible[index]]
    return shares


def _usable(documents: Sequence[Document], config: Config) -> list[Document]:
    return [document for document in documents if eligible_anchors(document, config.block_size)]


def _trainable(documents: Sequence[Document], config: Config) -> list[Document]:
    usable = _usable(documents, config)
    if not usable:
        raise InputError("No document has two supervised tokens within a block, so there is nothing to train on.")
    return usable


def _rows(documents: list[Document], config: Config, epoch: int) -> Iterator[list[Document]]:
    """Documents in the epoch's order, first fit over the open rows; the fullest is closed where none fits."""
    order = list(documents)
    random.Random(f"order {config.seed} {epoch}").shuffle(order)
    open_rows: list[list[Document]] = []
    room: list[int] = []
    for document in order:
        size = len(document.tokens)
        fits = next((index for index, left in enumerate(room) if left >= size), None)
        if fits is None:
            if len(open_rows) == _NUM_OPEN_ROWS:
                fullest = min(range(len(room)), key=room.__getitem__)
                room.pop(fullest)
                yield open_rows.pop(fullest)
            open_rows.append([])
            room.append(config.token_budget)
            fits = len(room) - 1
        open_rows[fits].append(document)
        room[fits] -= size
    yield from open_rows


def _batch(row: list[Document], config: Config, epoch: int) -> Batch:
    packed = pack([document.tokens for document in row], config.token_budget)
    loss_mask = torch.tensor([flag for document in row for flag in document.loss_mask], dtype=torch.bool)
    anchors = torch.tensor(_draw_anchors(row, config, epoch), dtype=torch.int64)
    return {
        "tokens": packed.tokens,
        "document_ids": packed.document_ids,
        "positions": packed.positions,
        "loss_mask": pad_to(loss_mask, config.token_budget),
        "anchors": pad_to(anchors, config.num_anchors),
        "anchor_valid": torch.arange(config.num_anchors) < anchors.shape[0],
    }


def _draw_anchors(row: list[Document], config: Config, epoch: int) -> list[int]:
    eligible = [eligible_anchors(document, config.block_size) for document in row]
    supervised = [sum(document.loss_mask) for document in row]
    shares = share_anchors(supervised, [len(places) for places in eligible], config.num_anchors)
    anchors, start = [], 0
    for document, places, share in zip(row, eligible, shares, strict=True):
        rng = random.Random(f"anchors {config.seed} {epoch} {document.id}")
        anchors += [start + place for place in sorted(rng.sample(places, share))]
        start += len(document.tokens)
    return anchors
