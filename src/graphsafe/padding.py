"""Fixed-shape operations on tensors: shapes that depend on sizes and arguments, never on values.

Guarantees:
- Nothing here reads a tensor's values on the host, ``pack`` excepted, so everything else can be captured in a CUDA
  graph, compiled, and run without a synchronisation.
- No argument is changed in place.

A mask is boolean, or of integers where nonzero means true. Masks may have batch dimensions: ``fixed_nonzero`` and
``random_topk`` work along the last dimension and keep the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Buckets",
    "Packed",
    "bucket_length",
    "fixed_nonzero",
    "masked_mean",
    "pack",
    "pad_to",
    "pad_to_bucket",
    "random_topk",
    "unpad",
]


class Packed(NamedTuple):
    """Documents laid end to end in one row of fixed length. Each tensor is [budget] but num_valid, which is [].

    Attributes:
        tokens: the documents' tokens, then ``pad_value``.
        document_ids: which document a token is of, from 0; -1 where padded.
        positions: a token's place in its document, from 0; 0 where padded.
        lengths: length of document i at index i, filled up with zeros.
        num_valid: how many tokens are real.
    """

    tokens: Tensor
    document_ids: Tensor
    positions: Tensor
    lengths: Tensor
    num_valid: Tensor


@dataclass(frozen=True)
class Buckets:
    """A padding rule for ``graphsafe.graphed(fn, pad=...)``: few lengths in place of many, so few graphs.

    Arguments that are tensors and have a dimension ``dim`` must agree in their length there; all are filled up to
    the smallest bucket that holds it. ``fn`` gets a further keyword argument ``mask``, boolean [bucket], true where the
    input is real, and must take it. What it returns is as long as the bucket: ``graphsafe.padding.unpad(out, n)`` it.

    Attributes:
        lengths: the buckets.
        dim: the dimension that is padded.
        value: what fills it up.
        names: keyword arguments to pad, a string being one name; None: every argument that is a tensor, those in
            containers excepted.
    Raises:
        ValueError: an attribute makes no sense.
    """

    lengths: tuple[int, ...]
    dim: int = 0
    value: float = 0
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        lengths, names = self.lengths, self.names
        if not isinstance(lengths, Iterable):
            raise ValueError(f"Buckets: lengths is {lengths!r}; it is a tuple of lengths, such as (8, 16, 32)")
        lengths = tuple(lengths)
        if not all(map(_is_int, lengths)):
            raise ValueError(f"Buckets: lengths is {lengths!r}; each of them is an int, as in (8, 16, 32)")
        bucket_length(0, lengths)  # raises where they make no sense
        object.__setattr__(self, "lengths", lengths)
        if not _is_int(self.dim):
            raise ValueError(f"Buckets: dim is {self.dim!r}; it is an int, the dimension that is padded")
        if names is not None:
            names = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"Buckets: names is {names!r}; it is a tuple of strings, such as ('tokens',)")
            object.__setattr__(self, "names", names)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, padded, and the mask.

        Raises:
            ValueError: lengths differ, none is there, or one is longer than the largest bucket.
        """
        if "mask" in kwargs:
            raise ValueError("Buckets: the padding rule hands the function its mask; do not pass one")
        named = kwargs.keys() if self.names is None else self.names
        places: list[int | str] = [i for i, x in enumerate(args) if self.names is None and self._has_dim(x)]
        places += [name for name in named if self._has_dim(kwargs.get(name))]
        given = [args[place] if isinstance(place, int) else kwargs[place] for place in places]
        lengths = sorted({x.shape[self.dim] for x in given})
        if len(lengths) != 1 or (self.names is not None and len(places) != len(self.names)):
            raise ValueError(
                f"Buckets: the tensors to pad have the lengths {lengths} in dimension {self.dim}; it must be one. Name "
                "those that are to be padded, and pass them as keyword arguments: Buckets(..., names=('tokens',))"
            )
        if lengths[0] > max(self.lengths):
            raise ValueError(
                f"Buckets: the inputs are {lengths[0]} long in dimension {self.dim}, more than the largest bucket, "
                f"{max(self.lengths)}; add one or cut the input"
            )
        padded = [pad_to_bucket(x, self.lengths, dim=self.dim, value=self.value) for x in given]
        of_place = dict(zip(places, padded, strict=True))
        mask = torch.arange(padded[0].shape[self.dim], device=padded[0].device) < lengths[0]
        return (
            tuple(of_place.get(i, x) for i, x in enumerate(args)),
            {**{name: of_place.get(name, x) for name, x in kwargs.items()}, "mask": mask},
        )

    def _has_dim(self, x: Any) -> bool:
        return isinstance(x, Tensor) and -x.dim() <= self.dim < x.dim()


def pad_to(x: Tensor, length: int, *, dim: int = 0, value: float = 0) -> Tensor:
    """Return a copy of ``x`` whose dimension ``dim`` is filled up to ``length`` with ``value``.

    Raises:
        ValueError: ``x`` is longer than that, or has no such dimension.
    """
    dim = _dimension(x, dim)
    size = x.shape[dim]
    if length < size:
        raise ValueError(f"pad_to: dimension {dim} has {size} elements, more than length={length}; nothing is cut off")
    pairs = [0, 0] * (x.dim() - 1 - dim) + [0, length - size]
    return torch.nn.functional.pad(x, pairs, value=value)


def unpad(x: Tensor, length: int, *, dim: int = 0) -> Tensor:
    """Return the first ``length`` elements along ``dim``, as a view: the inverse of ``pad_to``.

    Raises:
        ValueError: ``x`` is shorter than that, or has no such dimension.
    """
    dim = _dimension(x, dim)
    if not 0 <= length <= x.shape[dim]:
        raise ValueError(f"unpad: length={length} is not in 0..{x.shape[dim]}, the size of dimension {dim}")
    return x.narrow(dim, 0, length)


def bucket_length(n: int, buckets: Iterable[int]) -> int:
    """Return the smallest of ``buckets`` that holds ``n`` elements; their order does not matter.

    Raises:
        ValueError: no bucket is that large, or ``n`` or a bucket makes no sense.
    """
    sizes = sorted(buckets)
    if not sizes or sizes[0] < 1:
        raise ValueError(f"bucket_length: buckets must be one or more positive lengths, got {sizes}")
    if n < 0:
        raise ValueError(f"bucket_length: a length cannot be negative, got {n}")
    for size in sizes:
        if n <= size:
            return size
    raise ValueError(f"bucket_length: {n} is longer than the largest bucket, {sizes[-1]}; add one or cut the input")


def pad_to_bucket(x: Tensor, buckets: Iterable[int], *, dim: int = 0, value: float = 0) -> Tensor:
    """Return a copy of ``x`` filled up along ``dim`` to the smallest bucket that holds it.

    Raises:
        ValueError: ``x`` is longer than the largest bucket.
    """
    dim = _dimension(x, dim)
    return pad_to(x, bucket_length(x.shape[dim], buckets), dim=dim, value=value)


def pack(documents: Iterable[Sequence[int] | Tensor], budget: int, *, pad_value: int = 0) -> Packed:
    """Lay ``documents`` end to end in one row of ``budget`` tokens.

    Args:
        documents: one-dimensional; lists of ints become int64. Tensors must agree in dtype and device, which the tokens
            then have as well. An empty document keeps its number and has length 0.
        budget: the row's length.
        pad_value: what follows the last document.
    Raises:
        ValueError: the documents do not fit into the budget, or there are more of them than it has places.
    Sync: host-side; meant for the thread that prepares batches.
    """
    rows = [_document(document, index) for index, document in enumerate(documents)]
    sizes = [row.shape[0] for row in rows]
    total = sum(sizes)
    if budget < 1:
        raise ValueError(f"pack: budget must be positive, got {budget}")
    if total > budget:
        raise ValueError(f"pack: {len(rows)} documents have {total} tokens, more than budget={budget}")
    if len(rows) > budget:
        raise ValueError(f"pack: {len(rows)} documents are more than budget={budget} lengths can hold")
    kinds = {(row.dtype, row.device) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"pack: documents differ in dtype or device: {sorted(map(str, kinds))}")
    dtype, device = kinds.pop() if kinds else (torch.int64, torch.device("cpu"))

    length_of = torch.tensor(sizes, dtype=torch.int64)
    ids = torch.repeat_interleave(torch.arange(len(rows)), length_of)
    starts = torch.cumsum(length_of, 0) - length_of
    positions = torch.arange(total) - starts[ids]
    tokens = torch.cat(rows) if rows else torch.empty(0, dtype=dtype, device=device)
    return Packed(
        tokens=pad_to(tokens, budget, value=pad_value),
        document_ids=pad_to(ids, budget, value=-1).to(device),
        positions=pad_to(positions, budget).to(device),
        lengths=pad_to(length_of, budget).to(device),
        num_valid=torch.tensor(total, dtype=torch.int64, device=device),
    )


def fixed_nonzero(mask: Tensor, size: int, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """``mask.nonzero()`` of fixed size, without a synchronisation.

    Args:
        mask: [..., N].
        size: how many indices to return. Where more places are true, the first ``size`` of them come back.
        fill: the index where there is none.
    Returns:
        indices [..., size] int64, ascending, the real ones first; and how many of them are real, [...] int64.
    """
    mask = _mask(mask, "fixed_nonzero")
    _check_count(size, "fixed_nonzero: size")
    # ranks[i] counts the true places up to i, so the j-th true place is where it first reaches j.
    ranks = mask.cumsum(-1, dtype=torch.int64)
    wanted = torch.arange(1, size + 1, device=mask.device)
    indices = torch.searchsorted(ranks, wanted.expand(*mask.shape[:-1], size).contiguous())
    num_real = mask.sum(-1, dtype=torch.int64).clamp(max=size)
    return torch.where(wanted <= num_real.unsqueeze(-1), indices, fill), num_real


def random_topk(mask: Tensor, k: int, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Choose ``k`` of the true places at random, each set of them with the same probability.

    Args:
        mask: [..., N], N >= 1; rows are drawn independently. Fewer than k true places, and N < k, are fine.
        k: how many.
        generator: of the mask's device; None is the device's default one.
    Returns:
        indices [..., k] int64, ascending among the valid ones, 0 where invalid, so always in range;
        and valid [..., k] bool, the valid ones first.
    """
    mask = _mask(mask, "random_topk")
    _check_count(k, "random_topk: k")
    n = mask.shape[-1]
    if n == 0 and k > 0:
        raise ValueError("random_topk: the mask has no places, so no index would be in range")
    # The k largest of uniform keys are a uniform choice; 53 random bits make ties, which topk would order, negligible.
    keys = torch.rand(mask.shape, dtype=torch.float64, device=mask.device, generator=generator)
    chosen_keys, chosen = keys.masked_fill(~mask, -1.0).topk(min(k, n), dim=-1)
    places = torch.where(chosen_keys >= 0, chosen, n).sort(dim=-1).values
    if k > n:
        places = torch.nn.functional.pad(places, [0, k - n], value=n)
    valid = places < n
    return torch.where(valid, places, 0), valid


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | Sequence[int] | None = None) -> Tensor:
    """Return the mean of ``x`` where ``mask`` is true, over ``dim`` (None: over everything); 0 over nothing.

    What is masked reaches neither the result nor a gradient, NaN and infinity included. ``x`` and ``mask`` broadcast.
    Sums of half precision are taken in float32; the result has ``x``'s dtype, or the default one for integers.
    """
    mask = _mask(mask, "masked_mean")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    dims = dim if dim is None or isinstance(dim, int) else tuple(dim)
    half = x.dtype in (torch.float16, torch.bfloat16)
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    total = kept.sum(dims, dtype=torch.float32) if half else kept.sum(dims)
    mean = total / mask.sum(dims).clamp(min=1)
    return mean.to(x.dtype) if half else mean


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return dim % x.dim()


def _is_int(value: Any) -> bool:
    """Whether it is an int, NumPy's included, and no bool."""
    return hasattr(type(value), "__index__") and not isinstance(value, bool | Tensor)


def _mask(mask: Tensor, what: str) -> Tensor:
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise ValueError(f"{what}: the mask is {mask.dtype}; give a boolean one, such as `weights > 0`")
    if mask.dim() == 0 and what != "masked_mean":
        raise ValueError(f"{what}: the mask needs at least one dimension")
    return mask if mask.dtype == torch.bool else mask != 0


def _check_count(count: int, what: str) -> None:
    if count < 0:
        raise ValueError(f"{what} cannot be negative, got {count}")


def _document(document: Sequence[int] | Tensor, index: int) -> Tensor:
    row = document if isinstance(document, Tensor) else torch.tensor(list(document), dtype=torch.int64)
    if row.dim() != 1:
        raise ValueError(f"pack: document {index} has shape {tuple(row.shape)}; documents have one dimension")
    return row
