"""A20: calls of ``fullgraph=True`` functions in threads at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import eval_frame

import graphsafe
from graphsafe.repairs import fullgraph
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, join_threads


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    was_installed = bool(graphsafe.installed())
    graphsafe.uninstall()
    torch._dynamo.reset()
    former = {name: getattr(eval_frame, name) for name in (fullgraph._COUNT, fullgraph._OVERRIDE) if _has(name)}
    yield
    torch._dynamo.reset()
    graphsafe.uninstall()
    if fullgraph._COUNT in former:
        former[fullgraph._COUNT](-1)
    if fullgraph._OVERRIDE in former:
        former[fullgraph._OVERRIDE](torch._C._dynamo.eval_frame._EvalFrameOverride.NONE)
    if was_installed:
        graphsafe.install()


def _has(name: str) -> bool:
    return hasattr(eval_frame, name)


def beside_a_call(meanwhile: Callable[[], None]) -> None:
    """Call a compiled fullgraph function in a thread; ``meanwhile()`` runs here while it is in it."""
    inside, let_it_end = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            inside.set()
            assert let_it_end.wait(DEADLINE_S)
            return gm.forward(*args)

        return run

    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)

    thread = threading.Thread(target=compiled, args=(torch.ones(2),))
    thread.start()
    assert inside.wait(DEADLINE_S)  # 1. the thread runs what was compiled
    try:
        meanwhile()
    finally:
        let_it_end.set()
        join_threads([thread])


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_parts_after_a_graph_break_are_compiled_beside_a_fullgraph_call_and_run_eagerly_on_plain_torch() -> None:
    def count() -> None:
        compiles: list[int] = []

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
            compiles.append(1)
            return gm.forward

        torch.compile(broken, backend=backend)(torch.ones(3))
        counts.append(len(compiles))

    counts: list[int] = []
    shared = fullgraph.probe(eval_frame)
    beside_a_call(count)
    torch._dynamo.reset()
    graphsafe.install()
    beside_a_call(count)
    if SHOWS_FAULTS:
        assert shared, "the pinned torch no longer has the fault: the test is no proof any more"
    assert counts == [1 if shared else 2, 2]


@pytest.mark.skipif(
    not _has(fullgraph._COUNT) or not fullgraph.probe(eval_frame),
    reason="this torch counts no frames, or a thread its own",
)
def test_frames_are_counted_in_a_process_of_one_thread_alone() -> None:
    program = """
import threading, torch, graphsafe
from torch._dynamo import eval_frame
graphsafe.install()
def counts():
    alone = threading.active_count() == 1
    counting = eval_frame.set_fullgraph_compiled_frame_count(0) < 0
    eval_frame.set_fullgraph_compiled_frame_count(-1)
    return counting == alone
assert counts() and counts()
done = threading.Event()
thread = threading.Thread(target=done.wait, daemon=True)
thread.start()
assert counts()
done.set()
thread.join()
assert counts()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
