"""A21: compiled code stays compiled after a call under a dispatch mode: a user's own, a capture pass's, or lint's."""

from __future__ import annotations

import copy
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.utils._python_dispatch import TorchDispatchMode

import graphsafe as gs
from graphsafe.repairs import dispatch_skip
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, join_threads, plain_torch, run_program, run_threads

needs_a21 = pytest.mark.skipif(not dispatch_skip.probe(convert_frame), reason="this torch lacks A21")


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Each test starts on plain torch, and ends with Dynamo's entry as torch wrote it."""
    for one in list(dispatch_skip._cure._wanted_by):  # a pass that a test before this one has broken off
        dispatch_skip._cure.remove(one)
    with plain_torch():
        code = entry_code()
        yield
        gs.uninstall()
        assert entry_code() is code


def entry_code() -> Any:
    return inspect.unwrap(convert_frame.CatchErrorsWrapper.__call__).__code__


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting:
    """A backend that counts its compiles, and the calls of what it compiled."""

    def __init__(self) -> None:
        self.num_compiles = self.num_runs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.num_compiles += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return gm.forward(*args)

        return run


def body(x: Tensor) -> Tensor:
    return x.sin() + 1


class Compiled:
    """A compiled function or module of its own, in ``call``, and whether a call runs compiled code."""

    def __init__(self, kind: str) -> None:
        self.backend = Counting()
        if kind == "module":
            net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.original: Callable[[Tensor], Tensor] = net
        else:
            code = body.__code__.replace(co_name=f"body_{id(self)}")  # of its own, as what is noted is noted in it
            self.original = types.FunctionType(code, globals())
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.original, backend=self.backend)

    def runs_compiled(self) -> bool:
        before = self.backend.num_runs
        self.call(torch.ones(2, 4))
        return self.backend.num_runs > before


kinds = pytest.mark.parametrize("kind", ["function", "module"])

USERS_MODE = """
import torch, graphsafe
from tests.test_repair_dispatch_skip import Compiled, Plain

def stays():
    found = []
    for kind in ("function", "module"):
        compiled = Compiled(kind)
        assert compiled.runs_compiled()
        with Plain():
            assert not compiled.runs_compiled()
        found.append(compiled.runs_compiled())
        found.append(compiled.backend.num_compiles == 1)
    return found

probed = graphsafe.repairs.dispatch_skip.probe(torch._dynamo.convert_frame)
plain = stays()
torch._dynamo.reset()  # else no module is compiled any more: all are called through the same code of Dynamo's
graphsafe.install()
print(json.dumps([probed, plain, stays(), graphsafe.installed()["A21"]]))
"""


def test_compiled_code_stays_compiled_after_a_users_mode_under_install_and_not_on_plain_torch() -> None:
    probed, plain, repaired, status = run_program(USERS_MODE)
    assert repaired == [True] * 4
    if SHOWS_FAULTS:
        assert probed, "the pinned torch no longer has the fault: the test is no proof any more"
    assert [plain, status] == ([[False, True] * 2, "repaired"] if probed else [[True] * 4, "absent"])


@kinds
def test_a_function_that_is_called_first_in_a_users_mode_compiles_afterwards_under_install(kind: str) -> None:
    gs.install()
    compiled = Compiled(kind)
    with Plain():
        assert not compiled.runs_compiled()
    assert compiled.runs_compiled()


def capture(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``call(x)`` in a capture pass on the CPU; returns what a replay computes."""
    with gs.thread_context("cpu"):
        with gs.capture() as graph:
            y = call(x)
        with torch.no_grad():
            y.zero_()
        graph.replay()
    return y


def lint(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    results: list[Tensor] = []
    assert gs.lint(lambda: results.append(call(x))) == []
    return results[0]


passes = pytest.mark.parametrize("look", [capture, lint], ids=["capture", "lint"])


@kinds
@passes
@pytest.mark.parametrize("called_before", [True, False])
def test_compiled_code_stays_compiled_after_a_pass_of_graphsafes_own(
    kind: str, look: Callable[..., Tensor], called_before: bool
) -> None:
    compiled = Compiled(kind)
    assert not called_before or compiled.runs_compiled()
    x, num_runs = torch.randn(2, 4), compiled.backend.num_runs
    assert torch.equal(look(compiled.call, x), compiled.original(x))
    assert compiled.backend.num_runs == num_runs  # the pass itself sees the operators
    assert compiled.runs_compiled()
    assert compiled.backend.num_compiles == 1
    assert not gs.installed()


@passes
@pytest.mark.filterwarnings("ignore")  # Dynamo says what it cannot trace of graphsafe
def test_code_that_partly_compiled_code_looks_into_stays_compiled(look: Callable[..., Tensor]) -> None:
    compiled = Compiled("function")
    assert compiled.runs_compiled()

    def outer(x: Tensor) -> Tensor:
        y = x.cos()
        torch._dynamo.graph_break()  # what is called from here on, Dynamo is asked about
        return look(compiled.original, y)

    outer_backend = Counting()
    x = torch.randn(2, 4)
    y = torch.compile(outer, backend=outer_backend)(x)
    assert torch.equal(y, x.cos().sin() + 1) and outer_backend.num_compiles >= 1
    assert compiled.runs_compiled()


def test_a_train_step_leaves_its_compiled_model_compiled() -> None:
    net, backend = nn.Linear(4, 4), Counting()
    compiled = gs.compile(net, backend=backend)
    x, optimizer = torch.randn(2, 4), torch.optim.SGD(net.parameters(), 0.0, fused=True)
    with gs.thread_context("cpu", seed=0):
        step = gs.TrainStep(lambda x: compiled(x).square().mean(), optimizer, model=net)
        for _ in range(6):
            step(x)
    counts = dict(gs.stats().compiles)
    before = backend.num_runs
    compiled(x)
    assert backend.num_runs == before + 1 and backend.num_compiles == 1
    assert dict(gs.stats().compiles) == counts


FIRST_IMPORT = """
import torch
from graphsafe.repairs import dispatch_skip
from torch.utils._python_dispatch import TorchDispatchMode

class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def backend(gm, example_inputs):
    compiles.append(1)
    return gm.forward

compiles, finders = [], list(sys.meta_path)
with dispatch_skip.stays_compiled(), dispatch_skip.stays_compiled():
    imported_early = "torch._dynamo" in sys.modules
    with Plain():
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(2))
compiled(torch.ones(2))
print(json.dumps([imported_early, len(compiles), sys.meta_path == finders]))
"""


def test_code_that_is_compiled_first_in_a_pass_that_imports_dynamo_stays_compiled() -> None:
    assert run_program(FIRST_IMPORT) == [False, 1, True]


def stays_compiled_now() -> bool:
    compiled = Compiled("function")
    assert compiled.runs_compiled()
    with Plain():
        assert not compiled.runs_compiled()
    return compiled.runs_compiled()


@needs_a21
def test_passes_of_threads_may_overlap_and_the_last_one_puts_torch_back() -> None:
    before = entry_code()
    inside = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]

    def in_a_pass(index: int) -> None:
        with dispatch_skip.stays_compiled():
            inside[index].set()
            assert leave[index].wait(DEADLINE_S)

    threads = [threading.Thread(target=in_a_pass, args=(index,), daemon=True) for index in range(2)]
    for thread, event in zip(threads, inside, strict=True):
        thread.start()
        assert event.wait(DEADLINE_S)  # 1. one after the other is in its pass
    for thread, event, stays in zip(threads, leave, (True, False), strict=True):
        event.set()  # 2. the first ends, then the second
        join_threads([thread])
        assert stays_compiled_now() is stays
    assert entry_code() is before


@needs_a21
def test_install_and_uninstall_may_come_during_a_pass() -> None:
    before = entry_code()
    with dispatch_skip.stays_compiled():
        gs.install()
        assert gs.installed()["A21"] == "repaired"
        gs.uninstall()
        assert stays_compiled_now()
        gs.install()
    assert stays_compiled_now()
    with dispatch_skip.stays_compiled():
        gs.uninstall()
        assert stays_compiled_now()
    assert not stays_compiled_now() and entry_code() is before


@needs_a21
def test_what_dynamo_skips_by_rule_it_is_not_asked_about_again_in_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    gs.install()
    asked: list[str] = []
    entry = convert_frame.CatchErrorsWrapper
    enter = entry.__call__

    def call(self: Any, frame: Any, *args: Any) -> Any:
        asked.append(frame.f_code.co_filename)
        return enter(self, frame, *args)

    compiled = torch.compile(lambda x: copy.copy([x])[0] + 1, backend="eager")
    monkeypatch.setattr(entry, "__call__", call)
    with Plain():
        for _ in range(2):
            compiled(torch.ones(2))
    assert asked.count(copy.__file__) == 1 and asked.count(__file__) > 1
    monkeypatch.undo()


def test_threads_that_capture_and_compile_at_once_stay_compiled() -> None:
    gs.install()
    everyones = [Compiled("function") for _ in range(3)]

    def work(index: int) -> list[bool]:
        found = []
        for _ in range(5):
            capture(everyones[index].call, torch.ones(2, 4))
            found += [one.runs_compiled() for one in everyones]
        return found

    assert all(all(found) for found in run_threads(3, work))
