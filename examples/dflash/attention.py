"""Who sees what in the drafter, by flex_attention and by scaled_dot_product_attention.

A block sees the context of its own document that lies before its anchor (strictly: at inference the anchor's features
do not exist yet), and its own slots in both directions. Nothing else: no other block, no other document, no padding.
In a sliding layer of window W a slot sees itself and the W - 1 tokens before it, context and own slots alike, and no
later slot: that is how vLLM and SGLang serve such layers.

Guarantees:
- Masks are built on the device from tensors, with fixed shapes and no wait for the device; they can be captured.
- A padded block sees its own slots, so no row is without a key and no NaN arises.
- flex is block-sparse: the dense mask never exists, nor is it computed. What a query sees are intervals of keys, so the
  tiles that flex_attention skips, masks or takes whole follow from the intervals' ends. For CUDA; elsewhere flex is
  eager, dense and without a backward, for tests. sdpa works everywhere and holds queries x (context + a share of the
  slots) booleans; the tests compare flex with it.
"""

from __future__ import annotations

import math
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
        starts, ends: of each interval, int64 on the device: all [G], where the queries of a group see the same, or all
            [G, group], where each has its own. Such a group's must make up one interval over any consecutive queries
            of it, so that its tiles follow from the outermost bounds.
        group: consecutive queries.
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
        group = math.gcd(size, self.group)  # smaller ones where a tile would cut a group in two
        num_queries = len(self.starts[0]) * self.group
        first_key = torch.arange(0, self.num_keys, size, device=device)
        after_key = first_key + size
        touched = covered = torch.zeros((), dtype=torch.bool, device=device)
        for start, end in zip(self.starts, self.ends, strict=True):
            (lowest, latest), (soonest, highest) = _bounds(start, self.group, group), _bounds(end, self.group, group)
            touched = touched | ((lowest < after_key) & (highest > first_key) & (lowest < highest))
            covered = covered | ((latest <= first_key) & (soonest >= after_key))
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
        starts, ends = (tuple(bound.flatten() for bound in bounds) for bounds in (self.starts, self.ends))
        each = self.group if self.starts[0].dim() == 1 else 1  # queries that have one bound

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query // each
            seen = (key >= starts[0][row]) & (key < ends[0][row])
            for start, end in zip(starts[1:], ends[1:], strict=True):
                seen = seen | ((key >= start[row]) & (key < end[row]))
            return seen

        return visible


def _bounds(bound: Tensor, group: int, part: int) -> tuple[Tensor, Tensor]:
    """The lowest and the highest bound in every ``part`` queries of the groups, each [parts, 1]."""
    if bound.dim() == 1:
        same = (bound if part == group else bound.repeat_interleave(group // part))[:, None]
        return same, same
    parts = bound.reshape(-1, part)
    return parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)


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


def _sliding_attention(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def _anchor_documents(anchors: Tensor, anchor_valid: Tensor, document_ids: Tensor) -> Tensor:
    """Each block's document [A]; -2, which no token has, where the block is padding."""
    documents = document_ids[anchors]
    return torch.where(anchor_valid & (documents >= 0), documents, -2)


def flex_mask(
    anchors: Tensor, anchor_valid: Tensor, document_ids: Tensor, block_size: int, window: int | None = None
) -> BlockMask:
    """The mask of a packed row for flex_attention, over keys [context, slots of all blocks].

    Args:
        anchors: [A] int64, rows of the anchors in the context.
        anchor_valid: [A] bool.
        document_ids: [T] int64, negative where padding.
        block_size: slots of a block.
        window: W of a sliding layer; None: a full one.
    """
    num_context, num_slots = len(document_ids), len(anchors) * block_size
    real = anchor_valid & (document_ids[anchors] >= 0)
    first_slot = num_context + torch.arange(0, num_slots, block_size, device=document_ids.device)
    first_token, after_context = document_starts(document_ids)[anchors], torch.where(real, anchors, 0)
    starts, ends = (first_token, first_slot), (after_context, first_slot + block_size)  # the context strictly before
    if window is not None:
        slots = torch.arange(block_size, device=document_ids.device)
        lowest = slots - (window - 1)  # what a slot sees first, from its block's anchor
        starts = (
            torch.maximum(first_token[:, None], anchors[:, None] + lowest),
            first_slot[:, None] + lowest.clamp(min=0),
        )
        ends = after_context[:, None].expand(-1, block_size), first_slot[:, None] + slots + 1
    return Intervals(starts, ends, group=block_size, num_keys=num_context + num_slots).block_mask()


def sdpa_mask(
    anchors: Tensor,
    anchor_valid: Tensor,
    document_ids: Tensor,
    block_size: int,
    window: int | None = None,
    blocks_a_row: int | None = None,
) -> Tensor:
    """The same mask for scaled_dot_product_attention: blocks in rows, over keys [context, slots of the row's blocks].

    Args:
        anchors: [A] int64, rows of the anchors in the context.
        anchor_valid: [A] bool.
        document_ids: [T] int64, negative where padding.
        block_size: slots of a block.
        window: W of a sliding layer; None: a full one.
        blocks_a_row: a divisor of A. None: the largest up to ``SDPA_BLOCKS_A_ROW``.
    Returns:
        bool [rows, 1, blocks_a_row * block_size, T + blocks_a_row * block_size].
    """
    if blocks_a_row is None:
        blocks_a_row = max(n for n in range(1, SDPA_BLOCKS_A_ROW + 1) if len(anchors) % n == 0)
    num_context, device = len(document_ids), document_ids.device
    anchor_documents = _anchor_documents(anchors, anchor_valid, document_ids)
    places = torch.arange(num_context, device=device)
    context = (places < anchors[:, None]) & (document_ids == anchor_documents[:, None])
    context = context.repeat_interleave(block_size, dim=0)
    blocks = torch.arange(blocks_a_row, device=device).repeat_interleave(block_size)
    own = blocks[:, None] == blocks
    if window is not None:
        slots = torch.arange(block_size, device=device)
        own = own & _in_window(slots.repeat(blocks_a_row), slots.repeat(blocks_a_row), window)
        context = context & _in_window((anchors[:, None] + slots).flatten(), places, window)
    context = context.view(-1, 1, blocks_a_row * block_size, num_context)
    return torch.cat([context, own.expand(len(context), 1, -1, -1)], dim=-1)


def _in_window(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Whether a key [..., K] is at a query's place [..., Q] or up to ``window - 1`` places before it: [..., Q, K]."""
    queries, keys = queries[..., :, None], keys[..., None, :]
    return (keys <= queries) & (keys > queries - window)


def cache_mask(lengths: Tensor, num_cached: int, block_size: int, window: int | None = None) -> Tensor:
    """The mask [R, 1, B, num_cached + B] of one block a row over the first ``lengths`` [R] cached keys and itself.

    Args:
        lengths: the cached keys are those of all tokens before the block, in order.
        num_cached: places of the cache; the last one holds what is not valid.
        block_size: slots of a block.
        window: W of a sliding layer; None: a full one.
    """
    places = torch.arange(num_cached, device=lengths.device)
    cached = places < lengths.clamp(max=num_cached - 1)[:, None]
    if window is None:
        return F.pad(cached, (0, block_size), value=True)[:, None, None].expand(-1, 1, block_size, -1)
    slots = torch.arange(block_size, device=lengths.device)
    cached = cached[:, None] & _in_window(lengths[:, None] + slots, places, window)
    own = _in_window(slots, slots, window).expand(len(lengths), -1, -1)
    return torch.cat([cached, own], dim=-1)[:, None]


def num_rows(mask: AttentionMask) -> int:
    """Into how many rows the blocks are laid for this mask."""
    return mask.shape[0]


def attend(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    mask: AttentionMask,
    *,
    sliding: bool = False,
) -> Tensor:
    """Attention of block slots over the context and over the slots of their row.

    Args:
        queries: [R, N, length, D].
        context: keys and values, each [R or 1, Nkv, T, D].
        own: keys and values of the slots, each [R, Nkv, length, D].
        mask: for R rows.
        sliding: whether the mask has a window: its flex_attention is then compiled as a function of its own.
    Returns:
        [R, N, length, D].
    """
    rows = len(queries)
    keys, values = (torch.cat([a.expand(rows, -1, -1, -1), b], dim=2) for a, b in zip(context, own, strict=True))
    if isinstance(mask, BlockMask):
        return run_flex(_sliding_attention if sliding else _drafter_attention, queries, keys, values, mask)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
