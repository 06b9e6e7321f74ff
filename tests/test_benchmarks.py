"""The benchmarks' own tools, and that each benchmark checks what it compares."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import compare as comparing
from benchmarks import page

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("recorded_benchmarks.json")
PROGRAMS = {
    "bench_pipeline",
    "bench_speculators",
    "bench_topology",
}  # of minutes each, with tests of their own in tests/dflash
MODULES = sorted({path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")} - PROGRAMS)
CHEAP = ("bench_buffers", "bench_context", "bench_gate", "bench_graphed", "bench_padding", "bench_train_step")
CHECKS = {"assert_close", "compare", "record", "same_numbers"}


class Benchmark:
    """Stands in for pytest-benchmark's fixture."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, target: Any, *, setup: Any, rounds: int) -> None:
        for _ in range(rounds):
            setup()
            target()


class Clock:
    """A clock that only the sides move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(comparing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def side(self, seconds: float, result: Any, calls: list[str] | None = None, name: str = "") -> Any:
        def call() -> Any:
            self.now += seconds
            if calls is not None:
                calls.append(name)
            return result

        return call


def test_compare_records_the_ratio_of_two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, benchmark = Clock(monkeypatch), Benchmark()
    sides = {"ours": clock.side(3e-3, torch.ones(2)), "other": clock.side(1e-3, torch.ones(2))}
    comparing.compare(benchmark, sides, config={"device": "cpu"})
    info = benchmark.extra_info
    assert (info["ours"], info["other"]) == ("ours", "other")
    assert info["ratio"] == pytest.approx({"median": 3.0, "p10": 3.0, "p90": 3.0})
    assert info["ours_us"]["median"] == pytest.approx(3e3)
    assert info["more_us"] == pytest.approx(2e3)
    assert info["check"] == "results equal bit for bit (1 value)"
    assert json.loads(json.dumps(info)) == info


def test_compare_alternates_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, benchmark = Clock(monkeypatch), Benchmark()
    calls: list[str] = []
    sides = {name: clock.side(1.0, 0, calls, name) for name in ("ours", "other")}  # so slow that a round is one call
    comparing.compare(benchmark, sides, config={})
    assert calls[-2 * comparing.MIN_ROUNDS :] == ["other", "ours"] * comparing.MIN_ROUNDS


def test_compare_does_what_each_side_needs_before_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, benchmark = Clock(monkeypatch), Benchmark()
    installed: list[str] = []
    wrong: list[str] = []

    def side(name: str) -> Any:
        def call() -> None:
            clock.now += 1e-3
            if installed[-1] != name:
                wrong.append(name)

        return call

    before = {name: lambda name=name: installed.append(name) for name in ("ours", "other")}
    comparing.compare(benchmark, {name: side(name) for name in before}, config={}, before=before)
    assert installed
    assert not wrong


def test_compare_fails_before_it_times_anything_when_the_sides_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, benchmark = Clock(monkeypatch), Benchmark()
    sides = {"ours": clock.side(1e-3, torch.ones(2)), "other": clock.side(1e-3, torch.ones(2) + 1e-6)}
    with pytest.raises(AssertionError):
        comparing.compare(benchmark, sides, config={})
    assert benchmark.extra_info == {}
    assert clock.now == pytest.approx(2e-3)


def test_spread_is_the_median_and_percentiles() -> None:
    assert comparing.spread([float(i) for i in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    assert comparing.spread([7.0]) == {"median": 7.0, "p10": 7.0, "p90": 7.0}


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def has_check(name: str, functions: dict[str, ast.FunctionDef], seen: set[str]) -> bool:
    """Whether a function, or one of its module that it calls, compares or asserts."""
    seen.add(name)
    nodes = list(ast.walk(functions[name]))
    if any(isinstance(node, ast.Assert) for node in nodes):
        return True
    called = {
        node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for node in nodes
        if isinstance(node, ast.Call)
    }
    return bool(called & CHECKS) or any(has_check(other, functions, seen) for other in called & set(functions) - seen)


@pytest.mark.parametrize("module", MODULES)
def test_each_benchmark_checks_what_it_measures(module: str) -> None:
    imported = importlib.import_module(f"benchmarks.{module}")
    assert imported.__doc__, f"{module} does not say what it measures"
    functions = functions_of(ast.parse(Path(str(imported.__file__)).read_text(encoding="utf-8")))
    tests = [name for name in functions if name.startswith("test_")]
    assert tests, f"{module} has no benchmark"
    unchecked = [name for name in tests if not has_check(name, functions, set())]
    assert not unchecked, f"{module}: {unchecked} time something and check nothing"


@pytest.mark.slow
def test_cheap_benchmarks_run_and_end_with_their_figures_as_json() -> None:
    files = [f"benchmarks/{module}.py" for module in CHEAP]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-q",
        "--benchmark-disable",
        "-m",
        "not cuda",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name.partition(".py")[0] for name in figures} == set(CHEAP)
    for name, figure in figures.items():
        assert figure["check"], name
        assert figure["config"], name
        assert figure["ratio"]["median"] > 0, name


def test_page_has_each_figure_with_its_ratio_check_and_command(tmp_path: Path) -> None:
    out = tmp_path / "docs" / "2026-12-01-cpu.md"
    page.main([str(RECORDED), "--out", str(out), "--title", "A title", "--command", "make bench"])
    text = out.read_text(encoding="utf-8")
    machine, benchmarks = page.read([RECORDED])
    assert text.startswith("# A title\n")
    assert f"torch {machine['torch']}" in text
    assert "```\nmake bench\n```" in text
    assert "python -m pytest benchmarks/bench_gate.py --benchmark-only" in text
    for benchmark in benchmarks:
        assert f"`{benchmark['name']}`" in text
    gate = next(b["extra_info"] for b in benchmarks if b["name"] == "test_uncontended")
    assert f"**{gate['ratio']['median']:.2f}**" in text
    assert f"checked: {gate['check']}" in text


def test_page_says_that_the_other_side_hung_and_gives_no_ratio(tmp_path: Path) -> None:
    page.main([str(RECORDED), "--out", str(tmp_path / "page.md")])
    line = next(
        line
        for line in (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
        if "test_first_calls[8]" in line
    )
    assert "hangs (stopped after 40 s)" in line
    assert line.endswith("| - |")


def test_page_draws_a_plot_beside_it(tmp_path: Path) -> None:
    from PIL import Image

    page.main([str(RECORDED), "--out", str(tmp_path / "page.md")])
    assert "(page.png)" in (tmp_path / "page.md").read_text(encoding="utf-8")
    with Image.open(tmp_path / "page.png") as image:
        assert min(image.size) > 200
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10, "the plot is blank"


def test_page_takes_the_last_figures_of_what_was_measured_again(tmp_path: Path) -> None:
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    content["benchmarks"] = [b for b in content["benchmarks"] if b["name"] == "test_uncontended"]
    content["benchmarks"][0]["extra_info"]["ratio"] = {"median": 123.45, "p10": 1.0, "p90": 200.0}
    again = tmp_path / "again.json"
    again.write_text(json.dumps(content), encoding="utf-8")
    page.main([str(RECORDED), str(again), "--out", str(tmp_path / "page.md"), "--note", "Measured twice."])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert sum(line.startswith("| `test_uncontended`") for line in text.splitlines()) == 1
    assert "**123.45**" in text
    assert "Measured twice." in text


def test_page_without_a_ratio_has_no_plot(tmp_path: Path) -> None:
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    content["benchmarks"] = [b for b in content["benchmarks"] if "ratio" not in b["extra_info"]]
    results = tmp_path / "results.json"
    results.write_text(json.dumps(content), encoding="utf-8")
    page.main([str(results), "--out", str(tmp_path / "page.md")])
    assert not (tmp_path / "page.png").exists()
    assert "page.png" not in (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"benchmarks": []}, "holds no benchmark"),
        ({"machine_info": {"torch": "0.0"}}, "a page is of one machine"),
        ({"benchmarks": None, "machine_info": None}, "is not a file of pytest-benchmark"),
    ],
)
def test_page_refuses_results_that_make_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps({**json.loads(RECORDED.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with pytest.raises(SystemExit):
        page.main([str(RECORDED), str(changed), "--out", str(tmp_path / "page.md")])
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    ("us", "said"),
    [(0.05, "0.0500 us"), (21.513, "21.5 us"), (999.0, "999 us"), (4271.2, "4.27 ms"), (3.7e6, "3.70 s")],
)
def test_page_gives_times_three_digits(us: float, said: str) -> None:
    assert page.in_units(us) == said
