"""The chaos program on a GPU, for a shorter time than its full form; see tests/chaos.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
SECONDS, LIMIT_S = 45, 240


def test_chaos_finds_nothing_wrong_on_one_gpu() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--device", "cuda:0", "--seconds", str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    print(done.stdout)  # the table, where the test fails
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] and report["wrong"] == 0 and report["checked"] >= report["replays"]
    assert report["threads_started"] >= 8 and all(report["foreign_checked"].values())
