"""Who sees what in the drafter, by flex_attention and by scaled_dot_product_attention.

A block sees the context of its own document that lies before its anchor (strictly: at inference the anchor's features
do not exist yet), and its own slots in both directions. Nothing else: no other block, no other document, no padding.

Guarantees:
- Masks are built on the device from tensors, with fixed shapes and no wait for the device; they can be captured.
- A padded block sees its own slots, so no row is without a key and no NaN arises.
- flex is block-sparse: the dense mask never exists, nor is it computed. What a query sees are intervals of keys, so the
  tiles that flex_attention skips, masks or takes whole follow from the intervals' ends. For CUDA; elsewhere flex is
  eager, dense and without a backward, for tests. sdpa works everywhere and holds queries x (context + a share of the
  slots) booleans; the tests compare flex with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import graphsafe

TILE = 128  # queries and keys of a tile of flex_attention's mask
AttentionMask = BlockMask | Tensor  # Tensor: bool [rows, 1, queries of a row, context + queries of a row]

SDPA_BLOCKS_A_ROW = 32  # each row of blocks repeats the context's keys; more blocks a row see more masked slots


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return graphsafe.compile(function, dynamic=False)


def run_flex(
    function: Callable[..., Any],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: BlockMask,
    scale: float | None = None,
) -> Tensor:
    """flex_attention, on CUDA compiled on its own unless the caller is being compiled. Heads may share keys and values.

    Args:
        function: the caller's own, which passes its arguments to flex_attention. (One for each use:
            Dynamo lets a function have eight compiled forms, and every device needs one.)
    """
    run = _compiled(function) if queries.is_cuda and not torch.compiler.is_dynamo_compiling() else function
    return run(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1])


@dataclass(frozen=True)
class Intervals:
    """Who sees whom, where each query sees intervals of keys: [start, end), empty where start >= end.

    Attributes:
        starts, ends: of each interval, one a group of queries: lists of [G] int64 on the device.
        group: consecutive queries that see the same.
        num_keys: how many keys there are.
    """

    starts: tuple[Tensor, ...]
    ends: tuple[Tensor, ...]
    group: int
    num_keys: int

    def block_mask(self) -> BlockMask:
        """The mask for flex_attention, without a look at any single pair of query and key.

        A tile of queries and keys is computed where an interval of any of its queries touches it, and without a mask
        where one interval of each of its queries covers it. That is what ``create_block_mask`` finds by evaluating all
        pairs: its grid has queries x keys cells, this one groups x tiles of keys.
        Sync: none; fixed shapes.
        """
        size, device = TILE, self.starts[0].device
        starts, ends, group = self.starts, self.ends, self.group
        if size % group != 0:  # a tile would cut a group in two
            starts = tuple(start.repeat_interleave(group) for start in starts)
            ends = tuple(end.repeat_interleave(group) for end in ends)
            group = 1
        num_queries = len(starts[0]) * group
        first_key = torch.arange(0, self.num_keys, size, device=device)
        after_key = first_key + size
        touched = covered = torch.zeros((), dtype=torch.bool, device=device)
        for start, end in zip(starts, ends, strict=True):
            start, end = start[:, None], end[:, None]
            touched = touched | ((start < after_key) & (end > first_key) & (start < end))
            covered = covered | ((start <= first_key) & (end >= after_key))
        groups_a_tile = size // group
        missing = -len(touched) % groups_a_tile
        # Queries that are not there touch nothing, and do not stand in the way of a tile that all others cover.
        touched = F.pad(touched, (0, 0, 0, missing)).unflatten(0, (-1, groups_a_tile)).any(dim=1)
        covered = F.pad(covered, (0, 0, 0, missing), value=True).unflatten(0, (-1, groups_a_tile)).all(dim=1)
        return BlockMask.from_kv_blocks(
            *_listed(touched & ~covered),
            *_listed(covered),
            BLOCK_SIZE=size,
            mask_mod=self._mask_mod(),
            seq_lengths=(num_queries, self.num_keys),
        )

    def _mask_mod(self) -> Callable[..., Tensor]:
        starts, ends, group = self.starts, self.ends, self.group

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query // group
            seen = (key >= starts[0][row]) & (key < ends[0][row])
            for start, end in zip(starts[1:], ends[1:], strict=True):
                seen = seen | ((key >= start[row]) & (key < end[row]))
            return seen

        return visible


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Number [1, 1, rows] and places [1, 1, rows, columns] of the true tiles of each row, those first, int32."""
    order = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(dim=1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def document_starts(document_ids: Tensor) -> Tensor:
    """Where the document of each token begins [T]. Documents are consecutive; padding counts as one."""
    places = torch.arange(len(document_ids), device=document_ids.device)
    begins = F.pad(document_ids[1:] != document_ids[:-1], (1, 0), value=True)
    return torch.where(begins, places, 0).cummax(dim=0).values


def _drafter_attention(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def _anchor_documents(anchors: Tensor, anchor_valid: Tensor, document_ids: Tensor) -> Tensor:
    """Each block's document [A]; -2, which no token has, where the block is padding."""
    documents = document_ids[anchors]
    return torch.where(anchor_valid & (documents >= 0), documents, -2)


def flex_mask(anchors: Tensor, anchor_valid: Tensor, document_ids: Tensor, block_size: int) -> BlockMask:
    """The mask of a packed row for flex_attention, over keys [context, slots of all blocks].

    Args:
        anchors: [A] int64, rows of the anchors in the context.
        anchor_valid: [A] bool.
        document_ids: [T] int64, negative where padding.
        block_size: slots of a block.
    """
    num_context, num_slots = len(document_ids), len(anchors) * block_size
    real = anchor_valid & (document_ids[anchors] >= 0)
    first_slot = num_context + torch.arange(0, num_slots, block_size, device=document_ids.device)
    return Intervals(
        starts=(document_starts(document_ids)[anchors], first_slot),
        ends=(torch.where(real, anchors, 0), first_slot + block_size),  # the context strictly before; the own slots
        group=block_size,
        num_keys=num_context + num_slots,
    ).block_mask()


def sdpa_mask(
    anchors: Tensor, anchor_valid: Tensor, document_ids: Tensor, block_size: int, blocks_a_row: int | None = None
) -> Tensor:
    """The same mask for scaled_dot_product_attention: blocks in rows, over keys [context, slots of the row's blocks].

    Args:
        anchors: [A] int64, rows of the anchors in the context.
        anchor_valid: [A] bool.
        document_ids: [T] int64, negative where padding.
        block_size: slots of a block.
        blocks_a_row: a divisor of A. None: the largest up to ``SDPA_BLOCKS_A_ROW``.
    Returns:
        bool [rows, 1, blocks_a_row * block_size, T + blocks_a_row * block_size].
    """
    if blocks_a_row is None:
        blocks_a_row = max(n for n in range(1, SDPA_BLOCKS_A_ROW + 1) if len(anchors) % n == 0)
    num_context, device = len(document_ids), document_ids.device
    anchor_documents = _anchor_documents(anchors, anchor_valid, document_ids)
    before_anchor = torch.arange(num_context, device=device) < anchors[:, None]
    context = before_anchor & (document_ids == anchor_documents[:, None])
    context = context.repeat_interleave(block_size, dim=0).view(-1, 1, blocks_a_row * block_size, num_context)
    blocks = torch.arange(blocks_a_row, device=device).repeat_interleave(block_size)
    own = (blocks[:, None] == blocks).expand(len(context), 1, -1, -1)
    return torch.cat([context, own], dim=-1)


def cache_mask(lengths: Tensor, num_cached: int, block_size: int) -> Tensor:
    """The mask [R, 1, B, num_cached + B] of one block a row over the first ``lengths`` [R] cached keys and itself."""
    places = torch.arange(num_cached, device=lengths.device)
    cached = places < lengths.clamp(max=num_cached - 1)[:, None]  # the last place holds what is not valid
    return F.pad(cached, (0, block_size), value=True)[:, None, None].expand(-1, 1, block_size, -1)


def num_rows(mask: AttentionMask) -> int:
    """Into how many rows the blocks are laid for this mask."""
    return mask.shape[0]


def attend(queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
    """Attention of block slots over the context and over the slots of their row.

    Args:
        queries: [R, N, length, D].
        context: keys and values, each [R or 1, Nkv, T, D].
        own: keys and values of the slots, each [R, Nkv, length, D].
        mask: for R rows.
    Returns:
        [R, N, length, D].
    """
    rows = len(queries)
    keys, values = (torch.cat([a.expand(rows, -1, -1, -1), b], dim=2) for a, b in zip(context, own, strict=True))
    if isinstance(mask, BlockMask):
        return run_flex(_drafter_attention, queries, keys, values, mask)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
