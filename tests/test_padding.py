"""Fixed-shape operations: values against plain loops, shapes and errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsafe import padding
from tests.helpers import run_threads

MASKS = st.lists(st.booleans(), min_size=1, max_size=40)


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(-2, 1), st.sampled_from([torch.bool, torch.int64, torch.float32])
)
def test_pad_to_keeps_the_values_and_unpad_undoes_it(size: int, extra: int, dim: int, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    x = x.narrow(dim, 0, 1).repeat_interleave(size, dim)
    padded = padding.pad_to(x, size + extra, dim=dim, value=1)
    assert padded.shape[dim] == size + extra and padded.dtype == dtype
    assert bool((padded == 1).all())
    assert torch.equal(padding.unpad(padded, size, dim=dim), x)


def test_pad_to_never_returns_memory_of_its_argument() -> None:
    x = torch.zeros(3)
    padding.pad_to(x, 3).add_(1)
    assert x.sum() == 0


def test_unpad_returns_a_view() -> None:
    x = torch.zeros(3)
    padding.unpad(x, 2).add_(1)
    assert x.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: padding.pad_to(torch.zeros(4), 3), "more than length=3"),
        (lambda: padding.pad_to(torch.zeros(4), 8, dim=1), "no dimension 1"),
        (lambda: padding.pad_to(torch.zeros(()), 8), "no dimension 0"),
        (lambda: padding.unpad(torch.zeros(4), 5), "not in 0..4"),
        (lambda: padding.unpad(torch.zeros(4), -1), "not in 0..4"),
        (lambda: padding.bucket_length(9, [8, 4]), "largest bucket, 8"),
        (lambda: padding.bucket_length(1, []), "positive lengths"),
        (lambda: padding.bucket_length(1, [0, 4]), "positive lengths"),
        (lambda: padding.bucket_length(-1, [4]), "negative"),
        (lambda: padding.pad_to_bucket(torch.zeros(2, 9), [4, 8], dim=1), "largest bucket, 8"),
        (lambda: padding.pack([[1, 2], [3]], 2), "3 tokens, more than budget=2"),
        (lambda: padding.pack([[], [], []], 2), "3 documents are more than budget=2"),
        (lambda: padding.pack([], 0), "budget must be positive"),
        (lambda: padding.pack([torch.zeros(1, 2)], 4), "document 0 has shape"),
        (lambda: padding.pack([torch.zeros(1), torch.zeros(1, dtype=torch.int32)], 4), "differ in dtype"),
        (lambda: padding.fixed_nonzero(torch.ones(3), 2), "boolean"),
        (lambda: padding.fixed_nonzero(torch.tensor(True), 2), "at least one dimension"),
        (lambda: padding.fixed_nonzero(torch.ones(3, dtype=torch.bool), -1), "negative"),
        (lambda: padding.random_topk(torch.zeros(0, dtype=torch.bool), 1), "no places"),
        (lambda: padding.random_topk(torch.ones(3, dtype=torch.bool), -1), "negative"),
        (lambda: padding.masked_mean(torch.ones(3), torch.ones(3)), "boolean"),
    ],
)
def test_padding_says_what_is_wrong(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@given(st.integers(0, 64), st.permutations([4, 16, 64]))
def test_bucket_length_is_the_smallest_that_holds(n: int, buckets: list[int]) -> None:
    expected = min(b for b in buckets if b >= n)
    assert padding.bucket_length(n, buckets) == expected
    assert padding.pad_to_bucket(torch.zeros(n), buckets).shape == (expected,)


@given(st.lists(st.lists(st.integers(1, 99), max_size=6), max_size=6), st.integers(0, 8), st.booleans())
def test_pack_lays_documents_end_to_end(documents: list[list[int]], extra: int, as_tensors: bool) -> None:
    total = sum(map(len, documents))
    budget = max(total, len(documents), 1) + extra
    given_documents = [torch.tensor(d, dtype=torch.int64) for d in documents] if as_tensors else documents
    packed = padding.pack(given_documents, budget, pad_value=-7)
    rest = budget - total
    assert packed.tokens.tolist() == [t for d in documents for t in d] + [-7] * rest
    assert packed.document_ids.tolist() == [i for i, d in enumerate(documents) for _ in d] + [-1] * rest
    assert packed.positions.tolist() == [p for d in documents for p in range(len(d))] + [0] * rest
    assert packed.lengths.tolist() == [len(d) for d in documents] + [0] * (budget - len(documents))
    assert packed.num_valid.shape == () and packed.num_valid.item() == total


def test_pack_keeps_the_documents_dtype() -> None:
    packed = padding.pack([torch.ones(2, dtype=torch.int32)], 4)
    assert packed.tokens.dtype == torch.int32
    assert {t.dtype for t in packed[1:]} == {torch.int64}


@given(MASKS, st.integers(0, 50), st.integers(-3, 3))
def test_fixed_nonzero_is_nonzero_of_fixed_size(mask: list[bool], size: int, fill: int) -> None:
    indices, num_real = padding.fixed_nonzero(torch.tensor(mask), size, fill=fill)
    expected = [i for i, m in enumerate(mask) if m][:size]
    assert indices.dtype == torch.int64 and indices.shape == (size,)
    assert num_real.shape == () and num_real.item() == len(expected)
    assert indices.tolist() == expected + [fill] * (size - len(expected))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_fixed_nonzero_works_on_each_row_of_a_batch(seed: int) -> None:
    mask = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(seed)) < 0.4
    indices, num_real = padding.fixed_nonzero(mask.int(), 4)
    assert indices.shape == (2, 3, 4) and num_real.shape == (2, 3)
    for b in range(2):
        for r in range(3):
            row, real = padding.fixed_nonzero(mask[b, r], 4)
            assert torch.equal(indices[b, r], row) and num_real[b, r] == real


def test_fixed_nonzero_works_on_an_empty_mask() -> None:
    indices, num_real = padding.fixed_nonzero(torch.zeros(0, dtype=torch.bool), 3)
    assert indices.tolist() == [-1, -1, -1] and num_real.item() == 0


@given(MASKS, st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_random_topk_chooses_among_the_true_places(mask: list[bool], k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    indices, valid = padding.random_topk(torch.tensor(mask), k, generator=generator)
    num_valid = min(k, sum(mask))
    assert indices.shape == valid.shape == (k,)
    assert valid.tolist() == [True] * num_valid + [False] * (k - num_valid)
    assert all(0 <= i < len(mask) for i in indices.tolist())
    chosen = indices.tolist()[:num_valid]
    assert chosen == sorted(set(chosen)) and all(mask[i] for i in chosen)
    assert indices.tolist()[num_valid:] == [0] * (k - num_valid)


def test_random_topk_is_uniform_over_the_true_places() -> None:
    mask = torch.tensor([True, False, True, True, False, True, True])
    num_draws, k = 20_000, 2
    indices, valid = padding.random_topk(mask.expand(num_draws, 7), k, generator=torch.Generator().manual_seed(0))
    assert bool(valid.all())
    pairs, counts = torch.unique(indices, dim=0, return_counts=True)
    num_pairs = math.comb(5, k)
    assert pairs.shape[0] == num_pairs  # every pair comes up
    expected = num_draws / num_pairs
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 27.9  # 99.9% quantile at 9 degrees of freedom


def test_random_topk_depends_on_the_generator_alone() -> None:
    mask = torch.ones(100, dtype=torch.bool)
    draws = run_threads(4, lambda i: padding.random_topk(mask, 5, generator=torch.Generator().manual_seed(3))[0])
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    other, _ = padding.random_topk(mask, 5, generator=torch.Generator().manual_seed(4))
    assert not torch.equal(other, draws[0])


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), max_size=20))
def test_masked_mean_is_the_mean_of_what_is_not_masked(pairs: list[tuple[float, bool]]) -> None:
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([m for _, m in pairs], dtype=torch.bool)
    kept = [v for v, m in pairs if m]
    expected = math.fsum(kept) / len(kept) if kept else 0.0
    x = torch.where(mask, values, torch.full_like(values, torch.nan)).requires_grad_()
    mean = padding.masked_mean(x, mask)
    mean.backward()
    assert mean.item() == pytest.approx(expected, abs=1e-12)
    weight = 1 / len(kept) if kept else 0.0
    assert x.grad is not None and x.grad.tolist() == [weight if m else 0.0 for m in mask.tolist()]


def test_masked_mean_reduces_the_dimensions_asked_for() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert padding.masked_mean(x, mask, dim=1).tolist() == [1.0, 0.0]
    assert padding.masked_mean(x, mask, dim=-2).tolist() == [0.0, 0.0, 2.0]
    assert padding.masked_mean(x, mask, dim=(0, 1)).item() == 1.0
    assert padding.masked_mean(x, torch.tensor([True, False, False]), dim=1).tolist() == [0.0, 3.0]
    assert padding.masked_mean(torch.tensor([1, 2]), torch.tensor([1, 1])).item() == 1.5


def test_masked_mean_of_half_precision_does_not_overflow() -> None:
    x = torch.full((4096,), 100.0, dtype=torch.float16)
    mean = padding.masked_mean(x, torch.ones(4096, dtype=torch.bool))
    assert mean.dtype == torch.float16 and mean.item() == 100.0


def test_padding_traces_into_one_graph_without_a_value_read() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = padding.pad_to_bucket(x, (8, 16))
        mask = padding.pad_to(mask, 16, value=False)
        indices, valid = padding.random_topk(mask, 4)
        return padding.masked_mean(x, mask), indices, valid, *padding.fixed_nonzero(mask, 4)

    x, mask = torch.arange(9.0), torch.arange(9) % 2 == 0
    torch.manual_seed(0)
    expected = step(x, mask)
    torch.manual_seed(0)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x, mask)
    assert all(torch.equal(a, b) for a, b in zip(expected, compiled, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": (4, "8")}, "lengths is"),
        ({"lengths": (4.5,)}, "lengths is"),
        ({"lengths": (True,)}, "lengths is"),
        ({"lengths": "8"}, "lengths is"),
        ({"lengths": 8}, "lengths is"),
        ({"lengths": (0,)}, "positive"),
        ({"dim": "0"}, "dim is"),
        ({"dim": 1.0}, "dim is"),
        ({"names": 3}, "names is"),
        ({"names": ("tokens", 3)}, "names is"),
    ],
)
def test_buckets_refuse_an_argument_of_the_wrong_type(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        padding.Buckets(**({"lengths": (4, 8)} | options))  # type: ignore[arg-type]


def test_buckets_take_a_string_for_one_name() -> None:
    rule = padding.Buckets((4, 8), names="ids")  # type: ignore[arg-type]
    assert rule.names == ("ids",) and rule == padding.Buckets([8, 4][::-1], names=["ids"])  # type: ignore[arg-type]
    _, named = rule.apply((), {"ids": torch.ones(3), "scale": torch.ones(7)})
    assert named["ids"].shape == (4,) and named["scale"].shape == (7,) and named["mask"].sum() == 3
