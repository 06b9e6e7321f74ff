"""A drafter-shaped model in three sizes: blocks of masked positions that attend to context features and to themselves.

Shape suffixes: R rows (always 1), C context positions, Q queries (blocks x BLOCK), K keys (C + Q), H hidden, D head.
On CUDA attention is flex_attention with a block mask, in bfloat16; on the CPU, where flex has no backward, it is
scaled_dot_product_attention with a dense mask, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK = 16  # positions drafted at once
NUM_FEATURES = 5  # target layers whose hidden states are the context


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch; ``num_anchors`` is how many blocks a step trains."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_context: int
    num_anchors: int

    @property
    def num_queries(self) -> int:
        return self.num_anchors * BLOCK


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mini", 32, 64, 2, 128, 4, 2, 8, 64, 2),  # for the CPU
        Shape("tiny", 256, 768, 2, 4096, 4, 2, 64, 1024, 32),
        Shape("small", 1024, 3072, 5, 32768, 16, 8, 64, 2048, 64),
        Shape("q4b-like", 2560, 9728, 5, 151936, 32, 8, 128, 3072, 128),
    )
}

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def flex(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    return flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)  # type: ignore[return-value]


class Layer(nn.Module):
    """Attention over context and block, then a gated feed-forward, each behind a norm."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = shape.head_dim, attend
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.query_norm, self.key_norm = nn.RMSNorm(shape.head_dim), nn.RMSNorm(shape.head_dim)
        self.query = nn.Linear(shape.hidden, width, bias=False)
        self.key = nn.Linear(shape.hidden, kv_width, bias=False)
        self.value = nn.Linear(shape.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x_RQH: Tensor, context_RCH: Tensor, mask: Any) -> Tensor:
        normed_RQH = self.before_attention(x_RQH)
        seen_RKH = torch.cat((context_RCH, normed_RQH), dim=1)
        queries = self.query_norm(self.heads(self.query(normed_RQH))).transpose(1, 2)
        keys = self.key_norm(self.heads(self.key(seen_RKH))).transpose(1, 2)
        values = self.heads(self.value(seen_RKH)).transpose(1, 2)
        attended = self.attend(queries, keys, values, mask).transpose(1, 2).flatten(2)
        x_RQH = x_RQH + self.out(attended)
        normed_RQH = self.before_mlp(x_RQH)
        return x_RQH + self.down(functional.silu(self.gate(normed_RQH)) * self.up(normed_RQH))


class Drafter(nn.Module):
    """From block embeddings and context features to a weighted loss; the head to the vocabulary is frozen."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.mix = nn.Linear(NUM_FEATURES * shape.hidden, shape.hidden, bias=False)
        self.mix_norm, self.norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, attend) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False).requires_grad_(False)

    def forward(self, x_RQH: Tensor, features: Tensor, mask: Any, targets_RQ: Tensor, weights_RQ: Tensor) -> Tensor:
        context_RCH = self.mix_norm(self.mix(features))
        for layer in self.layers:
            x_RQH = layer(x_RQH, context_RCH, mask)
        logits = self.head(self.norm(x_RQH)).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), targets_RQ.flatten(), reduction="none")
        weights = weights_RQ.flatten()
        return (losses * weights).sum() / weights.sum()


def make_mask(shape: Shape, device: torch.device) -> Any:
    """Who sees whom: a block sees the context before its anchor, and its own positions."""
    num_context, num_queries = shape.num_context, shape.num_queries
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(num_context - BLOCK, generator=generator)
    anchors = order[: shape.num_anchors].sort().values.to(device)

    def sees(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // BLOCK
        in_context = (key < num_context) & (key < anchors[block])
        return in_context | ((key >= num_context) & ((key - num_context) // BLOCK == block))

    if device.type == "cuda":
        return create_block_mask(sees, None, None, num_queries, num_context + num_queries, device=device)
    queries, keys = torch.arange(num_queries)[:, None], torch.arange(num_context + num_queries)
    return sees(queries, queries, queries, keys)


def make_batch(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block embeddings [1, Q, H], context features [1, C, features x H], targets and weights [1, Q]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, shape.num_queries, shape.hidden, generator=generator)
    features = torch.randn(1, shape.num_context, NUM_FEATURES * shape.hidden, generator=generator)
    targets = torch.randint(shape.vocab, (1, shape.num_queries), generator=generator)
    weights = torch.rand(1, shape.num_queries, generator=generator)
    return x.to(device, dtype), features.to(device, dtype), targets.to(device), weights.to(device)


def make_model(shape: Shape, device: torch.device, *, compiled_whole: bool) -> Drafter:
    """The model. Where it is not compiled as a whole, flex_attention is compiled alone, or it would run unfused."""
    attend: Attend = dense_attention
    if device.type == "cuda":
        attend = flex if compiled_whole else torch.compile(flex, dynamic=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return Drafter(shape, attend).to(dtype)
