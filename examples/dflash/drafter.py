"""The DFlash drafter: a small transformer that predicts a whole block of tokens from the target's features.

Guarantees:
- Parameter names are exactly those of the checkpoint that vLLM and SGLang load; embeddings and head are the target's.
- Weights are float32 masters; each operation runs in the dtype of its input, so no autocast is needed. Norms, softmax
  and rotary embeddings are float32 inside.
- Nothing reads the device from the host: forward, extend and draft can be captured and compiled with fullgraph.

Shapes in comments: T context tokens, A anchors, B slots of a block, K features, H hidden, N heads, D head_dim, R rows.
Source of the architecture: arXiv 2602.06036, appendix A.3.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import AttentionMask, attend, cache_mask, num_rows
from .files import replace_file

if TYPE_CHECKING:
    from .target import Target, TargetShape

INIT_STD = 0.02  # of every matrix, as in Qwen3
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers, in the words of transformers


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter, and what it must know of its target."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int
    num_target_layers: int
    sliding_window: int | None = None  # tokens that a sliding layer looks back, the own one included
    num_full_layers: int = 1  # where there is a window: the last so many layers see everything

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size} rows.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"A window of {self.sliding_window} tokens has no room for the token itself.")
        if any(not 0 <= layer < self.num_target_layers for layer in self.target_layer_ids):
            raise ValueError(f"The target has layers 0 to {self.num_target_layers - 1}, not {self.target_layer_ids}.")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Of each layer: ``SLIDING`` or ``FULL``."""
        num_sliding = max(0, self.num_layers - self.num_full_layers) if self.sliding_window is not None else 0
        return (SLIDING,) * num_sliding + (FULL,) * (self.num_layers - num_sliding)

    @property
    def windows(self) -> dict[str, int | None]:
        """The window of each type of layer that the drafter has; None of full ones. Each needs a mask of its own."""
        return {kind: self.sliding_window if kind == SLIDING else None for kind in dict.fromkeys(self.layer_types)}

    @classmethod
    def from_target(
        cls,
        target: Target | TargetShape,
        *,
        num_layers: int,
        block_size: int,
        num_features: int = 5,
        intermediate_size: int | None = None,
        mask_token_id: int | None = None,
        sliding_window: int | None = None,
        num_full_layers: int = 1,
    ) -> DrafterConfig:
        """The shape that follows the target's. None: the target's own width and known mask token; no window.

        Raises:
            ValueError: no mask token is known for this target, and none is given.
        """
        from .target import target_layer_ids

        mask = target.mask_token_id if mask_token_id is None else mask_token_id
        if mask is None:
            raise ValueError("No unused token is known for this target: give one with --mask-token-id.")
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or target.intermediate_size,
            num_layers=num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            block_size=block_size,
            mask_token_id=mask,
            target_layer_ids=target_layer_ids(target.num_layers, num_features),
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            sliding_window=sliding_window,
            num_full_layers=num_full_layers,
        )


class Linear(nn.Linear):
    """A bias-free linear layer that runs in the dtype of its input, whatever the dtype of its weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimension, in float32 (float64 for float64 inputs)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


Rope = tuple[Tensor, Tensor]  # cosine and sine, each [..., length, 1, D]


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """Cosine and sine of the neox rotary embedding at ``positions`` [..., length]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """``x`` [..., length, heads, D], rotated in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    return (wide * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]).to(x.dtype)


class Attention(nn.Module):
    """Queries of the blocks over the keys of the context and of the block itself."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim = size
        self.sliding = layer_type == SLIDING
        self.q_proj = Linear(hidden, config.num_heads * size)
        self.k_proj = Linear(hidden, config.num_kv_heads * size)
        self.v_proj = Linear(hidden, config.num_kv_heads * size)
        self.o_proj = Linear(config.num_heads * size, hidden)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [R, Nkv, length, D] of ``x`` [R, length, H], context features or block slots alike."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(keys, rope).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        queries = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope).transpose(1, 2)
        out = attend(queries, context, self.keys_values(x, rope), mask, sliding=self.sliding)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm layer. The context reaches keys and values as it is, not through ``input_layernorm``."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_type)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

    def train_forward(self, x: Tensor, rope: Rope, context: Tensor, context_rope: Rope, mask: AttentionMask) -> Tensor:
        """The same from the context's features [1, T, H]: what gradient checkpointing recomputes."""
        return self(x, rope, self.self_attn.keys_values(context, context_rope), mask)


@dataclass
class ContextCache:
    """Keys and values of the context, a row a sequence; the last position of each row takes what is not valid."""

    keys: list[Tensor]  # a layer: [R, Nkv, max_context + 1, D]
    values: list[Tensor]
    lengths: Tensor  # [R] int64: valid positions so far; above max_context what came later was dropped

    @property
    def max_context(self) -> int:
        return self.keys[0].shape[2] - 1


class Drafter(nn.Module):
    """The drafter. Without embedding and head: hidden states in, hidden states out.

    Args:
        config: its shape.
        seed: of the initial weights, which depend on nothing else; replicas start alike.
        gradient_checkpointing: recompute each layer in backward.
    """

    def __init__(self, config: DrafterConfig, *, seed: int = 0, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    values = torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator)
                    parameter.copy_(values)

    def rope(self, positions: Tensor) -> Rope:
        return rope_angles(positions, self.config.head_dim, self.config.rope_theta)

    def context(self, features: Tensor) -> Tensor:
        """The context [..., H] that every layer reads, from the target's features [..., K*H]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        positions: Tensor,
        block_positions: Tensor,
        mask: AttentionMask | Mapping[str, AttentionMask],
    ) -> Tensor:
        """Hidden states of every block's slots, for the target's head.

        Args:
            features: [T, K*H], the target's layer outputs of a packed row.
            block_embeddings: [A, B, H], the target's embeddings of the anchor and of the mask token.
            positions: [T] int64, of the context tokens in their documents.
            block_positions: [A, B] int64: the anchor's position + slot.
            mask: by type of layer, for those of ``config.windows``, each from ``attention.flex_mask`` or each from
                ``attention.sdpa_mask``, for the same anchors. One alone: that of full layers.
        Returns:
            [A, B, H] in the dtype of ``block_embeddings``, in which all runs.
        """
        num_anchors, block_size, hidden = block_embeddings.shape
        context = self.context(features.to(block_embeddings.dtype))[None]
        context_rope = self.rope(positions[None])
        masks: Mapping[str, AttentionMask] = mask if isinstance(mask, Mapping) else {FULL: mask}
        rows = num_rows(next(iter(masks.values())))
        x = block_embeddings.reshape(rows, -1, hidden)
        rope = self.rope(block_positions.reshape(rows, -1))
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            run: Callable[..., Any] = layer.train_forward  # type: ignore[assignment]
            args = (x, rope, context, context_rope, masks[layer_type])
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(*args)
        return self.norm(x).view(num_anchors, block_size, hidden)

    def new_cache(
        self, batch_size: int, max_context: int, device: torch.device | str, dtype: torch.dtype
    ) -> ContextCache:
        """An empty cache of ``batch_size`` rows of ``max_context`` positions, in the dtype that drafting runs in."""
        config = self.config
        shape = (batch_size, config.num_kv_heads, max_context + 1, config.head_dim)
        return ContextCache(
            keys=[torch.zeros(shape, device=device, dtype=dtype) for _ in self.layers],
            values=[torch.zeros(shape, device=device, dtype=dtype) for _ in self.layers],
            lengths=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    @torch.no_grad()
    def extend(self, cache: ContextCache, features: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Append the valid context of each row to the cache, in place.

        Args:
            cache: rows of their own lengths. What no longer fits is dropped, and ``cache.lengths`` shows it.
            features: [R, length, K*H].
            positions: [R, length] int64.
            valid: [R, length] bool; the valid ones keep their order.
        """
        context = self.context(features.to(cache.keys[0].dtype))
        rope = self.rope(positions)
        places = cache.lengths[:, None] + valid.cumsum(1) - 1
        places = torch.where(valid, places, cache.max_context).clamp(max=cache.max_context)
        rows = torch.arange(len(places), device=places.device)[:, None]
        for layer, cached_keys, cached_values in zip(self.layers, cache.keys, cache.values, strict=True):
            keys, values = layer.self_attn.keys_values(context, rope)
            cached_keys.transpose(1, 2)[rows, places] = keys.transpose(1, 2)
            cached_values.transpose(1, 2)[rows, places] = values.transpose(1, 2)
        cache.lengths += valid.sum(1)

    @torch.no_grad()
    def draft(self, cache: ContextCache, block_embeddings: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [R, B, H] of one block a row, over that row's context. The cache stays as it is.

        Args:
            cache: of R rows, each with all tokens before its block.
            block_embeddings: [R, B, H], of the last token that is known and of the mask token.
            positions: [R, B] int64.
        """
        size = cache.max_context + 1, block_embeddings.shape[1]
        masks = {kind: cache_mask(cache.lengths, *size, window) for kind, window in self.config.windows.items()}
        x, rope = block_embeddings.to(cache.keys[0].dtype), self.rope(positions)
        layers = zip(self.layers, self.config.layer_types, cache.keys, cache.values, strict=True)
        for layer, layer_type, keys, values in layers:
            x = layer(x, rope, (keys, values), masks[layer_type])
        return self.norm(x)


def save(model: Drafter, path: Path) -> None:
    """Write ``path`` (safetensors) and its configuration beside it (.json). Each appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
    write(weights, dataclasses.asdict(model.config), path)


def write(weights: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> None:
    """The same from the weights by name, contiguous and on the CPU, and the fields of the configuration."""
    text = json.dumps(settings, indent=2) + "\n"
    replace_file(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))
    replace_file(path, lambda temporary: save_file(dict(weights), temporary))


def load(path: Path, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter that ``save`` wrote, in eval mode.

    Raises:
        FileNotFoundError: no drafter there.
        RuntimeError: weights are missing, unknown, or of another shape.
    """
    model = Drafter(DrafterConfig(**json.loads(path.with_suffix(".json").read_text())))
    model.load_state_dict(load_file(path))
    return model.to(device=device, dtype=dtype).eval()
