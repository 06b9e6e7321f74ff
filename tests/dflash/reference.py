"""The drafter written down plainly: float64, one block at a time, dense, no code shared with the example."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + D/2) of ``x`` [length, heads, D], turned as complex numbers."""
    size = x.shape[-1]
    frequencies = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, None] * frequencies)[:, None]
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def block_hidden(
    weights: dict[str, Tensor], config, features: Tensor, positions: Tensor, block: Tensor, block_positions: Tensor
) -> Tensor:
    """Hidden states [B, H] of one block over the context that it sees.

    Args:
        features: [seen, K*H]; positions: [seen]; block: [B, H]; block_positions: [B].
    """
    w = {name: weight.double() for name, weight in weights.items()}
    eps, theta, size = config.rms_norm_eps, config.rope_theta, config.head_dim
    groups = config.num_heads // config.num_kv_heads
    context = _norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = block.double()
    place = torch.arange(len(context) + len(x))
    behind = place[len(context) :, None] - place  # of each key, from each slot
    all_positions = torch.cat([positions, block_positions])
    for i in range(config.num_layers):
        p = f"layers.{i}."
        a = p + "self_attn."
        y = _norm(x, w[p + "input_layernorm.weight"], eps)
        source = torch.cat([context, y])
        q = (y @ w[a + "q_proj.weight"].T).view(len(y), -1, size)
        k = (source @ w[a + "k_proj.weight"].T).view(len(source), -1, size)
        v = (source @ w[a + "v_proj.weight"].T).view(len(source), -1, size)
        q = _rope(_norm(q, w[a + "q_norm.weight"], eps), block_positions, theta)
        k = _rope(_norm(k, w[a + "k_norm.weight"], eps), all_positions, theta)
        heads = []
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // groups].T / math.sqrt(size)
            if i < config.num_layers - config.num_full_layers and config.sliding_window is not None:
                scores[(behind < 0) | (behind >= config.sliding_window)] = -math.inf
            heads.append(torch.softmax(scores, dim=-1) @ v[:, head // groups])
        x = x + torch.cat(heads, dim=-1) @ w[a + "o_proj.weight"].T
        y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], eps)
