"""Who sees what in the drafter, by flex_attention and by scaled_dot_product_attention.

A block sees the context of its own document that lies before its anchor (strictly: at inference the anchor's features
do not exist yet), and its own slots in both directions. Nothing else: no other block, no other document, no padding.

Guarantees:
- Masks are built on the device from tensors, with fixed shapes and no wait for the device; they can be captured.
- A padded block sees its own slots, so no row is without a key and no NaN arises.
- flex is block-sparse: the dense mask never exists, as ``create_block_mask`` is compiled. For CUDA; elsewhere it is
  eager, dense and without a backward, for tests. sdpa works everywhere and holds queries x (context + a share of the
  slots) booleans; the tests compare flex with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import graphsafe

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
        function: the caller's own, which passes its arguments to flex_attention. (One for each use, here and below:
            Dynamo lets a function have eight compiled forms, and every device needs one.)
    """
    run = _compiled(function) if queries.is_cuda and not torch.compiler.is_compiling() else function
    return run(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1])


def make_block_mask(
    function: Callable[..., Any],
    mask_mod: Callable[..., Tensor],
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> BlockMask:
    """create_block_mask, compiled on CUDA: eager it holds the whole dense mask.

    Args:
        function: the caller's own, which passes its arguments to create_block_mask.
    """
    make = _compiled(function) if device.type == "cuda" else function
    return make(mask_mod, None, None, num_queries, num_keys, device=device)


def _drafter_attention(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def _drafter_mask(*args: Any, **kwargs: Any) -> BlockMask:
    return create_block_mask(*args, **kwargs)


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
    anchor_documents = _anchor_documents(anchors, anchor_valid, document_ids)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        context = key.clamp(max=num_context - 1)
        in_context = (key < num_context) & (document_ids[context] == anchor_documents[block]) & (key < anchors[block])
        own_slot = (key >= num_context) & ((key - num_context) // block_size == block)
        return in_context | own_slot

    return make_block_mask(_drafter_mask, visible, num_slots, num_context + num_slots, document_ids.device)


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
