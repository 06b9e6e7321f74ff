"""Two ways to do one thing, timed in turn in one process: what every ratio of these benchmarks comes from.

Guarantees:
- Before anything is timed both ways run, and their results are compared; a benchmark whose sides differ fails.
- Rounds alternate, so both sides see the same clocks, caches and neighbours; the ratio is the median over rounds of
  one round's ratio, with its 10th and 90th percentile.
- Both sides make the same number of calls a round, with the garbage collector off.
- pytest-benchmark times graphsafe's side; its ``extra_info`` holds the record, which ``benchmarks.page`` reads.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ROUND_S = 4e-3  # a round of the slower side lasts about this long, so that the clock's own cost is not seen
BUDGET_S = 2.5  # both sides and all rounds together
MAX_ROUNDS, MIN_ROUNDS = 200, 10
NUM_WARMUP_CALLS, WARMUP_S = 10, 0.5  # of each side, whichever ends first


def nothing() -> None:
    """The hook of a side that needs none."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (linear between neighbours)."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9)}


def same_numbers(ours: Any, other: Any) -> str:
    """Compare two results bit for bit, and say so.

    Raises:
        AssertionError: they differ in structure, shape, dtype or a value.
    """
    torch.testing.assert_close(ours, other, rtol=0, atol=0, equal_nan=True)
    count = len(torch.utils._pytree.tree_leaves(ours))
    return f"results equal bit for bit ({count} value{'s' if count != 1 else ''})"


def settle(timed_call: Callable[[], float]) -> float:
    """Warm a side up; the median of its last calls' seconds."""
    times: list[float] = []
    while len(times) < NUM_WARMUP_CALLS and sum(times) < WARMUP_S:
        times.append(timed_call())
    return statistics.median(times[len(times) // 2 :])


def record(
    benchmark: Any, sides: tuple[str, str], check: str, config: Mapping[str, Any], times_us: tuple[Sequence[float], ...]
) -> dict[str, Any]:
    """Put the figures into the benchmark's ``extra_info``: times a call, graphsafe's first, one pair a round."""
    ours, other = times_us
    found = {
        "ours": sides[0],
        "other": sides[1],
        "ours_us": spread(ours),
        "other_us": spread(other),
        "ratio": spread([a / b for a, b in zip(ours, other, strict=True)]),
        "more_us": statistics.median(a - b for a, b in zip(ours, other, strict=True)),
        "num_rounds": len(ours),
        "check": check,
        "config": dict(config),
    }
    benchmark.extra_info.update(found)
    return found


def compare(
    benchmark: Any,
    sides: Mapping[str, Callable[[], Any]],
    *,
    config: Mapping[str, Any],
    check: Callable[[], str] | None = None,
    before: Mapping[str, Callable[[], object]] | None = None,
    after: Callable[[], object] = nothing,
    max_calls: int = 10_000,
) -> dict[str, Any]:
    """Check that both sides compute the same, time them in turn, and record it.

    Args:
        sides: two calls by name, graphsafe's first.
        config: what the figures hold for: shapes, threads, device.
        check: compares the sides and says what it held; None compares what a call of each returns.
        before: by a side's name, what to do before each of its rounds, untimed.
        after: what to do after each round, untimed: wait for the device.
        max_calls: the most calls a round, where a queue of the device could fill.
    Raises:
        AssertionError: the sides differ.
    """
    (our_name, ours), (other_name, other) = sides.items()
    prepare = {our_name: nothing, other_name: nothing, **(before or {})}

    def timed(name: str, call: Callable[[], Any], num_calls: int) -> float:
        prepare[name]()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        elapsed_s = time.perf_counter() - start
        after()
        return elapsed_s / num_calls

    if check is None:
        prepare[our_name]()
        our_result = ours()
        prepare[other_name]()
        said = same_numbers(our_result, other())
    else:
        said = check()
    call_s = [settle(functools.partial(timed, name, call, 1)) for name, call in sides.items()]
    num_calls = max(1, min(max_calls, round(ROUND_S / max(call_s))))
    num_rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(BUDGET_S / (num_calls * sum(call_s)))))

    our_us: list[float] = []
    other_us: list[float] = []

    def other_round() -> None:
        other_us.append(timed(other_name, other, num_calls) * 1e6)
        prepare[our_name]()

    def our_round() -> None:
        start = time.perf_counter()
        for _ in range(num_calls):
            ours()
        our_us.append((time.perf_counter() - start) / num_calls * 1e6)

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        # pytest-benchmark runs `setup` before each round and times the round alone.
        def turn() -> None:
            after()
            other_round()

        benchmark.pedantic(our_round, setup=turn, rounds=num_rounds)
        after()
    finally:
        if collecting:
            gc.enable()
    config = {**config, "calls a round": num_calls}
    return record(benchmark, (our_name, other_name), said, config, (our_us, other_us))
