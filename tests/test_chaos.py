"""The chaos program on the CPU: a short storm is clean, and a wrong number, a hang or a missed target is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.helpers import PROGRAM_LIMIT_S

SMALL = ["--device", "cpu", "--seconds", "1", "--scripts", "2", "--threads", "3"]


def chaos(
    *arguments: str, before: str = "", limit_s: float = PROGRAM_LIMIT_S
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the program in a process of its own, after the code ``before``; returns its outcome and the report."""
    program = f"import sys\nfrom tests import chaos, chaos_lives\n{before}\nsys.exit(chaos.main({list(arguments)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s)
    lines = done.stdout.splitlines()
    return done, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def test_chaos_finds_nothing_wrong_on_the_cpu() -> None:
    done, report = chaos("--device", "cpu", "--seconds", "3", "--scripts", "3", "--interval-s", "1")
    assert done.returncode == 0 and report["ok"], done.stdout + done.stderr
    assert report["wrong"] == 0 and report["checked"] > report["replays"] >= report["targets"]["replays"]
    assert report["threads_started"] >= 8 and all(report["foreign_checked"].values())
    assert len(done.stdout.splitlines()) >= 4  # a header, lines on the way, the report


def test_chaos_sees_a_wrong_number_and_a_missed_target() -> None:
    skips = """
replay = chaos_lives.gs.Graph.replay
calls = iter(range(1 << 30))
chaos_lives.gs.Graph.replay = lambda self: replay(self) if next(calls) % 50 else None
"""
    done, report = chaos(*SMALL, "--without", "fail", "compiled", "loading", before=skips)
    assert done.returncode == 1 and report["wrong"] > 0, done.stdout + done.stderr
    assert any("failed_captures, fewer than" in problem for problem in report["problems"])
    assert "unlike the solo run" in str(report["problems"]) or "a replayed chain" in str(report["problems"])


def test_chaos_hands_an_unexpected_error_on_and_ends() -> None:
    breaks = "chaos_lives.Life.eager = lambda self: self.calm or {}['an error of a life']"
    done, report = chaos(*SMALL, "--without", "compiled", "loading", before=breaks)
    assert done.returncode == 1 and any("an error of a life" in problem for problem in report["problems"]), done.stderr


def test_chaos_dumps_all_stacks_when_a_life_hangs() -> None:
    hangs = "chaos_lives.Life.eager = lambda self: self.calm or chaos_lives.threading.Event().wait()"
    quick = ["--without", "compiled", "loading", "train", "infer"]  # nothing that takes seconds on a busy machine
    done, _ = chaos(*SMALL, "--hang-s", "6", *quick, before=hangs)
    assert done.returncode == 2 and "no progress for 6.0 s" in done.stderr, done.stdout + done.stderr
    assert "in lead" in done.stderr and "in live" in done.stderr
