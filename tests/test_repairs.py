"""The repairs: each fault shown on plain torch and gone with the repair, and everything put back."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphsafe import repairs
from graphsafe.compile import install, installed, uninstall
from graphsafe.errors import GraphsafeWarning
from graphsafe.repairs import _compiles, fx_flag, synchronize
from graphsafe.repairs._patches import Evidence, Patches
from graphsafe.repairs.hooks import hooks
from tests.helpers import ROOT, SHOWS_FAULTS, run_program, run_threads

SOURCE = ROOT / "src" / "graphsafe"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts and ends on plain torch, with hooks that do nothing."""
    was_installed = bool(installed())
    uninstall()
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy([]))
    monkeypatch.setattr(hooks, "seat_scope", nullcontext)
    yield
    uninstall()
    if was_installed:
        install()


def _scope_spy(log: list[tuple[str, str]]) -> Callable[[str], Any]:
    @contextmanager
    def scope(what: str) -> Iterator[None]:
        log.append(("enter", what))
        try:
            yield
        finally:
            log.append(("exit", what))

    return scope


# A1: the flag that FX is tracing

TRACE_BESIDE_A_COMPILED_CALL = """
import torch
from graphsafe import repairs
from graphsafe.repairs import fx_flag

compiled = torch.compile(lambda x: x + 1, backend="eager")
compiled(torch.ones(2))  # nothing is left to compile

def beside():
    tracing, called, errors = threading.Event(), threading.Event(), []
    def traced(x):
        tracing.set()               # 1. this thread traces
        assert called.wait(30)      # 3. and goes on
        return x + 1
    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    tracer.start()
    assert tracing.wait(30)
    try:
        compiled(torch.ones(2))     # 2. meanwhile this one calls compiled code
    except RuntimeError as error:
        errors.append(str(error))
    called.set()
    tracer.join(30)
    return errors

probed = fx_flag.probe(sys.modules["torch.fx._symbolic_trace"])
plain = beside()
repairs.apply()
print(json.dumps([probed, plain, beside(), repairs.statuses()["A1"]]))
"""


def test_a_compiled_call_works_while_another_thread_traces_and_fails_on_plain_torch() -> None:
    probed, plain, repaired, status = run_program(TRACE_BESIDE_A_COMPILED_CALL)
    assert repaired == []
    assert [bool(plain), status] == ([True, "repaired"] if probed else [False, "absent"])
    assert all("symbolically trace" in error for error in plain)
    if SHOWS_FAULTS:
        assert plain, "the pinned torch no longer shows the fault: the test is no proof any more"


needs_a1 = pytest.mark.skipif(not fx_flag.probe(sys.modules["torch.fx._symbolic_trace"]), reason="this torch lacks A1")


@needs_a1
def test_fx_flag_is_true_in_the_thread_that_traces_and_in_no_other() -> None:
    install()
    seen = {}

    def traced(x: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.update(other=bool(torch.fx._symbolic_trace.is_fx_tracing())))
        thread.start()
        thread.join(30)
        seen["own"] = bool(torch.fx._symbolic_trace.is_fx_symbolic_tracing())
        return x

    torch.fx.symbolic_trace(traced)
    assert seen == {"other": False, "own": True}
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()


@needs_a1
def test_fx_flag_comes_back_after_a_trace_that_fails() -> None:
    install()

    def traced(x: Any) -> Any:
        raise ValueError("in the trace")

    with pytest.raises(ValueError, match="in the trace"):
        torch.fx.symbolic_trace(traced)
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()


@needs_a1
def test_fx_flag_set_from_outside_the_module_is_this_threads() -> None:
    install()
    seen = {}

    def traced(x: Any) -> Any:
        module = torch.fx._symbolic_trace  # as torch._higher_order_ops does around its compiles
        before, module._is_fx_tracing_flag = module._is_fx_tracing_flag, False
        seen["cleared"] = bool(module.is_fx_symbolic_tracing())
        module._is_fx_tracing_flag = before
        seen["back"] = bool(module.is_fx_symbolic_tracing())
        return x

    torch.fx.symbolic_trace(traced)
    assert seen == {"cleared": False, "back": True}


@needs_a1
def test_fx_flag_heals_when_a_trace_was_under_way_during_install() -> None:
    tracing, go_on = threading.Event(), threading.Event()

    def traced(x: Any) -> Any:
        tracing.set()  # 1. a trace has set the plain flag
        assert go_on.wait(30)
        return x

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    thread.start()
    assert tracing.wait(30)
    install()  # 2. the flag becomes ours
    go_on.set()
    thread.join(30)  # 3. the trace has put back the plain False
    test_fx_flag_is_true_in_the_thread_that_traces_and_in_no_other()


# A2: autograd inside a compile


def _autograd_during_a_compile(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Thread and multithreading setting of each run of the autograd engine while torch.func.grad is compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    runs: list[tuple[str, bool]] = []
    engine = torch.autograd._engine_run_backward

    def spy(*args: Any, **kwargs: Any) -> Any:
        runs.append((threading.current_thread().name, torch._C._is_multithreading_enabled()))
        return engine(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "_engine_run_backward", spy)
        compiled = torch.compile(torch.func.grad(lambda x: x.sin().sum()), backend="aot_eager")
        x = torch.ones(3)
        assert torch.allclose(compiled(x), x.cos())
        after_compile = len(runs)
        compiled(x)
        assert len(runs) == after_compile  # so all of them belong to the compile
    return runs


def test_a_compile_runs_autograd_in_its_own_thread_confined_and_does_not_on_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _autograd_during_a_compile(monkeypatch)
    assert True in [multithreaded for _, multithreaded in plain], (
        "plain torch shows no fault: this is no proof any more"
    )

    install()
    assert torch._C._is_multithreading_enabled()
    [runs] = run_threads(1, lambda _: (_autograd_during_a_compile(monkeypatch), torch._C._is_multithreading_enabled()))
    assert len(runs[0]) == len(plain)
    assert set(runs[0]) == {("test-0", False)}
    assert runs[1], "the thread's setting came back"


@pytest.mark.parametrize("former", [True, False])
def test_confinement_restores_the_former_setting_after_a_compile_that_fails(former: bool) -> None:
    install()
    during = []

    def backend(gm: Any, inputs: Any) -> Any:
        during.append(torch._C._is_multithreading_enabled())
        raise ValueError("in the backend")

    with torch.autograd.grad_mode.set_multithreading_enabled(former):
        with pytest.raises(Exception, match="in the backend"):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert torch._C._is_multithreading_enabled() is former
    assert during == [False]


def _train(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    fn(x).sum().backward()
    assert x.grad is not None
    return x.grad


def _aot_backend(on_backward: Callable[[], None]) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(gm: Any, inputs: Any) -> Any:
        on_backward()
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward), bw_compiler=backward)


def _lazy_config() -> Any:
    """Have AOTAutograd leave the backward to its first run, as it does where it expects to specialise."""
    import torch._functorch.config as config

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: False}) if hasattr(config, name) else config.patch({})


# The compile scope


def test_compile_scope_is_entered_once_for_each_compile_and_never_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy(log))
    install()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(doubled, backend="eager")
    compiled(torch.ones(2))
    assert [kind for kind, _ in log] == ["enter", "exit"]
    assert log[0][1].startswith("doubled (")
    compiled(torch.ones(2))
    assert len(log) == 2


def test_compile_scope_is_entered_before_the_compile_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.convert_frame as convert_frame

    entered = threading.Event()

    @contextmanager
    def scope(what: str) -> Iterator[None]:
        entered.set()
        yield

    monkeypatch.setattr(hooks, "compile_scope", scope)
    lock = convert_frame.compile_lock
    install()
    compiled = torch.compile(lambda x: x - 1, backend="eager")
    thread = threading.Thread(target=compiled, args=(torch.ones(2),), daemon=True)
    with lock:  # 1. somebody compiles
        thread.start()
        assert entered.wait(30)  # 2. the thread is in the scope while it waits
    thread.join(30)  # 3. and compiles once the lock is free
    assert not thread.is_alive()


def test_compile_scope_that_raises_ends_the_compiled_call_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    compiled = torch.compile(lambda x: x * 3, backend="eager")

    def refuse(what: str) -> Any:
        raise GraphsafeWarning(what)

    with monkeypatch.context() as patched:
        patched.setattr(hooks, "compile_scope", refuse)
        with pytest.raises(GraphsafeWarning, match="<lambda>"):
            compiled(torch.ones(2))
    assert torch._C._is_multithreading_enabled()
    [result] = run_threads(1, lambda _: compiled(torch.ones(2)))  # the lock is free
    assert result.tolist() == [3, 3]
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def test_a_frame_that_dynamo_skips_enters_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    log: list[tuple[str, str]] = []
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy(log))
    install()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(lambda x: x + 5, backend="eager")
    with Mode():
        assert compiled(torch.ones(2)).tolist() == [6, 6]
    assert log == []


def test_a_lazy_backward_that_older_torch_compiles_in_a_closure_is_scoped_and_confined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    log: list[tuple[str, str]] = []
    confined: list[bool] = []
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy(log))
    # such a torch has no class for the compiler; both enter ``tracing`` first
    wrap = _compiles._wrap_tracing
    monkeypatch.setattr(_compiles, "_wrap_compiler", lambda patches, _, scope: wrap(patches, runtime_wrappers, scope))
    install()
    with _lazy_config():
        compiled = torch.compile(
            lambda x: x.exp(), backend=_aot_backend(lambda: confined.append(not torch._C._is_multithreading_enabled()))
        )
        assert torch.equal(_train(compiled), torch.ones(3).exp())
    assert confined == [True]
    assert [entry for entry in log if entry[1] == "a backward"] == [("enter", "a backward"), ("exit", "a backward")]


def test_a_lazy_backward_compiles_once_in_the_scope_and_confined_when_threads_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, str]] = []
    confined: list[bool] = []
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy(log))
    install()

    def on_backward() -> None:
        confined.append(not torch._C._is_multithreading_enabled())
        assert [kind for kind, what in log if what == "a backward"][-1] == "enter"

    with _lazy_config():
        compiled = torch.compile(lambda x: x.sin() * 2, backend=_aot_backend(on_backward))
        x = torch.ones(3, requires_grad=True)
        compiled(x)  # the forward is compiled, the backward is not
    assert confined == []
    gradients = run_threads(4, lambda _: _train(compiled))
    assert all(torch.equal(gradient, x.detach().cos() * 2) for gradient in gradients)
    assert confined
    assert all(confined)
    from torch._functorch._aot_autograd import runtime_wrappers

    if hasattr(runtime_wrappers, "_AutogradBackwardCompiler"):
        assert len(confined) == 1


def test_a_lazy_backward_inside_partly_compiled_code_compiles_none_of_graphsafe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(hooks, "compile_scope", _scope_spy(log))
    install()
    inner = torch.compile(lambda x: x.cos() * 2, backend=_aot_backend(lambda: None))

    @torch.compile(backend="eager")
    def step(loss: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        torch.manual_seed(1)
        loss.backward()

    with _lazy_config():
        step(inner(torch.ones(3, requires_grad=True)).sum())
    assert ("enter", "a backward") in log
    assert not [what for _, what in log if str(SOURCE) in what]


# B9 and B18: beside no capture


def test_synchronize_runs_on_a_seat_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int | None] = []
    monkeypatch.setattr(hooks, "seat_scope", lambda index: nullcontext(waits.append(index)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: (_ for _ in ()).throw(KeyError(device)))
    before = torch.cuda.synchronize
    install()
    assert torch.cuda.synchronize is before
    for device, index in [
        (None, 7),
        (2, 2),
        ("cuda:3", 3),
        ("cuda", 7),
        (torch.device("cuda", 1), 1),
        (object(), None),
    ]:
        with pytest.raises(KeyError):  # so torch's own code ran, with our argument
            torch.cuda.synchronize(device)
        assert waits.pop() == index


def test_synchronize_takes_no_seat_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int | None] = []
    monkeypatch.setattr(hooks, "seat_scope", lambda index: nullcontext(waits.append(index)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: (_ for _ in ()).throw(KeyError()))
    install()
    with pytest.raises(KeyError):
        torch.cuda.synchronize()
    assert waits == []
    assert synchronize.probe(torch.cuda)


@pytest.fixture
def scopes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What enters and leaves the scope of seats on every device."""
    log: list[str] = []

    @contextmanager
    def scope(index: int | None) -> Iterator[None]:
        assert index is None
        log.append("enter")
        yield
        log.append("leave")

    monkeypatch.setattr(hooks, "seat_scope", scope)
    return log


def test_seeding_runs_on_seats_and_seeds_as_before(scopes: list[str]) -> None:
    name_from_before, signature = torch.manual_seed, inspect.signature(torch.manual_seed)
    torch.manual_seed(5)
    expected = torch.rand(3)
    assert scopes == []
    install()
    for seed in (lambda: torch.manual_seed(5), lambda: name_from_before(seed=5), lambda: torch.random.manual_seed(5)):
        seed()
        assert torch.equal(torch.rand(3), expected)
        assert scopes[0] == "enter" and scopes[-1] == "leave"
        scopes.clear()
    for call in (
        torch.seed,
        torch.cuda.seed_all,
        torch.get_rng_state,
        lambda: torch.set_rng_state(torch.get_rng_state()),
    ):
        call()
        assert scopes[0] == "enter" and scopes[-1] == "leave"
        scopes.clear()
    assert torch.manual_seed is name_from_before
    assert inspect.signature(torch.manual_seed) == signature
    assert torch.manual_seed.__name__ == "manual_seed"
    with pytest.raises(TypeError):
        torch.manual_seed()  # type: ignore[call-arg]


def test_seeding_enters_no_scope_in_a_forked_child(scopes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    torch.manual_seed(5)
    assert scopes == []


# Installing


def _objects() -> list[object]:
    """Everything that the repairs may replace, as it is now."""
    import torch._dynamo.convert_frame as convert_frame
    import torch._dynamo.trace_rules as trace_rules
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.fx import _symbolic_trace

    compiler = getattr(runtime_wrappers, "_AutogradBackwardCompiler", None)
    functions = [
        *(getattr(torch.random, name) for name in ("manual_seed", "seed", "set_rng_state", "get_rng_state")),
        *(getattr(torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "synchronize")),
        torch.accelerator.synchronize,
        inspect.unwrap(_symbolic_trace.Tracer.trace),
    ]
    return [
        *functions,
        *(function.__code__ for function in functions),
        *(getattr(function, "__signature__", None) for function in functions),
        convert_frame.compile_lock,
        convert_frame.CatchErrorsWrapper.__call__,
        getattr(compiler, "get_or_compile", None),
        runtime_wrappers.tracing,
        type(_symbolic_trace),
        *sorted(vars(_symbolic_trace)),
        vars(_symbolic_trace).get("_is_fx_tracing_flag"),
        *trace_rules.SKIP_DIRS,
        trace_rules.SKIP_DIRS_RE.pattern,
        *sys.meta_path,
    ]


def test_uninstall_puts_back_every_object() -> None:
    before = _objects()
    install()
    assert len(before) != len(_objects()) or any(a is not b for a, b in zip(before, _objects(), strict=True))
    uninstall()
    after = _objects()
    assert len(after) == len(before)
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))
    assert not installed()
    uninstall()


def test_install_by_eight_threads_at_once_repairs_once() -> None:
    before = _objects()

    def body(_: int) -> dict[str, str]:
        install()
        return dict(installed())

    records = run_threads(8, body)
    assert all(record == records[0] for record in records)
    assert {fault for fault, status in records[0].items() if status == "failed"} == set()
    assert records[0]["A2"] == records[0]["B17"] == records[0]["B9"] == records[0]["B18"] == "repaired"
    uninstall()
    assert all(a is b or a == b for a, b in zip(before, _objects(), strict=True))


LATE_IMPORT = """
import time
import torch
from graphsafe.compile import install, installed, uninstall

finders = list(sys.meta_path)
install()
early, loaded = dict(installed()), [name for name in sys.modules if name.startswith("torch._dynamo")]
import torch._dynamo, torch._dynamo.convert_frame as convert_frame, torch._functorch._aot_autograd.runtime_wrappers
late, loader = dict(installed()), type(convert_frame.__loader__).__module__
same = convert_frame.__loader__ is convert_frame.__spec__.loader
f = torch.compile(lambda x: x + 1, backend="eager")
f(torch.ones(2))
uninstall()
times = []
for _ in range(3):
    start = time.perf_counter(); install(); times.append(time.perf_counter() - start); uninstall()
print(json.dumps([early, loaded, late, loader, same, sys.meta_path == finders, min(times)]))
"""


def test_install_imports_no_dynamo_and_repairs_it_on_its_first_import_in_time() -> None:
    early, loaded, late, loader, same, finders_back, install_s = run_program(LATE_IMPORT)
    assert loaded == []
    assert early["A2"] == early["B17"] == "pending"
    assert early["B9"] == early["B18"] == "repaired"
    assert late["A2"] == late["B17"] == "repaired"
    assert "failed" not in late.values()
    assert same
    assert "graphsafe" not in loader
    assert finders_back
    assert install_s < 0.05


def test_a_repair_that_does_not_fit_warns_with_its_fault_and_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        FAULT, MODULES, EVIDENCE = "Z1", ("torch.random",), Evidence("a fault that a test made up", (), "none")

        def probe(self, module: types.ModuleType) -> bool:
            return True

        def repair(self, module: types.ModuleType) -> None:
            raise AttributeError("nowhere to be found")

        def undo(self) -> None:
            pass

    monkeypatch.setattr(repairs, "REPAIRS", (Broken(), *repairs.REPAIRS))
    with pytest.warns(GraphsafeWarning, match=r"fault Z1.*nowhere to be found.*a fault that a test made up"):
        install()
    assert installed()["Z1"] == "failed"
    assert installed()["B18"] == "repaired"
    uninstall()


def test_undo_leaves_what_someone_else_has_replaced_since(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, patches = types.SimpleNamespace(name="torch's"), Patches()
    patches.attribute(owner, "name", "ours")
    owner.name = "theirs"
    with pytest.warns(GraphsafeWarning, match="replaced again"):
        patches.undo()
    assert owner.name == "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patches.undo()


def test_every_repair_has_the_four_parts_and_a_fault_of_its_own() -> None:
    assert len({repair.FAULT for repair in repairs.REPAIRS}) == len(repairs.REPAIRS) >= 6
    for repair in repairs.REPAIRS:
        assert repair.MODULES
        assert all(callable(part) for part in (repair.probe, repair.repair, repair.undo))
        assert repair.EVIDENCE.fault
        assert repair.EVIDENCE.versions
