"""A24: a thread that imported Inductor's trees ends just before the process does, which aborts on plain torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import graphsafe
from graphsafe.repairs import thread_ends
from tests.helpers import PROGRAM_LIMIT_S, SHOWS_FAULTS

PROGRAM = """
import sys, threading, time
import torch
import graphsafe as gs

if {installed}:
    gs.install()

class Slow:
    def __del__(self):  # by the thread's own end, which is the last to hold this
        for _ in range(100):  # comes back for the interpreter's lock, also while the interpreter ends
            time.sleep(0.01)
        sys.stderr.write("over\\n")

def work():
    from torch._inductor import cudagraph_trees
    cudagraph_trees.local.tree_manager_containers[-1] = Slow()

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def run(installed: bool) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(installed=installed)]
    return subprocess.run(program, capture_output=True, text=True, timeout=PROGRAM_LIMIT_S)


def test_a_process_waits_for_the_end_of_such_a_thread_and_aborts_on_plain_torch() -> None:
    if SHOWS_FAULTS:
        plain = run(installed=False)
        assert plain.returncode in (-signal.SIGABRT, -signal.SIGSEGV)  # "terminate called", mostly
    done = run(installed=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["over"]


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The threads that are waited for, none at first."""
    holders: set[int] = set()
    monkeypatch.setattr(thread_ends, "_holders", holders)
    yield holders


def test_threads_that_run_are_not_waited_for_and_none_for_ever(
    holders: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_s = time.monotonic()
    holders.add(threading.get_native_id())
    thread_ends._wait()
    assert time.monotonic() - begin_s < thread_ends._WAIT_S / 2
    monkeypatch.setattr(thread_ends, "_WAIT_S", 0.01)
    monkeypatch.setattr(threading, "enumerate", lambda: [])
    thread_ends._wait()  # one that lives on, of which Python knows nothing


def test_an_install_after_the_import_waits_for_every_thread_that_may_have_been_it(holders: set[int]) -> None:
    was_installed = bool(graphsafe.installed())
    graphsafe.uninstall()
    names, go_on = [], threading.Event()
    begun = threading.Barrier(2)

    def work() -> None:
        names.append(threading.get_native_id())
        begun.wait(10)
        assert go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        begun.wait(10)
        from torch._inductor import cudagraph_trees

        install = threading.Thread(target=lambda: thread_ends.repair(cudagraph_trees))
        install.start()
        install.join()
    finally:
        go_on.set()
        thread.join()
        thread_ends.undo()
        if was_installed:
            graphsafe.install()
    assert names[0] in holders
