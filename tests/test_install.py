"""install() and uninstall() at odd times: beside compiled functions, and in a process that forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphsafe
from graphsafe import gate
from graphsafe.errors import GraphsafeWarning
from graphsafe.repairs import tree_functions
from tests.helpers import DEADLINE_S, join_threads, plain_torch, run_threads, threads_in_dynamo

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield


def trained(step: Any) -> torch.Tensor:
    x = torch.arange(4.0, requires_grad=True)
    step(x).backward()
    assert x.grad is not None
    return x.grad


def test_functions_compiled_before_install_work_on_from_threads() -> None:
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    expected = trained(compiled)
    graphsafe.install()
    for gradient in run_threads(4, lambda _: trained(compiled)):
        assert torch.equal(gradient, expected)
    for length in run_threads(4, lambda index: compiled(torch.ones(7 + index))):  # compiled anew, in threads
        assert length > 0


def test_functions_compiled_under_install_work_on_after_uninstall() -> None:
    graphsafe.install()
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    forward_alone = torch.compile(lambda x: x.cos().sum(), backend="aot_eager")
    y = torch.arange(4.0, requires_grad=True)
    pending = forward_alone(y)  # its backward is not compiled yet
    expected = trained(compiled)
    graphsafe.uninstall()
    assert torch.equal(trained(compiled), expected)
    pending.backward()
    assert y.grad is not None and torch.allclose(y.grad, -torch.arange(4.0).sin())
    assert compiled(torch.ones(9)).item() == pytest.approx(9 * torch.ones(1).sin().item())
    graphsafe.install()
    assert torch.equal(trained(compiled), expected)


def test_install_says_what_stays_unprotected_where_graph_trees_have_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    container = SimpleNamespace(live_cudagraphify_fns=1)
    recorded = SimpleNamespace(local=SimpleNamespace(tree_manager_containers={0: container}))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", recorded)  # type: ignore[arg-type]
    with pytest.warns(GraphsafeWarning, match=r"recorded before graphsafe\.install.*torch\.compiler\.reset"):
        tree_functions.repair(pytest.importorskip("torch._inductor.compile_fx"))
    tree_functions.undo()
    container.live_cudagraphify_fns = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree_functions.repair(sys.modules["torch._inductor.compile_fx"])
    tree_functions.undo()


FORK = """
import faulthandler, os, signal, threading
faulthandler.dump_traceback_later(80, exit=True)
import torch, graphsafe
graphsafe.install()
step = torch.compile(lambda x: (x.sin() * 2).sum(), backend="eager")
step(torch.ones(3))
kept = torch.compile(lambda x: (x.exp() * 2).sum(), backend="eager")  # no other thread is in torch's locks for it
kept(torch.ones(3))
stop = threading.Event()
thread = threading.Thread(target=lambda: [step(torch.ones(3)) for _ in iter(stop.is_set, True)])
thread.start()
with graphsafe.thread_context("cpu") as context, context.eager():
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        other = torch.compile(lambda x: x.cos().sum(), backend="eager")
        assert abs(other(torch.zeros(5)).item() - 5) < 1e-6
        assert kept(torch.ones(4)).item() > 0
        torch.manual_seed(3)
        torch.rand(2)
        os._exit(0)
stop.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_compiles_and_draws_after_install() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "done\n"


def test_install_beside_a_compile_that_goes_on_to_compile_something_nested_lets_other_threads_compile() -> None:
    inner = torch.compile(lambda x: x + 1, backend="eager")
    inside, go_on = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        inside.set()
        assert go_on.wait(DEADLINE_S)
        inner(torch.ones(2))  # 3. with torch's lock held since before the repair
        return gm.forward

    outer = torch.compile(lambda x: x * 2, backend=backend)
    results: list[float] = []
    first = threading.Thread(target=lambda: results.append(outer(torch.ones(3)).sum().item()), daemon=True)
    first.start()
    assert inside.wait(DEADLINE_S)  # 1. plain torch compiles
    graphsafe.install()
    other = torch.compile(lambda x: x - 1, backend="eager")
    second = threading.Thread(target=lambda: results.append(other(torch.ones(4)).sum().item()), daemon=True)
    second.start()
    while not gate.compiling:  # 2. another thread is in the gate's scope, and waits for torch's lock
        assert second.is_alive()
        threading.Event().wait(0.001)
    go_on.set()
    join_threads([first, second])
    assert sorted(results) == [0, 6]


def test_a_call_that_waits_for_a_compile_ends_well_while_the_repairs_are_put_in_anew() -> None:
    graphsafe.install()
    inside, go_on = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        inside.set()
        assert go_on.wait(DEADLINE_S)
        return gm.forward

    first_step = torch.compile(lambda x: x * 2, backend=backend)
    second_step = torch.compile(lambda x: x - 1, backend="eager")

    def body(index: int) -> float:
        if index == 0:
            return first_step(torch.ones(3)).sum().item()
        if index == 1:
            assert inside.wait(DEADLINE_S)
            return second_step(torch.ones(4)).sum().item()
        while threads_in_dynamo() < 2:  # the second waits for the first one's compile
            threading.Event().wait(0.001)
        graphsafe.uninstall()
        graphsafe.install()
        go_on.set()
        return 0

    assert run_threads(3, body) == [6, 0, 0]
