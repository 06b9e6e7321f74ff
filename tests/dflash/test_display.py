from __future__ import annotations

import io
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from examples.dflash.display import MAX_THREADS, Display, sparkline
from examples.dflash.metrics import read_records

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def reading(step=40, acceptance=2.5, threads=("reader", "target-0", "drafter-0")):
    shares = {"busy": 0.62, "wait_input": 0.3, "wait_room": 0.07, "wait_gate": 0.01}
    return {
        "step": step,
        "loss": 3.14159,
        "acceptance": acceptance,
        "slot_accuracy": [0.9, 0.55],
        "lr": 6e-4,
        "grad_norm": 1.25,
        "tokens_per_s": 12345.6,
        "threads": {name: shares | ({"device_busy": 0.97} if name != "reader" else {}) for name in threads},
        "memory": {
            "cpu": {"allocated_bytes": 2 * GIB, "peak_bytes": 3 * GIB},
            "cuda:0": {"allocated_bytes": 40 * GIB, "peak_bytes": 50 * GIB, "reserved_bytes": 60 * GIB},
        },
        "captures": 2,
        "replays": 1234,
        "compiles": 5,
        "recompiles": 0,
    }


def drawn(display, width, ascii_only=False, color=None):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=color, record=True)
    console.print(display.rows(width, ascii_only=ascii_only))
    return console.export_text()


def a_display(**changes):
    display = Display(100)
    for number, acceptance in enumerate((1.0, 1.5, 2.75, 2.5)):
        display.add(reading(10 * (number + 1), acceptance, **changes))
    return display


def test_sparkline_goes_from_the_least_to_the_greatest():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 1.0], 10) == "█▁"
    assert sparkline([2, 2, 2], 10) == "▅▅▅"
    assert sparkline([], 10) == sparkline([1], 0) == ""


def test_sparkline_bars_are_means_where_there_is_no_room_for_each():
    assert sparkline([0, 0, 10, 10, 4, 6], 3) == "▁█▅"
    line = sparkline(list(range(1000)), 20)
    assert len(line) == 20 and line == "".join(sorted(line))


def test_sparkline_has_ascii_bars():
    line = sparkline(range(8), 8, ascii_only=True)
    assert line.isascii() and len(set(line)) == 8


def test_display_shows_the_last_reading():
    text = drawn(a_display(), 100)
    assert "40/100" in text and "40%" in text
    assert re.search(r"loss +3\.142 +gradient norm 1\.25 +lr 6\.00e-04", text)
    assert re.search(r"acceptance +2\.50 +best 2\.75 +▁.*█", text)
    assert "90% 55%" in text and "12,346" in text
    assert "cuda:0 40.0 GiB, peak 50.0   process 2.0 GiB, peak 3.0" in text
    assert re.search(r"2 captures +1,234 replays +5 compiles", text) and "RECOMPILES" not in text
    assert re.search(r"drafter-0 +━+─+ +62% +97% +30% +7% +1%", text)
    assert re.search(r"reader +━+─+ +62% +30% +7% +1%", text)


def test_display_shows_validations_checkpoints_and_recompiles():
    display = a_display()
    display.add({"event": "validation", "step": 30, "loss": 2.5, "acceptance": 2.25, "slot_accuracy": [0.5]})
    display.add({"event": "checkpoint", "step": 20, "path": "x"})
    display.add({**reading(50), "recompiles": 3})
    text = drawn(display, 100)
    assert re.search(r"validation +acceptance 2\.250 +loss 2\.500 +at step 30", text)
    assert re.search(r"checkpoint +step 20", text)
    assert "3 RECOMPILES" in text


@pytest.mark.parametrize("width", [1, 2, 10, 24, 40, 60, 80, 200])
@pytest.mark.parametrize("color", [None, "truecolor"])
def test_display_fits_every_width(width, color):
    text = drawn(a_display(), width, color=color)
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 24:
        assert "loss" in text and "reader" in text
    assert drawn(Display(100), width)  # before the first reading


def test_display_shows_waits_where_there_is_room():
    assert "gate" in drawn(a_display(), 80)
    assert "gate" not in drawn(a_display(), 50)


def test_display_shows_some_of_many_threads():
    text = drawn(a_display(threads=[f"target-{number}" for number in range(MAX_THREADS + 5)]), 80)
    assert f"target-{MAX_THREADS - 1}" in text and f"target-{MAX_THREADS} " not in text
    assert "and 5 more" in text


def test_display_takes_readings_that_lack_nearly_everything():
    display = Display(100)
    display.add({"step": 5, "loss": None, "acceptance": None})
    display.add({"event": "validation", "step": 5})
    assert "5/100" in drawn(display, 80)


def test_display_draws_ascii_alone_on_terminals_without_more():
    display = a_display()
    console = Console(width=80, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), force_terminal=True)
    console.print(display._live.renderable)  # with the console's own options, as it is drawn live
    console.file.flush()
    console.file.buffer.getvalue().decode("ascii")
    assert drawn(display, 80, ascii_only=False) != drawn(display, 80, ascii_only=True)


def test_display_that_cannot_be_drawn_says_so_in_a_line():
    display = a_display()
    display.add({**reading(), "threads": {"reader": {"busy": "much"}}})
    console = Console(width=80, file=io.StringIO())
    console.print(display._live.renderable)
    assert console.file.getvalue().startswith("no display: ")


RUN = """
    import sys, time
    from contextlib import ExitStack
    from pathlib import Path
    from examples.dflash.metrics import Reporter

    with ExitStack() as stack:
        reporter = Reporter(Path(sys.argv[1]), 1000)
        stack.callback(reporter.close)
        for step in range(1, 1000):
            reporter.report({"step": step, "loss": 1.0, "acceptance": 2.0, "tokens_per_s": 3.0, "drafter_busy": 0.5})
            time.sleep(0.05)
"""


def read_until(terminal, wanted, seconds=60.0):
    """What comes from a terminal until ``wanted`` is in it, or it is closed."""
    got, deadline = b"", time.monotonic() + seconds
    while wanted not in got:
        assert time.monotonic() < deadline, got[-2000:]
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side has closed it
            part = b""
        if not part:
            break
        got += part
    return got


@pytest.fixture
def on_terminal(tmp_path):
    """A run on a terminal of its own: its process, the terminal's other side, its metrics."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(theirs)
    yield process, ours, path
    process.kill()
    process.communicate()


def test_display_survives_a_resize_and_ctrl_c_brings_the_cursor_back(on_terminal):
    import fcntl
    import termios

    process, terminal, path = on_terminal
    got = read_until(terminal, b"acceptance")
    assert b"\x1b[?25l" in got  # the cursor is hidden while it draws
    for rows, columns in ((24, 20), (2, 200), (50, 80)):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        read_until(terminal, b"\x1b[")
    process.send_signal(signal.SIGINT)
    rest = read_until(terminal, b"never")
    assert rest.rindex(b"\x1b[?25h") > rest.rfind(b"\x1b[?25l")
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors and b"OSError" not in errors
    assert read_records(path)[-1]["loss"] == 1.0
    os.close(terminal)


def test_run_goes_on_when_its_terminal_is_closed(on_terminal):
    process, terminal, path = on_terminal
    read_until(terminal, b"acceptance")
    os.close(terminal)
    step = read_records(path)[-1]["step"]
    deadline = time.monotonic() + 60
    while max(record["step"] for record in read_records(path)) < step + 40:  # two seconds, several drawings
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
