"""Which optional packages the fast path of a model needs, read from its configuration.

Two sources: the installed transformers' own modeling file for the model type, searched for the packages that it takes
its kernels from; and the tables here, for what is not installed or not written there. Nothing is imported from either.

Guarantees:
- No package is imported, so a broken one counts as installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_config import check_gguf, find_config, read_config, shown


@dataclass(frozen=True)
class Need:
    """A package that a model wants.

    Attributes:
        package: as pip knows it; where any of several will do, the one to install.
        found: what is installed, with its version; None where it is missing or too old.
        why: what of the model wants it.
        cost: what happens without it.
    """

    package: str
    found: str | None
    why: str
    cost: str


@dataclass(frozen=True)
class ModelReport:
    """What a model needs.

    Attributes:
        source: the file that was read.
        model_types: of the model and of its parts.
        known: whether the model type is known to the installed transformers or to the tables here.
        needs: every package, installed or not.
        notes: what else there is to know.
        doubts: what nothing can be said about although the model needs it.
    """

    name: str
    source: str
    model_types: tuple[str, ...]
    known: bool
    needs: tuple[Need, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Need, ...]:
        return tuple(need for need in self.needs if need.found is None)


# import name -> (name for pip, oldest version that transformers takes, what happens without it).
# Sources: the is_*_available() functions of transformers/utils/import_utils.py and the fallbacks in
# transformers/integrations/hub_kernels.py, transformers 4.57 and 5.
_KERNELS = {
    "fla": ("flash-linear-attention", "0.2.2", "linear attention runs in a plain torch loop: right, but much slower"),
    "causal_conv1d": ("causal-conv1d", "", "short convolutions run in plain torch: right, but slower"),
    "mamba_ssm": ("mamba-ssm", "", "the state-space scan runs in a plain torch loop: right, but much slower"),
    "xlstm": ("xlstm", "", "the mLSTM cell runs in a plain torch loop: right, but much slower"),
    "natten": ("natten", "", "the model does not load: neighbourhood attention has no other way"),
}
_AVAILABLE = {
    "flash_linear_attention": "fla",
    "causal_conv1d": "causal_conv1d",
    "mamba_ssm": "mamba_ssm",
    "mamba_2_ssm": "mamba_ssm",
    "xlstm": "xlstm",
    "natten": "natten",
}
_DELTA_RULE, _STATE_SPACE, _CONVOLUTION = ("fla", "causal_conv1d"), ("mamba_ssm", "causal_conv1d"), ("causal_conv1d",)
# model type -> import names, for where transformers is missing or does not know the type. Source: the modeling files.
_MODEL_TYPES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid"), _DELTA_RULE),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DELTA_RULE),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "falcon_h1", "nemotron_h"), _STATE_SPACE),
    **dict.fromkeys(("zamba", "zamba2", "granitemoehybrid"), _STATE_SPACE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION),
    "xlstm": ("xlstm",),
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"), ()),
}
# attn_implementation -> packages, any of which will do. Source: transformers/modeling_flash_attention_utils.py.
_ATTENTION = {
    "flash_attention_2": "flash_attn=flash-attn|kernels",
    "flash_attention_3": "flash_attn_interface=flash-attn-3|kernels",
    "flash_attention_4": "flash_attn=flash-attn-4|kernels",
}
# quant_method -> packages, all of which are needed; of "a|b" any; "import name=name for pip" where hyphens do not do.
# Source: transformers/quantizers/quantizer_*.py.
_QUANTISATION = {
    "aqlm": ("aqlm", "accelerate"),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel|awq=autoawq", "accelerate"),
    "bitnet": ("accelerate",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels|eetq", "accelerate"),
    "fbgemm_fp8": ("fbgemm_gpu=fbgemm-gpu-genai", "accelerate"),
    "fouroversix": ("fouroversix",),
    "fp8": ("accelerate", "triton", "kernels"),
    "fp_quant": ("fp_quant=fp_quant",),
    "gptq": ("optimum", "gptqmodel|auto_gptq"),
    "higgs": ("flute=flute-kernel", "fast_hadamard_transform=fast_hadamard_transform", "accelerate"),
    "hqq": ("hqq",),
    "mxfp4": ("accelerate", "triton", "kernels"),
    "mxfp8": ("accelerate", "triton", "kernels"),
    "nvfp4": ("kernels",),
    "quanto": ("optimum.quanto=optimum-quanto", "accelerate"),
    "quark": ("quark=amd-quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant=spqr_quant", "accelerate"),
    "torchao": ("torchao",),
    "vptq": ("vptq", "accelerate"),
}
_DEQUANTISED = ("mxfp4", "mxfp8", "fp8")  # loaded as bfloat16 instead where the kernels are missing
_MODEL_TYPE = re.compile(r"\w[\w.-]{0,99}")  # what can be the name of a folder of transformers
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def inspect_model(model: str) -> ModelReport:
    """What the model's fast path needs, and which of it is here.

    Args:
        model: a directory with a config.json, such a file, a .gguf file, or a name on the hub.
    Raises:
        ModelConfigError: there is no configuration, or it is no JSON object, or no GGUF file.
    """
    source = find_config(model)
    if source.suffix == ".gguf":
        check_gguf(source)
        cost = "transformers cannot read the file"
        return ModelReport(model, str(source), ("gguf",), True, (_need("gguf", "the GGUF file", cost),), ())
    config = read_config(source)
    parts = list(_parts(config))
    types = tuple(dict.fromkeys(str(part["model_type"]) for part in parts if part.get("model_type")))
    wanted, known, notes = _kernels(types, source.parent)
    if wanted and not _has_other_layers(parts):
        wanted, notes = {}, [*notes, "every layer is plain attention, so the kernels for other layers are not needed"]
    needs = [_kernel_need(name, why) for name, why in wanted.items()]
    needs += _attention_needs(parts)
    needs += _quantisation_needs(parts)
    notes += _expert_notes(parts)
    doubts = tuple(dict.fromkeys(_doubts(parts)))
    return ModelReport(model, str(source), types, known, tuple(dict.fromkeys(needs)), tuple(notes), doubts)


# What it wants


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration and those nested in it, such as text_config."""
    pending = [config]
    while pending:
        part = pending.pop()
        yield part
        nested = [key for key in part if key.endswith("_config") and key != "quantization_config"]
        pending += [part[key] for key in reversed(nested) if isinstance(part[key], dict)]


def _kernels(types: tuple[str, ...], beside: Path) -> tuple[dict[str, str], bool, list[str]]:
    """import name -> who wants it; whether any type is known; notes."""
    wanted: dict[str, str] = {}
    known, notes = False, []
    installed = version_of("transformers", "transformers")
    for model_type in types:
        files = _modeling_files(model_type)
        names = [name for file in files for name in _names_in(file.read_text(encoding="utf-8"))]
        if not files and model_type in _MODEL_TYPES:
            names = list(_MODEL_TYPES[model_type])
            if installed is not None:
                notes.append(f"the installed transformers {installed} does not know {model_type!r}")
        known = known or bool(files) or model_type in _MODEL_TYPES
        for name in names:
            wanted.setdefault(name, f"layers of {model_type}")
    for file in sorted(beside.glob("modeling*.py")):  # code that comes with the model
        code = file.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r"^\s*(?:from|import)\s+(\w+)", code, re.M):
            if name in _KERNELS:
                wanted.setdefault(name, file.name)
        known = True
    if installed is None:
        notes.append("transformers is not installed, so this rests on a table of model types")
    return wanted, known, notes


def _modeling_files(model_type: str) -> list[Path]:
    """The installed transformers' code for a model type; its folder may have the name of the whole model."""
    transformers = _folder("transformers")
    if transformers is None:
        return []
    if not _MODEL_TYPE.fullmatch(model_type):
        return []
    models = transformers / "models"
    folder = models / model_type.replace("-", "_")
    if not folder.is_dir():
        says = re.compile(rf"^\s+model_type\s*=\s*[\"']{re.escape(model_type)}[\"']", re.M)
        configurations = sorted(models.glob("*/configuration_*.py"))
        folder = next((file.parent for file in configurations if says.search(file.read_text(encoding="utf-8"))), folder)
    return sorted(folder.glob("modeling_*.py"))


def _names_in(code: str) -> Iterator[str]:
    """Import names of the packages from which a modeling file takes kernels."""
    for name in re.findall(r"use_kernel_func_from_hub_with_fallback\(\s*\"\w+\",\s*\"(\w+)\"", code):
        yield name
    for name in re.findall(r"lazy_load_kernel\(\s*\"([\w-]+)\"", code):
        if name.replace("-", "_") in _KERNELS:
            yield name.replace("-", "_")
    for name in re.findall(r"\bis_(\w+)_available\b", code):
        if name in _AVAILABLE:
            yield _AVAILABLE[name]


def _has_other_layers(parts: list[Mapping[str, Any]]) -> bool:
    """False where the configuration lists its layers and all are plain attention."""
    lists = [part.get(key) for part in parts for key in ("layer_types", "layers_block_type")]
    kinds = {str(kind) for kinds in lists if isinstance(kinds, list) for kind in kinds}
    plain = {"moe", "mlp", "dense", "sparse"}
    return not kinds or any(("attention" not in kind or "linear" in kind) and kind not in plain for kind in kinds)


def _attention_needs(parts: list[Mapping[str, Any]]) -> Iterator[Need]:
    for part in parts:
        name = str(part.get("_attn_implementation") or part.get("attn_implementation") or "")
        why = f"attn_implementation {name!r}"
        if name in _ATTENTION:
            yield _need(_ATTENTION[name], why, "the model does not load with it; choose 'sdpa'")
        elif "/" in name:
            yield _need("kernels", why, "the kernel cannot be fetched, and the model does not load")


def _quantisation_needs(parts: list[Mapping[str, Any]]) -> Iterator[Need]:
    for method in _quantisations(parts):
        for packages in _QUANTISATION.get(method, ()):
            falls_back = method in _DEQUANTISED and packages != "accelerate"
            cost = "the weights are dequantised, or refused" if falls_back else "the quantised weights do not load"
            yield _need(packages, f"quantisation {method!r}", cost)


def _doubts(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    for method in _quantisations(parts):
        if method and method not in _QUANTISATION:
            yield f"quantisation {shown(method)} is not known: nothing can be said about the packages it needs"


def _quantisations(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        settings = part.get("quantization_config")
        if isinstance(settings, dict):
            bits = settings.get("load_in_4bit") or settings.get("load_in_8bit")
            yield "bitsandbytes" if bits else str(settings.get("quant_method") or "")


def _expert_notes(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    if not any(isinstance(part.get(key), int) and part[key] > 1 for part in parts for key in _EXPERTS):
        return
    transformers = _folder("transformers")
    if transformers is None or (transformers / "integrations" / "moe.py").is_file():
        yield "mixture of experts: transformers 5 runs the experts as torch's grouped matmul, no further package needed"
    else:
        yield "mixture of experts: this transformers runs the experts one by one in a loop; transformers 5 does not"


# What is installed


def _kernel_need(name: str, why: str) -> Need:
    pip_name, minimum, cost = _KERNELS.get(name, (name.replace("_", "-"), "", "its layers run in plain torch: slower"))
    return _need(f"{name}={pip_name}", why, cost, minimum)


def _need(packages: str, why: str, cost: str, minimum: str = "") -> Need:
    """A need for any one of ``a|b``, each an import name, with ``=`` and its name for pip where that differs."""
    names, found = [], None
    for package in packages.split("|"):
        name, _, pip_name = package.partition("=")
        names.append(pip_name or name.replace("_", "-"))
        version = version_of(name, names[-1])
        if found is None and version is not None and _numbers(version) >= _numbers(minimum):
            found = f"{names[-1]} {version}".rstrip()
    return Need(f"{names[0]}>={minimum}" if minimum else names[0], found, why, cost)


def _folder(name: str) -> Path | None:
    """Where a package lies that would be imported; None where it is missing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def version_of(name: str, pip_name: str) -> str | None:
    """The version of an installed package, "" where it does not tell; None where it is missing. Imports nothing."""
    top, _, below = name.partition(".")
    try:
        if importlib.util.find_spec(top) is None:
            return None
        return importlib.metadata.version(pip_name)
    except importlib.metadata.PackageNotFoundError:
        # Installed under another name; but several packages share flash_attn, and a mere folder is no package.
        if below or top == "flash_attn" or _folder(top) is None:
            return None
        distributions = importlib.metadata.packages_distributions().get(top, [])
        return importlib.metadata.version(distributions[0]) if distributions else ""
    except (ImportError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
