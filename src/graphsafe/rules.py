"""What breaks a capture: each operator and function that a GPU's capture would refuse, with why and the cure.

Guarantees:
- One place for these rules: ``lint`` reports by them and the CPU's capture pass refuses by them.
- Nothing here runs an operator; what is looked at is which function is called, and with which kinds of arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .repairs import private
from .repairs.private import tree_flatten

READ = "the host reads a value that the device computes, and a replay would go on with the old one"
SHAPE = "the shape of a result depends on data, and a replay would keep the old one"
GENERATOR = "random numbers come from an unknown generator, and every replay would repeat them"

_READ_FIX = "Keep the value on the device (torch.where, masks), or return it and read it after the step."
_SHAPE_FIX = (
    "Use a fixed size: graphsafe.padding.fixed_nonzero or random_topk, torch.nonzero_static, a mask in place of "
    "boolean indexing."
)
_GENERATOR_FIX = "Draw from the default generator, which is the context's in a graphsafe capture."


@dataclass(frozen=True)
class Problem:
    """One thing that breaks a capture.

    Attributes:
        op: the operator or function.
        why: what is wrong with it, without a full stop.
        fix: what to do, in sentences.
    """

    op: str
    why: str
    fix: str


# Functions that read a tensor without an operator that would show it on the CPU.
_READING_NAMES = ("tolist", "numpy", "__array__", "__repr__", "__format__", "__dlpack__", "cpu")
READS = {getattr(torch.Tensor, name) for name in _READING_NAMES if hasattr(torch.Tensor, name)}
# Functions that make a tensor of what Python hands them.
FROM_VALUES = frozenset({"tensor", "as_tensor", "asarray"})

_EX = (
    "torch.linalg checks on the host whether it worked. Use the variant with _ex and check_errors=False "
    "(torch.linalg.inv_ex, cholesky_ex, solve_ex), or do this outside the step."
)
_CONVERGED = "This decomposition asks on the host whether it converged. Do it outside the step."
_RANGE = "With min equal to max, torch.histc reads the range on the host. Give it min and max."
_STACK = "The tensors are read on the host to make a new one of them. Use torch.stack."

_BRANCH = "Torch chooses the branch on the host where it is not compiled. Compute both, and use torch.where."

_BRANCHES = frozenset({"cond", "while_loop"})
_DECOMPOSITIONS = frozenset({"_linalg_svd", "_linalg_eigh", "linalg_eig"})

_SHAPE_FIXES: dict[str, str] = {
    "nonzero": (
        "Use indices, count = graphsafe.padding.fixed_nonzero(mask, size), or torch.nonzero_static(x, size=size); "
        "torch.where with three arguments needs no indices at all."
    ),
    "index": (
        "A boolean mask as an index counts its true places on the host. Keep the shape and use torch.where or "
        "x.masked_fill, or index with the first of graphsafe.padding.fixed_nonzero(mask, size), which are indices and "
        "how many are real."
    ),
    "repeat_interleave": "Pass output_size=, the length of the result.",
    "index_put": (
        "Values put where a mask is true are placed by counting on the host. Use torch.where(mask, values, x), or "
        "x.masked_fill_(mask, value) for one value."
    ),
    "bincount": "Use torch.zeros(num_bins, device=...).scatter_add_(0, x, ones) with a fixed number of bins.",
    "unique": (
        "There is no unique of fixed size: sort and compare neighbours (torch.sort, torch.where), or do it outside."
    ),
    "linalg_lstsq": _CONVERGED,
    "_ctc_loss": "Compute this loss outside the step; its work depends on the lengths' values.",
}
_SHAPE_FIXES |= {
    "masked_select": _SHAPE_FIXES["index"].replace("A boolean mask as an index", "masked_select"),
    "argwhere": _SHAPE_FIXES["nonzero"],
    "_unsafe_index": _SHAPE_FIXES["index"],
    **{name: _SHAPE_FIXES["index_put"] for name in ("index_put_", "_index_put_impl_", "_unsafe_index_put")},
    **{name: _SHAPE_FIXES["unique"] for name in ("_unique", "_unique2", "unique_dim", "unique_consecutive")},
}
# What the user's line says beside the operator, and the cure that fits it better.
_LINE_FIXES: tuple[tuple[str, str], ...] = (
    (".mean(", "Use graphsafe.padding.masked_mean(x, mask)."),
    ("randperm(", "Use graphsafe.padding.random_topk(mask, k): k of the true places at random, of fixed shape."),
    ("multinomial(", "Use graphsafe.padding.random_topk(mask, k): k of the true places at random, of fixed shape."),
)
# Where in torch a host read stands, and the cure that fits it better.
_SITE_FIXES: tuple[tuple[str, str], ...] = (
    ("torch/amp/grad_scaler", "Under a GradScaler only fused Adam, AdamW and SGD skip a step without asking the host: "
     "give the optimizer fused=True, and read the scale after the step."),
    ("torch/distributions/", "torch.distributions checks its arguments on the host: pass validate_args=False."),
    ("torch/nn/utils/clip_grad", "Pass error_if_nonfinite=False, and look at the returned norm after the step."),
)  # fmt: skip


def name_of(func: Any) -> str:
    """An operator's name without its namespace and overload, or a function's."""
    return str(func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else getattr(func, "__name__", func))


def label(func: Any) -> str:
    """How an operator or function is called in a message."""
    if hasattr(func, "overloadpacket"):
        return str(func)
    name = name_of(func)
    for owner, prefix in ((torch.Tensor, "Tensor"), (torch, "torch"), (torch.nn.functional, "torch.nn.functional")):
        if getattr(owner, name, None) is func:
            return f"{prefix}.{name}"
    family, _, rest = name.partition("_")
    return f"torch.{family}.{rest}" if rest and family in ("linalg", "fft", "special") else name


def operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Iterable[torch.Generator]) -> str | None:
    """Why an operator breaks a capture: READ, SHAPE or GENERATOR; None where it does not.

    Args:
        known: the generators that a capture knows.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and not any(private.same_generator(value, one) for one in known):
            return GENERATOR
    tags, name = getattr(func, "tags", ()), name_of(func)
    if torch.Tag.data_dependent_output in tags or name == "_linalg_check_errors" or name in _DECOMPOSITIONS:
        return READ
    if name in _BRANCHES and not hasattr(func, "overloadpacket"):
        return READ
    if name == "histc" and argument(args, kwargs, 2, "min", 0) == argument(args, kwargs, 3, "max", 0):
        return READ
    if torch.Tag.dynamic_output_shape in tags and not _fixed_after_all(name, args, kwargs):
        return SHAPE
    return SHAPE if _scatters(name, args) else None


def function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a function breaks a capture that shows in no operator of the CPU."""
    if func in READS:
        return READ
    name = name_of(func)
    if name in FROM_VALUES and args and isinstance(args[0], list | tuple):
        return READ if any(isinstance(value, torch.Tensor) for value in tree_flatten(args[0])[0]) else None
    if name == "__setitem__":
        one = isinstance(args[2], torch.Tensor) and args[2].numel() == 1
        return SHAPE if one and has_mask(args[1]) else None
    if name in ("index_put", "index_put_"):
        values = argument(args, kwargs, 2, "values")
        one = isinstance(values, torch.Tensor) and values.numel() == 1
        return SHAPE if one and has_mask(argument(args, kwargs, 1, "indices")) else None
    return None


def only_on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a function reads on the host it reads for CPU tensors alone, to check its arguments."""
    name = name_of(func)
    if name == "one_hot":
        return bool(argument(args, kwargs, 1, "num_classes", -1) > 0)
    return name in ("quantile", "nanquantile")


def cure(func: Any, why: str, line: str | None, sites: Iterable[str]) -> str:
    """What to do about an operator or a function.

    Args:
        line: the user's line.
        sites: files between the operator and that line.
    """
    name = name_of(func)
    if why == GENERATOR:
        return _GENERATOR_FIX
    if why == SHAPE:
        fitting = (fix for sign, fix in _LINE_FIXES if line and sign in line)
        own = _SHAPE_FIXES.get(name) or (_SHAPE_FIXES["index_put"] if name == "__setitem__" else _SHAPE_FIX)
        return next(fitting, None) or own
    for site in sites:
        path = site.replace("\\", "/")
        for sign, fix in _SITE_FIXES:
            if sign in path:
                return fix
    by_name = {"_linalg_check_errors": _EX, "histc": _RANGE} | dict.fromkeys(_DECOMPOSITIONS, _CONVERGED)
    by_name |= dict.fromkeys(_BRANCHES, _BRANCH)
    return by_name.get(name) or (_STACK if name in FROM_VALUES else _READ_FIX)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def has_mask(indices: Any) -> bool:
    """Whether a mask is among the indices."""
    found = [index for index in tree_flatten(indices)[0] if isinstance(index, torch.Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in found)


def _scatters(name: str, args: tuple[Any, ...]) -> bool:
    """Whether values are put where a mask is true, which counts the true ones; one value for all does not."""
    return name.startswith(("index_put", "_index_put")) and has_mask(args[1]) and args[2].numel() != 1


def _fixed_after_all(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("index", "_unsafe_index"):
        return not has_mask(args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is not None
    return False
