"""What an exported drafter's directory must hold in each format: the fields of its config.json and its tensors.

``servers`` is the checkpoint of z-lab that vLLM and SGLang load. ``speculators`` is that of the library speculators
(0.9), which vLLM loads too. Both have the same tensors: embedding and head are the target's, so neither has them.

What the readers do, and what is therefore refused here rather than written:
- The features are the outputs of the layers ``target_layer_ids``, counted from 0; speculators counts the embeddings as
  0, so its ids are higher by 1. vLLM collects them in the order of the layers, and not all readers see the same at the
  last layer, whose output may or may not be normed.
- vLLM takes 1e6 where no rope_theta is given, and transformers 10,000, without a word: it is written for both
  generations of transformers.
- Without ``causal`` in dflash_config, vLLM and SGLang let a full layer see its block both ways and a sliding layer only
  backwards, which is how they were trained.
- vLLM takes ``sliding_window_non_causal: false`` of speculators for "all layers are causal", full ones too. So it is
  written as true, which means nothing to layers that do not slide, and drafters with sliding layers are refused; the
  library counts their window from the anchor besides, not from the slot.

Guarantees:
- ``read`` returns the ``DrafterConfig`` that ``write`` was given, or says what this drafter cannot do.
- Fields that change what a server computes, and that this drafter does not have, are errors and not ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .config import InputError
from .drafter import DrafterConfig

Format = Literal["servers", "speculators"]

SPECULATORS_VERSION = "0.9.0"
_ARCHITECTURE = "DFlashDraftModel"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What dflash_config may say; other things that are set there change what a server computes.
_KNOWN_DFLASH_FIELDS = {"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "mask_token", "causal"}


@dataclass(frozen=True)
class Verifier:
    """What a format says of the target beside what the drafter knows of it.

    Attributes:
        name: a name on the Hub, or a directory.
        architectures: as in its config.json.
        max_position_embeddings: vLLM and SGLang make the drafter's rotary table this long.
    """

    name: str
    architectures: tuple[str, ...]
    max_position_embeddings: int


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The name and the shape of every tensor that both formats demand; no other may be there."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_tensors(config: DrafterConfig, found: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise InputError where names or shapes are not those of ``tensor_shapes``. ``what`` is where they were found."""
    expected = tensor_shapes(config)
    faults = []
    if missing := [name for name in expected if name not in found]:
        faults.append(f"it lacks {_some(missing)}")
    if unknown := [name for name in found if name not in expected]:
        faults.append(f"it has {_some(unknown)}, which this drafter has not and servers ignore without a word")
    faults += [
        f"{name} has the shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ][:3]
    if faults:
        raise InputError(f"{what} is no drafter of the shape that its configuration names: {'; '.join(faults)}.")


def canonical(config: DrafterConfig) -> DrafterConfig:
    """The same drafter, said in the one way that can be read back: no window where no layer slides."""
    num_full = config.layer_types.count(_FULL)
    if num_full == config.num_layers:
        return dataclasses.replace(config, sliding_window=None, num_full_layers=1)
    return dataclasses.replace(config, num_full_layers=num_full)


def check_servable(config: DrafterConfig) -> None:
    """Raise InputError for a drafter that a server would load and run wrongly."""

    def require(condition: bool, fault: str) -> None:
        if not condition:
            raise InputError(f"This drafter cannot be served: {fault}.")

    theta, ids, last = config.rope_theta, config.target_layer_ids, config.num_target_layers - 1
    require(
        isinstance(theta, int | float) and math.isfinite(theta) and theta > 0,
        f"its rope_theta is {theta!r}, and servers would take their own: it must be the number it was trained with",
    )
    require(config.head_dim % 2 == 0, f"its head_dim is {config.head_dim}, but rotary embeddings need an even one")
    require(config.block_size >= 2, f"its block_size is {config.block_size}, which leaves nothing to draft")
    require(
        0 <= config.mask_token_id < config.vocab_size,
        f"its mask_token_id is {config.mask_token_id}, but the target's embedding has {config.vocab_size} rows",
    )
    require(len(ids) > 0, "it has no target_layer_ids")
    require(
        all(0 <= layer <= last for layer in ids),
        f"its target_layer_ids are {list(ids)}, but the target has layers 0 to {last}",
    )
    require(
        list(ids) == sorted(set(ids)),
        f"its target_layer_ids are {list(ids)}, but vLLM reads them from the lowest to the highest, each once",
    )
    require(ids[-1] < last, f"it reads the target's last layer, {last}, which servers give it with or without the norm")


def write(format_: Format, config: DrafterConfig, verifier: Verifier, dtype: str) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        config: of a drafter that ``check_servable`` lets pass.
        dtype: of the tensors, as torch names it.
    Raises:
        InputError: the format cannot say what this drafter is.
    """
    sliding = _SLIDING in config.layer_types
    transformer = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": verifier.max_position_embeddings,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,  # without it, transformers drops the window
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.num_layers,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if format_ == "servers":
        return {
            "architectures": [_ARCHITECTURE],
            **transformer,
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
                "block_size": config.block_size,
            },
        }
    if sliding:
        raise InputError(
            "This drafter has sliding layers, which readers of the format of speculators take for something else (vLLM "
            "makes its full layers causal too). Export it with --export-format servers."
        )
    return {
        "architectures": [_ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": transformer,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "num_target_layers": config.num_target_layers,  # the library keeps it; ``read`` needs it
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def read(record: object, what: str) -> DrafterConfig:
    """The drafter that a config.json of either format describes.

    Args:
        record: its parsed contents.
        what: its path, for errors.
    Raises:
        InputError: it is of neither format, lacks something, or asks for what this drafter does not do.
    """
    fields = _Fields(record, what)
    if "speculators_model_type" in fields.values:
        config = _read_speculators(fields)
    elif _ARCHITECTURE in (fields.values.get("architectures") or []):
        config = _read_servers(fields)
    else:
        raise InputError(f"{what} describes no DFlash drafter: architectures does not name {_ARCHITECTURE}.")
    check_servable(config)
    return config


class _Fields:
    """The fields of a JSON object; errors name the file and the field."""

    def __init__(self, values: object, what: str) -> None:
        if not isinstance(values, dict):
            raise InputError(f"{what} is no JSON object, so it is no drafter's configuration.")
        self.values: dict[str, Any] = values
        self.what = what

    def integer(self, name: str) -> int:
        value = self._present(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{self.what}: {name} is {value!r}, but it must be an integer.")
        return value

    def positive(self, name: str) -> int:
        value = self.integer(name)
        if value < 1:
            raise InputError(f"{self.what}: {name} is {value}, but it must be at least 1.")
        return value

    def number(self, name: str) -> float:
        value = self._present(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0 or not math.isfinite(value):
            raise InputError(f"{self.what}: {name} is {value!r}, but it must be a number above 0.")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._present(name)
        if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            raise InputError(f"{self.what}: {name} is {value!r}, but it must be a list of integers.")
        return tuple(value)

    def part(self, name: str) -> _Fields:
        return _Fields(self._present(name), f"{self.what}: {name}")

    def refuse(self, name: str, *harmless: object) -> None:
        """Raise unless the field is absent, null, or one of the values that this drafter has anyhow."""
        value = self.values.get(name)
        if value is not None and value not in harmless:
            raise InputError(f"{self.what}: {name} is {value!r}, which this drafter does not do.")

    def _present(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            raise InputError(f"{self.what} does not say {name}, which a drafter needs.")
        return value


def _read_servers(fields: _Fields) -> DrafterConfig:
    dflash = fields.part("dflash_config")
    unknown = [name for name, value in dflash.values.items() if name not in _KNOWN_DFLASH_FIELDS and value]
    if unknown:
        raise InputError(f"{dflash.what} sets {_some(unknown)}, which this drafter does not do.")
    place = dflash if "block_size" in dflash.values else fields
    config = _read_transformer(
        fields,
        block_size=place.integer("block_size"),
        mask_token_id=dflash.integer("mask_token_id"),
        target_layer_ids=dflash.integers("target_layer_ids"),
        num_target_layers=(dflash if "num_target_layers" in dflash.values else fields).positive("num_target_layers"),
    )
    natural = {False} if _SLIDING not in config.layer_types else set()  # an override holds for all layers
    dflash.refuse("causal", *natural)
    fields.refuse("is_causal", *natural)
    return config


def _read_speculators(fields: _Fields) -> DrafterConfig:
    fields.refuse("speculators_model_type", "dflash")
    fields.refuse("sample_from_anchor", False)
    layers = fields.part("transformer_layer_config")
    fields.refuse("draft_vocab_size", layers.positive("vocab_size"))
    fields.refuse("target_hidden_size", layers.positive("hidden_size"))
    config = _read_transformer(
        layers,
        block_size=fields.integer("block_size"),
        mask_token_id=fields.integer("mask_token_id"),
        target_layer_ids=tuple(layer - 1 for layer in fields.integers("aux_hidden_state_layer_ids")),
        num_target_layers=fields.positive("num_target_layers"),
    )
    if _SLIDING in config.layer_types:
        raise InputError(f"{layers.what} has sliding layers, whose window speculators counts in another way.")
    return config


def _read_transformer(
    fields: _Fields, *, block_size: int, mask_token_id: int, target_layer_ids: tuple[int, ...], num_target_layers: int
) -> DrafterConfig:
    fields.refuse("model_type", "qwen3")
    fields.refuse("attention_bias", False)
    fields.refuse("hidden_act", "silu")
    fields.refuse("is_neox_style", True)
    fields.refuse("rope_is_neox_style", True)
    num_layers = fields.positive("num_hidden_layers")
    sliding_window, num_full_layers = _windows(fields, num_layers)
    try:
        return DrafterConfig(
            hidden_size=fields.positive("hidden_size"),
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=fields.positive("num_attention_heads"),
            num_kv_heads=fields.positive("num_key_value_heads"),
            head_dim=fields.positive("head_dim"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_rope_theta(fields),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids,
            vocab_size=fields.positive("vocab_size"),
            num_target_layers=num_target_layers,
            sliding_window=sliding_window,
            num_full_layers=num_full_layers,
        )
    except InputError:
        raise
    except ValueError as exc:
        raise InputError(f"{fields.what}: {exc}") from exc


def _rope_theta(fields: _Fields) -> float:
    """The base of the rotary embedding, wherever it stands; plain embeddings only."""
    found = [fields.number("rope_theta")] if fields.values.get("rope_theta") is not None else []
    for name in ("rope_parameters", "rope_scaling"):
        if fields.values.get(name) is None:
            continue
        rope = fields.part(name)
        rope.refuse("rope_type", "default")
        rope.refuse("type", "default")
        rope.refuse("partial_rotary_factor", 1.0)
        rope.refuse("mrope_section")
        if rope.values.get("rope_theta") is not None:
            found.append(rope.number("rope_theta"))
    fields.refuse("partial_rotary_factor", 1.0)
    if not found:
        raise InputError(
            f"{fields.what} does not say rope_theta, and each reader would take another: add the target's."
        )
    if len(set(found)) > 1:
        raise InputError(f"{fields.what} says two different rope_theta, {found[0]:g} and {found[-1]:g}.")
    return found[0]


def _windows(fields: _Fields, num_layers: int) -> tuple[int | None, int]:
    """The window of the sliding layers, or None, and the number of full layers after them."""
    types = fields.values.get("layer_types")
    if types is None:
        fields.refuse("use_sliding_window", False)
        return None, 1
    num_sliding = types.count(_SLIDING) if isinstance(types, list) else 0
    if types != [_SLIDING] * num_sliding + [_FULL] * (num_layers - num_sliding):
        raise InputError(
            f"{fields.what}: layer_types is {types!r}. This drafter has {num_layers} layers, of which {_SLIDING} come "
            f"first and {_FULL} after them."
        )
    if num_sliding == 0:
        return None, 1
    if fields.values.get("use_sliding_window") is not True:  # transformers would drop the window
        raise InputError(f"{fields.what} has sliding layers, but does not say use_sliding_window: true.")
    return fields.positive("sliding_window"), num_layers - num_sliding


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
