"""The target's attention: over packed documents, or over a decoder's cache.

Guarantees:
- A token sees the tokens of its own document before it and nothing else. No dense mask: flex_attention on CUDA;
  elsewhere the documents' attention is computed one after the other.
- A model that wants something done to its attention scores that is not done here is refused, not run wrongly.

How it gets in: transformers returns a four-dimensional mask to the layers as it is, so a registered attention function
receives the block mask, the documents' lengths, or a decoder's mask, where other functions receive a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .attention import Intervals, document_starts, run_flex

ATTENTION = "packed_documents"

_SCORE_CHANGES = ("softcap", "s_aux", "position_bias")  # as transformers names them: soft caps, sinks, biases


def _target_attention(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: packed where ``features`` asks for it, else scaled_dot_product_attention.

    Args:
        query: [1, N, T, D]; key, value: [1, Nkv, T, D].
        attention_mask: a BlockMask; or int64 [1, 1, 1, documents], the documents' lengths, which sum to T; or what
            ``grouped_attention`` takes, in floating point.
    Raises:
        ValueError: the model wants something done to its attention scores that this does not do.
    """
    unknown = [name for name in _SCORE_CHANGES if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"The target's attention has {', '.join(unknown)}; packed documents cannot: choose another.")
    if isinstance(attention_mask, BlockMask):
        return run_flex(_target_attention, query, key, value, attention_mask, scaling).transpose(1, 2), None
    if attention_mask is not None and attention_mask.is_floating_point():
        return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2), None
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = attention_mask.flatten().tolist()
    documents = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    parts = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in documents]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention in which the heads of a group are further queries over the one copy of the keys that they share.

    With a mask, scaled_dot_product_attention wants a head of keys for each head of queries, hence a copy of the cache.

    Args:
        query: [R, N, L, D]; key, value: [R, Nkv, S, D].
        mask: [R or 1, 1, N / Nkv * L, S], 0 or -inf; the groups' heads come one after the other.
    Returns:
        [R, N, L, D].
    """
    num_heads, length = query.shape[1:3]
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(len(query), num_heads, length, -1)


def document_mask(document_ids: Tensor) -> BlockMask:
    """The mask of a packed row [T] for flex_attention: each token sees its document up to itself."""
    places = torch.arange(len(document_ids), device=document_ids.device)
    return Intervals((document_starts(document_ids),), (places + 1,), group=1, num_keys=len(places)).block_mask()


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
