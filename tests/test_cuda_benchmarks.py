"""The benchmarks of steps, of scaling and of overhead in their CPU forms, and that their checks of numbers can fail."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphsafe as gs
from benchmarks import bench_overhead, bench_scaling, bench_steps, step_checks, supervised
from benchmarks.workloads import Training, make_training

CPU = torch.device("cpu")
SECONDS_LIMIT = ("--seconds-limit", "100")


@pytest.fixture(autouse=True)
def as_many_torch_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# the child that runs jobs

JOBS = """
import os, time
def run_job(job):
    print("a library's own words")
    yield {"process": os.getpid()}
    if job["then"] == "hang":
        time.sleep(1000)
    elif job["then"] == "crash":
        os._exit(3)
    elif job["then"] != "end":
        raise RuntimeError(job["then"])
"""


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[dict[str, Any]]]]:
    """Run jobs of a module of their own; returns the results of each."""
    (tmp_path / "some_jobs.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*jobs: str, seconds: float = 60.0, **options: Any) -> list[list[dict[str, Any]]]:
        asked = [{"number": number, "then": job} for number, job in enumerate(jobs)]
        found: list[list[dict[str, Any]]] = [[] for _ in jobs]
        until = time.monotonic() + seconds
        for job, result in supervised.results("some_jobs", asked, **{"job_limit_s": 1.5, "until": until, **options}):
            found[job["number"]].append(result)
        assert time.monotonic() < until + supervised.GRACE_S
        return found

    return run


def test_supervised_jobs_share_a_process_until_one_hangs_or_breaks_the_device(supervise: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    jobs = ("end", "no such luck", "hang", "CUDA error: an illegal memory access", "crash", "end")
    found = supervise(*jobs, record=record)
    first, failed, hung, broken, crashed, last = found
    processes = [one[0]["process"] for one in found]
    assert len(first) == len(last) == 1
    assert processes[0] == processes[1] == processes[2]  # an error of its own leaves a process usable
    assert len({*processes[2:]}) == 4
    assert failed[1]["error"] == "RuntimeError: no such luck"
    assert "its process ended" in hung[1]["error"]
    assert "Timeout" in hung[1]["log"] and "run_job" in hung[1]["log"]  # the stack of what hung
    assert "illegal memory access" in broken[1]["error"] and "its process ended" in crashed[1]["error"]
    assert len(record.read_text().splitlines()) == sum(map(len, found))


def test_supervised_jobs_are_skipped_when_no_time_is_left(supervise: Any) -> None:
    assert supervise("end", "end", seconds=0.5) == [[{"skipped": "out of time"}]] * 2


def test_supervised_jobs_have_a_process_each_when_they_ask_for_fresh_ones(supervise: Any) -> None:
    one, other = supervise("end", "end", fresh=True)
    assert one[0]["process"] != other[0]["process"]


# steps


def nudged(number: float) -> float:
    """The next float32."""
    return float(torch.nextafter(torch.tensor(number), torch.tensor(math.inf)))


def perturbing(when: Callable[[], bool]) -> Callable[..., Training]:
    """``make_training`` with another value of one weight, when asked to. (A step's rounding may swallow one bit.)"""

    def make(*args: Any, **kwargs: Any) -> Training:
        training = make_training(*args, **kwargs)
        if when():
            with torch.no_grad():
                next(training.core.parameters())[0, 0] += 0.01
        return training

    return make


def step_results(*ways: str, case: str = "mlp-mini") -> dict[str, dict[str, Any]]:
    """Of each way, measured in this process."""
    common = {"device": "cpu", "dtype": "float32", "num_checked": 6, "num_steps": 2, "seconds": 1.0}
    return {way: next(bench_steps.run_job({"case": case, "batch": None, "way": way, **common})) for way in ways}


def test_steps_of_every_way_agree_with_eager_and_give_a_whole_record(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_steps.run(["--cases", "mlp-mini", "--sweep", "transformer-mini", *SECONDS_LIMIT])
    assert found["agree"] is True and found["failed"] == []
    assert [(case["case"], case["batch"]) for case in found["cases"]] == [
        ("mlp-mini", None),
        ("transformer-mini", 1),
        ("transformer-mini", 2),
    ]
    for case in found["cases"][:1]:
        assert set(case["results"]) == set(step_checks.CPU_WAYS)
        assert all(one["bitwise"] for one in case["checks"].values())
        assert [way for way, one in case["checks"].items() if one["tolerance"] > 0] == ["eager again"]
        for result in case["results"].values():
            assert 0 < result["ms"]["p10"] <= result["ms"]["median"] <= result["ms"]["p90"]
            assert len(result["losses"]) == 8 and len(set(result["losses"])) == 8  # it trains
    stats = found["cases"][0]["results"]["TrainStep"]["stats"]
    assert (stats["captures"], stats["eager_steps"], stats["mismatches"]) == (1, bench_steps.NUM_WARMUP_CALLS, 0)
    assert {sweep["way"] for sweep in found["sweeps"]} == set(step_checks.SWEEP_WAYS) - {"eager"}
    assert all([batch for batch, _ in sweep["points"]] == [1, 2] for sweep in found["sweeps"])
    assert {"device", "torch", "dtype", "num_checked", "num_steps"} <= set(found["configuration"])
    assert json.loads(json.dumps(found)) and "TrainStep" in capsys.readouterr().out


def test_steps_of_the_drafter_agree_with_eager() -> None:
    checks = step_checks.check(step_results("eager", "eager again", "graphed", "TrainStep", case="drafter-mini"))
    assert len(checks) == 3 and all(one["agrees"] and one["bitwise"] for one in checks.values())


def test_steps_do_not_agree_when_one_way_begins_with_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    monkeypatch.setattr(bench_steps, "make_training", perturbing(lambda: made.append(None) or len(made) == 3))
    found = step_results("eager", "CUDAGraph", "TrainStep")  # the third is TrainStep's
    record = step_checks.collect({("mlp-mini", None): found}, {})
    checks = record["cases"][0]["checks"]
    assert checks["CUDAGraph"]["agrees"] and not checks["TrainStep"]["agrees"]
    assert record["agree"] is False


def test_steps_main_exits_with_one_when_losses_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for agree, failed, status in ((True, [], 0), (False, [], 1), (True, [["mlp", None, "eager"]], 1)):
        monkeypatch.setattr(bench_steps, "run", lambda a=agree, f=failed: {"agree": a, "failed": f})
        with pytest.raises(SystemExit) as ended:
            bench_steps.main()
        assert ended.value.code == status


@pytest.mark.parametrize("case", ["mlp-mini", "transformer-mini", "drafter-mini"])
def test_a_workload_has_the_loss_of_its_core_when_that_is_compiled(case: str) -> None:
    training = make_training(case, CPU, dtype="float32", compiled_whole=True)
    compiled = torch.compile(training.core, backend="eager", dynamic=False)
    first, second = training.batches
    expected = training.loss_fn()(*first)
    assert torch.equal(training.loss_fn(compiled)(*first), expected)
    assert not torch.equal(training.loss_fn(compiled)(*second), expected)


def made_up(losses: list[float], weights: str = "a") -> dict[str, Any]:
    return {"losses": losses, "weights": weights, "dtypes": ["float32"]}


@pytest.mark.parametrize(
    ("way", "losses", "weights", "agrees"),
    [
        ("graphed", [2.0, 1.0], "a", True),
        ("graphed", [2.0, nudged(1.0)], "a", False),
        ("graphed", [2.0, 1.0], "b", False),
        ("graphed", [math.nan, 1.0], "a", False),
        ("compile", [2.0, 1.0005], "b", True),
        ("compile", [2.0, 1.002], "b", False),
        ("compile", [2.0, math.nan], "b", False),
    ],
)
def test_check_asks_for_bits_of_eager_kernels_and_for_a_tolerance_of_others(
    way: str, losses: list[float], weights: str, agrees: bool
) -> None:
    eager = made_up([2.0, 1.0])
    checks = step_checks.check({"eager": eager, "eager again": eager, way: made_up(losses, weights)})
    assert checks[way]["agrees"] is agrees


def test_check_allows_a_tolerance_when_eager_does_not_repeat_itself() -> None:
    found = {"eager": made_up([1.0]), "eager again": made_up([nudged(1.0)]), "graphed": made_up([1.0001], "b")}
    assert all(one["agrees"] and one["tolerance"] > 0 for one in step_checks.check(found).values())
    found["graphed"] = made_up([1.1])
    assert not step_checks.check(found)["graphed"]["agrees"]


def test_check_says_nothing_when_there_is_nothing_to_compare_with() -> None:
    record = step_checks.collect({("mlp", None): {"eager": {"error": "x"}, "graphed": made_up([1.0])}}, {})
    assert record["agree"] is None and record["failed"] == [["mlp", None, "eager"]]


@pytest.mark.parametrize(
    ("points", "up_to", "stops"),
    [
        ([(1, 3.0), (4, 2.0), (16, 1.01), (64, 1.0)], 4, 16),
        ([(64, 1.0), (1, 1.2), (4, 1.01), (16, 1.1)], 16, 64),  # it pays again at 16; in any order
        ([(1, 2.0), (4, 2.0)], 4, None),
        ([(1, 0.9), (4, 0.9)], None, 1),
    ],
)
def test_break_even_is_the_last_batch_that_pays(
    points: list[tuple[int, float]], up_to: int | None, stops: int | None
) -> None:
    assert step_checks.break_even(points) == {"pays_up_to": up_to, "stops_at": stops}


# scaling


def scaling_job(kind: str, **changes: Any) -> dict[str, Any]:
    job = {"kind": kind, "devices": ["cpu", "cpu"], "modes": ["eager", "graph"], "case": "mlp-mini", "batch": None}
    return job | {"dtype": "float32", "num_steps": 2, "num_rounds": 1, "limit_s": 20.0} | changes


def labelled(results: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kind": "threads", "num_workers": 2, "num_devices": 1, **result} for result in results]


def test_scaling_compares_threads_with_processes_that_have_the_same_losses() -> None:
    found = bench_scaling.run(["--counts", "2", "--modes", "graph", "--num-rounds", "2", *SECONDS_LIMIT])
    assert found["wrong"] == [] and found["failed"] == []
    assert [one["kind"] for one in found["results"]] == ["threads", "processes"]
    assert all(len(one["losses"]) == 2 and len(one["steps_per_s_rounds"]) == 2 for one in found["results"])
    assert len({tuple(losses) for one in found["results"] for losses in one["losses"]}) == 1
    (row,) = found["ratios"]
    assert row["threads_over_processes"] == pytest.approx(row["threads"] / row["processes"])
    assert {"device", "torch", "dtype", "num_steps", "num_rounds"} <= set(found["configuration"]) and json.dumps(found)


def test_scaling_ratios_are_over_one_worker_and_over_processes() -> None:
    found = [
        {"mode": "graph", "num_devices": 1, "num_workers": count, "kind": kind, "steps_per_s": rate}
        for kind, count, rate in (
            ("threads", 1, 10.0),
            ("processes", 1, 8.0),
            ("threads", 4, 30.0),
            ("processes", 4, 20.0),
        )
    ]
    four = next(row for row in bench_scaling.ratios(found) if row["num_workers"] == 4)
    assert (four["threads_over_one"], four["processes_over_one"], four["threads_over_processes"]) == (3.0, 2.5, 1.5)


def test_scaling_finds_a_worker_that_trains_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_scaling.check(labelled(bench_scaling.run_job(scaling_job("threads"))), 1e-3) == []
    made: list[None] = []
    monkeypatch.setattr(bench_scaling, "make_training", perturbing(lambda: made.append(None) or len(made) == 4))
    wrong = bench_scaling.check(labelled(bench_scaling.run_job(scaling_job("threads"))), 1e-3)
    assert wrong and all("graph" in one for one in wrong)


def test_scaling_check_compares_modes_with_eager_and_allows_compiled_ones_a_tolerance() -> None:
    base = {"kind": "threads", "num_workers": 1, "num_devices": 1}

    def check(mode: str, loss: float) -> list[str]:
        return bench_scaling.check(
            [{**base, "mode": "eager", "losses": [[1.0]]}, {**base, "mode": mode, "losses": [[loss]]}], 1e-3
        )

    assert check("graph", 1.0) == check("compile", 1.0005) == []
    assert check("graph", nudged(1.0)) and check("compile", 1.002) and check("compile", math.nan)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_scaling_ends_in_the_workers_error_when_one_fails(kind: str) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="A worker failed: KeyError"):
        list(bench_scaling.run_job(scaling_job(kind, case="no such case", devices=["cpu"])))
    assert time.monotonic() - start < 20


def test_scaling_spreads_workers_over_two_devices_where_there_are_two() -> None:
    jobs = bench_scaling.make_jobs(["threads"], [1, 4], ["cuda:0", "cuda:1"], {})
    assert [job["devices"] for job in jobs] == [
        ["cuda:0"],
        ["cuda:0"] * 4,
        ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
    ]
    assert all(len(set(job["devices"])) == 1 for job in bench_scaling.make_jobs(["threads"], [1, 4], ["cuda:0"], {}))


# overhead


def test_overhead_gives_series_of_equal_results_over_inputs_threads_and_graphs() -> None:
    found = bench_overhead.run(["--num-rounds", "2", "--num-graphs", "2", "--num-threads", "2", *SECONDS_LIMIT])
    assert found["wrong"] == found["failed"] == found["skipped"] == []
    series = {(one["part"], one["name"]): one for one in found["series"]}
    for kind in bench_overhead.KINDS:
        for field in ("bare_us", "call_us", "over_us", "over_us p90"):
            one = series["call", f"{kind}: {field}"]
            assert [count for count, _ in one["points"]] == [1, 4] and (one["x"], one["unit"]) == ("num_inputs", "us")
    for field in ("first_step_ms", "capture_ms", "ready_ms"):
        points = series["threads", field]["points"]
        assert [count for count, _ in points] == [2] and all(value > 0 for _, value in points)
    assert [count for count, _ in series["graphs", "capture_ms"]["points"]] == [1, 2]
    assert [one["captures"] for one in found["results"] if one["part"] == "threads"] == [2]
    assert json.dumps(found)


def call_job(kind: str) -> dict[str, Any]:
    return {"part": "call", "kind": kind, "num_inputs": 3, "num_rounds": 1, "seconds": 1.0, "device": "cpu"}


@pytest.mark.parametrize("kind", ["graphed copy pytree", "TrainStep alias"])
def test_overhead_finds_a_call_with_a_wrong_result(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    job, right = call_job(kind), bench_overhead.pair
    assert bench_overhead.wrong_results([(job, bench_overhead.measure_call(job, CPU))]) == []

    def pair(*args: Any) -> Any:
        ours, bare = right(*args)
        return lambda batch: ours(batch) * (1 + 2.0**-22), bare

    monkeypatch.setattr(bench_overhead, "pair", pair)
    assert len(bench_overhead.wrong_results([(job, bench_overhead.measure_call(job, CPU))])) == 1


@pytest.mark.parametrize("part", ["threads", "graphs"])
def test_overhead_finds_weights_that_differ(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    counts = {"num_threads": 2} if part == "threads" else {"num_graphs": 1}
    job = {"part": part, "device": "cpu", "case": "mlp-mini", "dtype": "float32", "limit_s": 20.0, **counts}
    assert all(result["equal"] for result in bench_overhead.run_job(job))
    made: list[None] = []
    monkeypatch.setattr(bench_overhead, "make_training", perturbing(lambda: made.append(None) or len(made) == 2))
    assert not any(result["equal"] for result in bench_overhead.run_job(job))


def test_overhead_of_threads_raises_what_a_thread_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no step today")

    monkeypatch.setattr(gs, "TrainStep", broken)
    job = {"part": "threads", "num_threads": 2, "case": "mlp-mini", "dtype": "float32", "limit_s": 20.0}
    with pytest.raises(ExceptionGroup) as raised:
        bench_overhead.measure_threads(job, CPU)
    assert raised.group_contains(ValueError, match="no step today")
