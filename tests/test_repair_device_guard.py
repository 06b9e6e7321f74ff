"""A16: a torch built for CUDA, on a machine without a GPU, compiles in one thread after another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphsafe.repairs import device_guard

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 100

PROGRAM = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later(80, exit=True)
import torch
if sys.argv[1] == "graphsafe":
    import graphsafe
    graphsafe.install()
compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
for size in range(2, 8):  # each compiles, and ends, before the next begins
    thread = threading.Thread(target=lambda: compiled(torch.ones(size)))
    thread.start()
    thread.join()
    junk = [bytearray(4096) for _ in range(2000)]
print(compiled(torch.ones(9)).sum().item())
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """In which threads torch was asked to replace its device guard."""
    found: list[threading.Thread] = []

    def ensure() -> None:
        found.append(threading.current_thread())

    monkeypatch.setattr(torch._C, device_guard._NAME, ensure, raising=False)
    yield found
    device_guard.undo()
    assert getattr(torch._C, device_guard._NAME) is ensure


def test_torch_replaces_its_guard_once_and_in_a_thread_that_stays(calls: list[threading.Thread]) -> None:
    device_guard.repair(sys.modules["torch._subclasses.fake_tensor"])
    threads = [threading.Thread(target=getattr(torch._C, device_guard._NAME)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (caller,) = calls
    assert caller not in threads and caller.is_alive() and caller.daemon


def test_a_torch_without_cuda_or_with_a_gpu_has_no_fault() -> None:
    replaces = hasattr(torch._C, device_guard._NAME) and torch.backends.cuda.is_built()
    assert device_guard.probe(sys.modules["torch._subclasses.fake_tensor"]) == (
        replaces and not torch.cuda.is_available()
    )


@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(), reason="needs a torch built for CUDA, and no GPU"
)
def test_threads_compile_one_after_another_without_a_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, "graphsafe"],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "18.0"
