"""The target: a frozen language model, and the outputs of some of its layers for rows of packed documents.

Guarantees:
- A token sees the tokens of its own document before it and nothing else, and positions start anew in each document, so
  packed documents give what each alone gives. No dense mask: flex_attention on CUDA; elsewhere the documents'
  attention is computed one after the other, and padding is not computed at all.
- The language-model head is not run for features; for the most likely tokens it is run in chunks, so that logits of all
  positions never exist at once.
- ``features`` may be called from several threads; what hooks collect, and whether layers run compiled, is kept per
  thread, so that decoding is the same whatever is compiled for features.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import graphsafe

from .config import InputError
from .fetch import RANDOM, target_settings
from .packed import ATTENTION, document_mask

# Tokens that no text holds and no training moved, by (vocabulary, hidden size, layers).
KNOWN_MASK_TOKENS = {(49152, 576, 30): 16}  # SmolLM2-135M-Instruct: <empty_output>
# Positions that depend on the longest document of a row, so that packed documents would not be what each alone is.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_FULL_ATTENTION = {"full_attention", "attention"}
LABEL_CHUNK = 4096  # positions whose logits exist at once
# What models do to the head's output, as transformers names it. The order of tokens stays, their shares do not.
_LOGIT_CHANGES = ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier", "final_logit_softcapping")
QWEN3_MASK_TOKEN = 151669  # the first row past the tokenizer in the padded embedding of 151,936 rows


def target_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """``num_features`` layers, evenly spaced from layer 1 to the third from last; the middle one for 1.

    Raises:
        ValueError: the target has too few layers for so many different ones.
    """
    if num_features == 1:
        return (num_layers // 2,)
    first, last = 1, num_layers - 3
    ids = tuple(round(first + (last - first) * i / (num_features - 1)) for i in range(num_features))
    if last < first or len(set(ids)) < num_features:
        raise ValueError(f"A target of {num_layers} layers has no {num_features} to read: lower --num-features.")
    return ids


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target, read from the target's configuration alone."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int | None
    tied: bool = False  # whether embedding and head are one

    @classmethod
    def of(cls, config: Any) -> TargetShape:
        """Read a transformers configuration.

        Raises:
            InputError: attention or positions that packed documents cannot have, or no rope_theta.
        """
        tied = bool(getattr(config, "tie_word_embeddings", False))  # the wrapper's own, where there is one
        config = config.get_text_config()
        refuse_unpackable(config)
        num_heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config),
            mask_token_id=_known_mask_token(config),
            tied=tied,
        )


class Target:
    """A frozen causal language model on one device. Has the attributes of ``TargetShape`` too.

    Attributes:
        model: the transformers model, in eval mode.
        tokenizer: its tokenizer; None for a model made in memory.
        config: the model's configuration (of its text part).
        shape: what a drafter must know.
        embed_tokens: its embedding module; lm_head_weight: [V, H], the head.
        eos_token_ids: the tokens that end a text.
        has_plain_logits: whether its logits are the head's products and no more, so that answers can be drawn. Those of
            others are scaled or capped, which leaves the most likely token what it is.

    Raises:
        InputError: attention or positions that packed documents cannot have, or a head with a bias.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.shape = TargetShape.of(model.config)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise InputError("The target's head has a bias, and drafters have none: choose another target.")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        model.set_attn_implementation(ATTENTION)
        self.decoder = model.get_decoder()
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.lm_head_weight: Tensor = model.get_output_embeddings().weight
        self.hidden_size, self.intermediate_size = self.shape.hidden_size, self.shape.intermediate_size
        self.num_layers, self.vocab_size = self.shape.num_layers, self.shape.vocab_size
        self.num_heads, self.num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        self.head_dim, self.mask_token_id = self.shape.head_dim, self.shape.mask_token_id
        self.rms_norm_eps, self.rope_theta = self.shape.rms_norm_eps, self.shape.rope_theta
        self.eos_token_ids = _eos_token_ids(model)
        self.has_plain_logits = all(getattr(self.config, name, None) in (None, 1, False) for name in _LOGIT_CHANGES)
        self._collecting = threading.local()
        self._compiling = threading.local()
        self._has_compiled_layers = False
        for index, layer in enumerate(self.decoder.layers):
            layer.register_forward_hook(self._collector(index))

    @property
    def device(self) -> torch.device:
        return self.lm_head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head_weight.dtype

    def drop_layers_after(self, last: int) -> None:
        """Drop the layers after layer ``last``, which its features don't need. The model then no longer speaks."""
        del self.decoder.layers[last + 1 :]

    @torch.no_grad()
    def features(self, tokens: Tensor, document_ids: Tensor, positions: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        """Outputs of the layers ``layer_ids`` for a packed row, side by side.

        Args:
            tokens, document_ids, positions: [T] int64, on the target's device; document_ids are negative where padding,
                which comes last.
            layer_ids: the K layers.
        Returns:
            [T, K*H] in the model's dtype. Padding is zero on CPU, and means nothing elsewhere.
        Sync: none on CUDA.
        """
        return self._read(tokens, document_ids, positions, layer_ids)[0]

    @torch.no_grad()
    def features_and_tokens(
        self,
        tokens: Tensor,
        document_ids: Tensor,
        positions: Tensor,
        layer_ids: tuple[int, ...],
        chunk: int = LABEL_CHUNK,
    ) -> tuple[Tensor, Tensor]:
        """The same features, and at each place the token that the target holds most likely to come next.

        Args:
            tokens, document_ids, positions, layer_ids: as in ``features``.
            chunk: positions whose logits exist at once.
        Returns:
            [T, K*H], and [T] int64: at p the token to follow the one at p, after reading its document up to p. (At a
            document's last place it is the one that would follow the document. Padding's is 0 on the CPU, and means
            nothing elsewhere.)
        Raises:
            RuntimeError: ``drop_layers_after`` has been called.
        Sync: none on CUDA.
        """
        if len(self.decoder.layers) < self.num_layers:
            raise RuntimeError("The target's last layers have been dropped, so it no longer says what comes next.")
        features, hidden = self._read(tokens, document_ids, positions, layer_ids)
        next_tokens = torch.zeros_like(tokens)
        if hidden is not None:
            for part, place in zip(hidden.split(chunk), next_tokens[: len(hidden)].split(chunk), strict=True):
                torch.argmax(F.linear(part, self.lm_head_weight), dim=-1, out=place)
        return features, next_tokens

    def _read(
        self, tokens: Tensor, document_ids: Tensor, positions: Tensor, layer_ids: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Features, and what the head reads [places that were computed, H]; None where there are none."""
        mask: Any
        if tokens.is_cuda:
            mask, num_valid = document_mask(document_ids), len(tokens)
        else:
            kept = document_ids[document_ids >= 0]
            num_valid = len(kept)
            mask = torch.unique_consecutive(kept, return_counts=True)[1].view(1, 1, 1, -1)
        out = torch.zeros(len(tokens), len(layer_ids), self.hidden_size, dtype=self.dtype, device=self.device)
        if num_valid == 0:
            return out.flatten(1), None
        with self.collecting({layer: out[:num_valid, place] for place, layer in enumerate(layer_ids)}):
            hidden = self.decoder(
                input_ids=tokens[None, :num_valid],
                position_ids=positions[None, :num_valid],
                attention_mask=mask,
                use_cache=False,
            ).last_hidden_state[0]
        return out.flatten(1), hidden

    def compile_layers(self) -> None:
        """Let layers run compiled in ``compiled_layers``. To be done before threads use the target; again does nothing.

        What is compiled is a layer's forward with the layer as its argument. Its weights are then inputs, so one
        compiled form serves all layers of a kind.
        """
        if self._has_compiled_layers:
            return
        self._has_compiled_layers = True
        kinds = {type(layer): type(layer).forward for layer in self.decoder.layers}
        compiled = {kind: graphsafe.compile(forward, dynamic=False) for kind, forward in kinds.items()}
        for layer in self.decoder.layers:
            layer.forward = self._dispatcher(layer.forward, partial(compiled[type(layer)], layer))

    @contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """After ``compile_layers``: run them compiled when this thread runs the decoder in the block. Hooks are not."""
        before, self._compiling.on = getattr(self._compiling, "on", False), True
        try:
            yield
        finally:
            self._compiling.on = before

    def _dispatcher(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (compiled if getattr(self._compiling, "on", False) else eager)(*args, **kwargs)

        return forward

    @contextmanager
    def collecting(self, into: Mapping[int, Tensor]) -> Iterator[None]:
        """Copy the outputs of these layers, [rows * length, H], when this thread runs the decoder in the block."""
        self._collecting.into = into
        try:
            yield
        finally:
            self._collecting.into = None

    def _collector(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def collect(module: nn.Module, args: Any, output: Any) -> None:
            into: Mapping[int, Tensor] | None = getattr(self._collecting, "into", None)
            if into is not None and index in into:
                into[index].copy_((output[0] if isinstance(output, tuple) else output).flatten(0, 1))

        return collect


def load_target(name_or_dir: str | Path, device: torch.device | str, dtype: torch.dtype) -> Target:
    """The target from a Hugging Face directory or hub name, on ``device``; ``random:NAME``: see ``random_target``.

    Raises:
        InputError: no such model; transformers cannot load it; weights are missing from its files; or attention that
            packed documents cannot have (sliding windows, linear attention).
    """
    name = str(name_or_dir)
    if name.startswith(RANDOM):
        return random_target(name, device, dtype)
    try:
        settings = transformers.AutoConfig.from_pretrained(name)
        refuse_unpackable(settings.get_text_config())
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model, report = model_class(settings).from_pretrained(
            name, dtype=dtype, low_cpu_mem_usage=True, output_loading_info=True
        )
    except InputError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as exc:
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise InputError(
            f"transformers cannot load the target {name}: {lines[0]} Give --target a whole Hugging Face directory of a "
            "causal language model that the installed transformers knows."
        ) from exc
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"The files of the target {name} lack {len(missing)} of its weights, {missing[0]} among them; transformers "
            "would make them up. Fetch it again, or correct its config.json."
        )
    return Target(model.to(device), tokenizer)


def random_target(name: str, device: torch.device | str, dtype: torch.dtype) -> Target:
    """A target of the architecture that follows ``random:``, with random weights, for measurements only.

    The weights are made on the device in ``dtype``, the same on each device of one kind, in seconds for billions. It
    has no tokenizer, so the data must be tokens already.

    Raises:
        InputError: there is no such architecture, or its attention is not for packed documents.
    """
    settings, device = target_settings(name), torch.device(device)
    refuse_unpackable(settings.get_text_config())
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would touch every device's
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        model = model_class(settings).from_config(settings, dtype=dtype)
    return Target(model.to(device))


def model_class(settings: Any) -> Any:
    """The auto class for a causal language model, or for a multimodal one whose text part is one."""
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING or type(settings) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def refuse_unpackable(config: Any) -> None:
    """Raise InputError where packed documents would not get what each alone gets.

    That is where a layer's attention is not full causal attention, or where positions are rotated by angles that
    depend on the longest sequence of a row (dynamic and long rope scaling; the fixed scaling of Llama 3, linear and
    yarn is no obstacle).

    Args:
        config: the model's, of its text part.
    """
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    kinds -= _FULL_ATTENTION
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    # Where layers have no kinds it is of all of them; a window over all positions is none.
    if window is not None and window < getattr(config, "max_position_embeddings", window + 1):
        kinds = {f"sliding_attention (over {window} tokens)"}
    if kinds:
        raise InputError(
            f"The target has layers of {', '.join(sorted(kinds))}. Features of packed documents need full attention "
            "in every layer: choose another target."
        )
    rope = _rope_parameters(config).get("rope_type")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise InputError(
            f"The target scales its positions by the length of the text (rope_type {rope!r}), so that a document's "
            "features would depend on those it is packed with: choose another target, or take that rope scaling out of "
            "its config.json if no text is longer than what it was first trained on."
        )


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Base and scaling of the positions; transformers 4 kept the scaling apart."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _rope_theta(config: Any) -> float:
    theta = _rope_parameters(config).get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        raise InputError("The target's configuration names no rope_theta: the drafter's positions cannot follow it.")
    return float(theta)


def _known_mask_token(config: Any) -> int | None:
    known = KNOWN_MASK_TOKENS.get((config.vocab_size, config.hidden_size, config.num_hidden_layers))
    if known is None and config.model_type == "qwen3" and config.vocab_size == 151936:
        return QWEN3_MASK_TOKEN
    return known


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,))
