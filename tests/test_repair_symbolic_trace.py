"""A7: what a symbolic trace patches, it patches for its own thread, and everything is put back."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace_module
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx

from graphsafe.compile import install, installed, uninstall
from graphsafe.repairs import _fx_places, fx_flag, symbolic_trace
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, join_threads, run_program, run_threads

MODULE_CALL, MODULE_GETATTR = torch.nn.Module.__call__, torch.nn.Module.__getattr__

needs_a7 = pytest.mark.skipif(not symbolic_trace.probe(symbolic_trace_module), reason="this torch lacks A7")
pytestmark = needs_a7


def leaf(x: Any) -> Any:
    """Registered with torch.fx.wrap: a trace records the call, and looks at nothing inside."""
    return x * 2 + 1


def scaled(x: Any) -> Any:
    """A leaf for the tracers that are told so, and for no others."""
    return x * 3


torch.fx.wrap("leaf")
torch.fx.wrap("len")  # no global of this module, so a trace adds one
LEAF, _SQRT = leaf, math.sqrt  # a trace wraps a public name of a function of math, whatever it is


class Net(torch.nn.Module):
    """Calls ``during()`` first, then two modules and ``torch.relu``."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.during = during

    def forward(self, x: Any) -> Any:
        self.during()
        return torch.relu(self.second(self.first(x) * self.scale))


NET_NODES = ["x", "first", "scale", "mul", "second", "relu", "output"]


def nodes(graph_module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in graph_module.graph.nodes]


def targets(graph_module: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def is_plain() -> bool:
    return torch.nn.Module.__call__ is MODULE_CALL and torch.nn.Module.__getattr__ is MODULE_GETATTR


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    """Each test starts repaired, and ends on torch's own objects."""
    was_installed = bool(installed())
    install()
    assert installed()["A7"] == "repaired"
    yield
    uninstall()
    assert is_plain()
    assert leaf is LEAF
    assert sqrt is math.sqrt is _SQRT
    assert "len" not in globals()
    if was_installed:
        install()


@contextmanager
def under_way(trace: Callable[[Callable[[], None]], Any]) -> Iterator[list[Any]]:
    """Have another thread run ``trace(during)`` and stand still in ``during()`` for the length of the block.

    Yields:
        a list that has the trace's result after the block.
    """
    tracing, go_on = threading.Event(), threading.Event()
    results: list[Any] = []
    errors: list[BaseException] = []

    def during() -> None:
        tracing.set()  # 1. the other thread traces
        assert go_on.wait(DEADLINE_S)  # 3. and goes on after the block

    def body() -> None:
        try:
            results.append(trace(during))
        except BaseException as error:
            errors.append(error)
            tracing.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert tracing.wait(DEADLINE_S)
    try:
        yield results  # 2. meanwhile the block runs
    finally:
        go_on.set()
        join_threads([thread])
    assert not errors, errors


def trace_net(during: Callable[[], None]) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(Net(during))


# The fault, on plain torch

MODULE_CALLS_BESIDE_A_TRACE = """
import torch, torch._dynamo
from graphsafe import repairs

def beside():
    tracing, called, errors = threading.Event(), threading.Event(), []
    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
        def forward(self, x):
            tracing.set()               # 1. this thread traces
            assert called.wait(30)      # 3. and goes on
            return self.inner(x)
    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(Traced(),))
    tracer.start()
    assert tracing.wait(30)
    try:
        torch.nn.Linear(2, 2)(torch.ones(2))    # 2. meanwhile this one, which traces nothing, calls a module
    except NameError as error:
        errors.append(str(error))
    called.set()
    tracer.join(30)
    return errors

plain = beside()
repairs.apply()
print(json.dumps([plain, beside(), repairs.statuses()["A7"]]))
"""


def test_a_module_call_works_while_another_thread_traces_and_fails_on_plain_torch() -> None:
    plain, repaired_, status = run_program(MODULE_CALLS_BESIDE_A_TRACE)
    assert repaired_ == []
    assert [bool(plain), status] in ([True, "repaired"], [False, "absent"])
    assert all("not installed as a submodule" in error for error in plain)
    if SHOWS_FAULTS:
        assert plain, "the pinned torch no longer shows the fault: the test is no proof any more"


OVERLAPPING_TRACES = """
import torch
from graphsafe import repairs

original = torch.nn.Module.__call__

def overlap():
    events = [threading.Event() for _ in range(3)]
    graphs = [None, None]
    class Traced(torch.nn.Module):
        def __init__(self, during):
            super().__init__()
            self.inner, self.during = torch.nn.Linear(2, 2), during
        def forward(self, x):
            self.during()
            return self.inner(x)
    def first():
        events[0].set()                 # 1. the first trace has begun
        assert events[1].wait(30)
    def second():
        events[1].set()                 # 2. the second one has too; 3. the first ends
        assert events[2].wait(30)       # 4. and then the second
    def body(index, during):
        try:
            graphs[index] = [node.op for node in torch.fx.symbolic_trace(Traced(during)).graph.nodes]
        except Exception as error:
            graphs[index] = [type(error).__name__]
    threads = [threading.Thread(target=body, args=pair) for pair in enumerate((first, second))]
    threads[0].start()
    assert events[0].wait(30)
    threads[1].start()
    threads[0].join(30)
    events[2].set()
    threads[1].join(30)
    is_original = torch.nn.Module.__call__ is original
    torch.nn.Module.__call__ = original
    return [graphs, is_original]

plain = overlap()
repairs.apply()
print(json.dumps([plain, overlap()]))
"""


def test_two_overlapping_traces_are_right_and_leave_no_patch_and_plain_torch_does_neither() -> None:
    plain, repaired_ = run_program(OVERLAPPING_TRACES)
    right = [[["placeholder", "call_module", "output"]] * 2, True]
    assert repaired_ == right
    if SHOWS_FAULTS:
        assert plain[1] is False, "the pinned torch no longer shows the fault: the test is no proof any more"


# A thread that traces nothing


def test_an_untraced_thread_calls_and_reads_modules_as_ever_beside_a_trace() -> None:
    net, x = Net(), torch.randn(2, 3)
    expected, graph_module = net(x), torch.fx.symbolic_trace(Net())
    with under_way(trace_net) as traced:
        assert torch.equal(net(x), expected)
        assert torch.equal(torch.nn.Module.__call__(net, x), expected)
        assert isinstance(net.scale, torch.nn.Parameter)
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
            _ = net.missing
        assert graph_module(x).shape == (2, 3)
        assert inspect.signature(torch.nn.Module.__call__) == inspect.signature(MODULE_CALL)
    assert nodes(traced[0]) == NET_NODES
    assert is_plain()


def test_a_name_read_beside_a_trace_goes_on_working_after_it() -> None:
    net, x = Net(), torch.randn(2, 3)
    with under_way(trace_net):
        read = torch.nn.Module.__call__
    assert read is MODULE_CALL
    assert torch.equal(read(net, x), net(x))
    assert is_plain()


def test_no_place_is_touched_while_nobody_traces() -> None:
    for _ in range(2):
        assert is_plain()
        assert nodes(torch.fx.symbolic_trace(Net())) == NET_NODES
    assert is_plain()
    assert _fx_places.places == {}


def test_a_wrapped_function_is_itself_in_an_untraced_thread_beside_a_trace() -> None:
    x = torch.randn(3)

    def traced(x: Any) -> Any:
        return leaf(x) + len(x)

    with under_way(lambda during: torch.fx.symbolic_trace(lambda x: (during(), traced(x))[1])) as results:
        assert torch.equal(leaf(x), x * 2 + 1)
        assert len(x) == len([1, 2, 3])
        assert LEAF(4) == 9
    assert targets(results[0])[0] is LEAF
    assert nodes(results[0]) == ["x", "leaf", "len_1", "add", "output"]


def test_make_fx_sees_no_module_call_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    call_module = PythonKeyTracer.call_module

    def spy(self: Any, *args: Any) -> Any:
        threads.append(threading.get_ident())
        return call_module(self, *args)

    monkeypatch.setattr(PythonKeyTracer, "call_module", spy)
    own, others, x = Net(), Net(), torch.randn(2, 3)

    def traced(x: Any) -> Any:
        run_threads(1, lambda _: others(torch.ones(2, 3)))
        return own(x)

    assert make_fx(traced)(x).code.count("relu") == make_fx(own)(x).code.count("relu") > 0
    assert set(threads) == {threading.get_ident()}


# Traces at once


def test_a_leaf_stays_a_leaf_when_another_threads_trace_ends_first() -> None:
    def trace(during: Callable[[], None]) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(lambda x: (leaf(x), during(), leaf(x), len(x), sqrt(x))[1:])

    began, ended = threading.Event(), threading.Event()

    def second() -> torch.fx.GraphModule:
        def during() -> None:
            began.set()  # 2. the second trace has begun on top of the first one's patches
            assert ended.wait(DEADLINE_S)  # 4. and goes on without them

        return trace(during)

    results: list[torch.fx.GraphModule] = []
    thread = threading.Thread(target=lambda: results.append(second()), daemon=True)
    with under_way(trace) as first:  # 1. the first one has begun
        thread.start()
        assert began.wait(DEADLINE_S)
    ended.set()  # 3. the first one has ended
    join_threads([thread])
    for graph_module in (first[0], results[0]):
        assert targets(graph_module) == [LEAF, LEAF, len, _SQRT]


def test_a_function_is_a_leaf_for_the_tracer_that_was_told_so_and_for_no_other_at_once() -> None:
    def graph(tracer: torch.fx.Tracer, during: Callable[[], None]) -> list[str]:
        return [node.name for node in tracer.trace(lambda x: (during(), scaled(x))[1]).nodes]

    with under_way(lambda during: graph(torch.fx.Tracer(autowrap_functions=(scaled,)), during)) as first:
        assert graph(torch.fx.Tracer(), lambda: None) == ["x", "mul", "output"]
        assert graph(torch.fx.Tracer(autowrap_functions=(scaled,)), lambda: None) == ["x", "scaled", "output"]
    assert first == [["x", "scaled", "output"]]


def test_eight_threads_that_trace_step_by_step_together_get_the_graphs_of_a_lone_trace() -> None:
    barrier = threading.Barrier(8)
    order = [threading.Event() for _ in range(9)]
    order[0].set()

    def body(index: int) -> list[str]:
        steps = iter(range(2))

        def during() -> None:
            barrier.wait(DEADLINE_S)  # 1. all of them have patched
            if next(steps) == 1:
                assert order[(index * 3) % 8].wait(DEADLINE_S)  # 2. they end one after the other, not as they began

        class Outer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Net(during)

            def forward(self, x: Any) -> Any:
                during()
                return self.inner(leaf(x)) * sqrt(x)

        try:
            return [str(node.target) for node in Tracer().trace(Outer()).nodes if node.op != "output"]
        finally:
            order[(index * 3) % 8 + 1].set()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return not isinstance(m, Net)

    graphs = run_threads(8, body)
    assert all(graph == graphs[0] for graph in graphs)
    assert [name for name in graphs[0] if "inner" in name] == ["inner.first", "inner.scale", "inner.second"]
    assert [name for name in graphs[0] if "leaf" in name or "sqrt" in name] == [str(LEAF), str(_SQRT)]
    assert is_plain()


def test_many_traces_of_eight_threads_are_right_and_leave_nothing_behind() -> None:
    def body(index: int) -> None:
        for _ in range(20):
            if index % 2:
                assert nodes(torch.fx.symbolic_trace(Net())) == NET_NODES
                assert targets(torch.fx.symbolic_trace(lambda x: leaf(x) + sqrt(x)))[:2] == [LEAF, _SQRT]
            else:
                x = torch.ones(3)
                assert torch.equal(leaf(x), torch.full((3,), 3.0))
                assert Net()(x).shape == (3,)

    run_threads(8, body)
    assert _fx_places.places == {}
    assert is_plain()


# Within one thread


def test_a_trace_inside_a_trace_leaves_the_outer_ones_patches_on() -> None:
    inner: list[torch.fx.GraphModule] = []
    outer = torch.fx.symbolic_trace(Net(lambda: inner.append(torch.fx.symbolic_trace(Net()))))
    assert nodes(outer) == nodes(inner[0]) == NET_NODES
    assert is_plain()


def test_a_trace_that_fails_puts_everything_back_and_disturbs_no_other_thread() -> None:
    def fail() -> None:
        raise ValueError("in the trace")

    with pytest.raises(ValueError, match="in the trace"):
        torch.fx.symbolic_trace(Net(fail))
    assert is_plain()
    assert _fx_places.places == {}
    with under_way(trace_net) as traced, pytest.raises(ValueError, match="in the trace"):
        torch.fx.symbolic_trace(Net(fail))
    assert nodes(traced[0]) == NET_NODES
    assert is_plain()


def test_a_tracer_that_uses_a_patcher_by_itself_patches_its_own_thread() -> None:
    class Other:
        def name(self) -> str:
            return "original"

    seen: list[str] = []
    with symbolic_trace_module._Patcher() as patcher:
        patcher.patch_method(Other, "name", lambda self: "patched")
        seen.append(Other().name())
        run_threads(1, lambda _: seen.append(Other().name()))
    assert seen == ["patched", "original"]
    assert Other().name() == "original"


def test_what_somebody_saved_beside_a_trace_and_puts_back_after_it_is_gone_after_the_next_trace() -> None:
    with under_way(trace_net):
        saved = torch.nn.Module.__call__
    torch.nn.Module.__call__ = saved  # type: ignore[method-assign]
    net, x = Net(), torch.randn(2, 3)
    assert net(x).shape == (2, 3)
    assert nodes(torch.fx.symbolic_trace(Net())) == NET_NODES
    assert is_plain()


def test_what_somebody_patches_during_a_trace_stays() -> None:
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return MODULE_CALL(self, *args, **kwargs)

    with under_way(trace_net):
        torch.nn.Module.__call__ = theirs  # type: ignore[method-assign]
    assert torch.nn.Module.__call__ is theirs
    torch.nn.Module.__call__ = MODULE_CALL  # type: ignore[method-assign]


# Dynamo


def counting(calls: list[int]) -> Callable[[Any, Any], Any]:
    def backend(graph_module: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph_module.forward

    return backend


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("first_compile", ["before", "beside"])
def test_a_compiled_module_neither_breaks_nor_recompiles_beside_a_trace(hooked: bool, first_compile: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    calls: list[int] = []
    net, x = Net(), torch.randn(2, 3)
    if hooked:
        net.first.register_forward_hook(lambda module, args, output: output + 1)

    def use_leaf(x: torch.Tensor) -> torch.Tensor:
        return net(x) * leaf(2) + sqrt(4) + len([1])

    own = torch.compile(net, backend=counting(calls), fullgraph=True)
    inside = torch.compile(use_leaf, backend=counting(calls), fullgraph=True)

    def call() -> None:
        assert torch.allclose(own(x), net(x))
        assert torch.allclose(inside(x), net(x) * 5 + 3)

    if first_compile == "before":
        call()
        with under_way(trace_net) as traced:
            assert torch.allclose(own(x), net(x))
            assert len(calls) == 2
    else:
        with under_way(trace_net) as traced:
            call()
    assert nodes(traced[0]) == NET_NODES, "the compile took out another thread's patches"
    compiled = len(calls)
    assert torch.allclose(own(x), net(x))
    assert len(calls) == compiled
    call()
    assert is_plain()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_compiles_once_with_the_repair_put_in_before_or_after_and_traces_between(backend: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    calls: list[int] = []

    def counted(graph_module: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return torch._dynamo.lookup_backend(backend)(graph_module, inputs)

    net, x = Net(), torch.randn(2, 3)
    expected = net(x)
    for first, then in ((uninstall, install), (install, uninstall)):
        first()
        torch._dynamo.reset()
        own = Net()
        own.load_state_dict(net.state_dict())
        compiled = torch.compile(own, backend=counted, fullgraph=True)
        calls.clear()
        for change in (first, then, first):
            change()
            assert torch.allclose(compiled(x), expected)
            assert nodes(torch.fx.symbolic_trace(Net())) == NET_NODES
            assert torch.allclose(compiled(x), expected)
        assert len(calls) == 1
    traced = torch.fx.symbolic_trace(net)
    assert torch.allclose(torch.compile(traced, backend=backend, fullgraph=True)(x), expected)


class Bare(torch.nn.Module):
    """Calls a module, then ``between()`` while Dynamo looks at it, then has Dynamo look a second time."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.scale
        x = x + self.between()
        torch._dynamo.graph_break()
        return self.inner(x) * 2


class Hooked(Bare):
    """Dynamo goes through the whole of Module.__call__ for a module that has a hook."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__(between)
        self.inner.register_forward_hook(lambda module, args, output: output + 1)


class Delegating(Bare):
    """Dynamo goes through Module.__getattr__ for a module that has its own."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("scale" if name == "factor" else name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factor)


class Leaves(Bare):
    """Calls by name what a trace wraps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(leaf(x) * sqrt(4) + math.sqrt(9) + len([1]))


class Explicit(Bare):
    """Calls Module.__call__ by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.Module.__call__(self.inner, x))


@pytest.mark.parametrize("change", ["begins", "ends"])
@pytest.mark.parametrize("kind", [Bare, Hooked, Delegating, Leaves, Explicit])
def test_a_compile_that_looks_twice_is_right_when_a_trace_begins_or_ends_between(kind: Any, change: str) -> None:
    torch._dynamo.reset()
    tracing, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    looks: list[None] = []

    def during() -> None:
        tracing.set()
        assert may_end.wait(DEADLINE_S)

    def trace() -> None:
        assert torch.fx.symbolic_trace(Net(during)) is not None
        ended.set()

    thread = threading.Thread(target=trace, daemon=True)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def between() -> int:
        looks.append(None)  # 2. Dynamo looks at the function for the first time
        if len(looks) == 1 and change == "begins":
            thread.start()
            assert tracing.wait(DEADLINE_S)
        elif len(looks) == 1:
            may_end.set()
            assert ended.wait(DEADLINE_S)
        return 1  # 3. and goes on after the trace has begun, or ended; then it looks a second time

    calls: list[int] = []
    model, x = kind(between), torch.randn(2, 3)
    compiled = torch.compile(model, backend=counting(calls))
    if change == "ends":
        thread.start()
        assert tracing.wait(DEADLINE_S)  # 1. where it ends between, it has begun before
    try:
        found = compiled(x)
        assert len(looks) > 1, "Dynamo looked once: the test shows nothing"
        assert torch.allclose(found, model(x))
    finally:
        may_end.set()
        join_threads([thread])
    num_compiled = len(calls)
    assert torch.allclose(compiled(x), model(x))
    if kind is not Leaves:
        assert len(calls) == num_compiled


@pytest.mark.parametrize("kind", [Bare, Hooked, Delegating, Explicit])
def test_a_module_compiled_without_a_trace_is_not_compiled_again_beside_one(kind: Any) -> None:
    torch._dynamo.reset()
    calls: list[int] = []
    model, x = kind(lambda: 1), torch.randn(2, 3)
    compiled = torch.compile(model, backend=counting(calls))
    expected = compiled(x)
    num_compiled = len(calls)
    with under_way(trace_net):
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)
    assert len(calls) == num_compiled


def test_the_functions_of_a_module_stay_the_same_objects_beside_a_trace() -> None:
    bodies = MODULE_CALL.__code__, MODULE_GETATTR.__code__
    with under_way(trace_net):
        assert is_plain()
        assert inspect.signature(MODULE_CALL) == inspect.signature(torch.nn.Module._call_impl)
    assert bodies == (MODULE_CALL.__code__, MODULE_GETATTR.__code__)
    assert not hasattr(MODULE_CALL, "__signature__")


def test_a_patch_of_ones_own_that_calls_the_function_it_saved_counts_in_its_thread() -> None:
    seen: list[type] = []
    net, x = Net(), torch.randn(2, 3)
    expected = net(x)

    def patched(self: torch.nn.Module, *args: Any) -> Any:
        seen.append(type(self))
        return MODULE_CALL(self, *args)

    with under_way(trace_net) as traced, symbolic_trace_module._Patcher() as patcher:
        patcher.patch_method(torch.nn.Module, "__call__", patched)
        assert torch.equal(net(x), expected)
        run_threads(1, lambda _: net(x))
    assert seen == [Net, torch.nn.Linear, torch.nn.Linear]
    assert nodes(traced[0]) == NET_NODES
    assert is_plain()


def test_a_compile_inside_a_trace_sees_no_patch_and_the_trace_goes_on() -> None:
    calls: list[int] = []
    results: list[torch.Tensor] = []
    net, x = Net(), torch.randn(2, 3)
    frame = torch._dynamo.optimize(counting(calls), nopython=True)(lambda x: net(x) + 1)  # type: ignore[attr-defined]

    def during() -> None:
        flag = symbolic_trace_module._is_fx_tracing_flag if hasattr(symbolic_trace_module, "_is_fx_tracing_flag") else 0
        if flag:
            symbolic_trace_module._is_fx_tracing_flag = False  # as torch._higher_order_ops does around its compiles
        try:
            results.append(frame(x))
        finally:
            if flag:
                symbolic_trace_module._is_fx_tracing_flag = flag

    if not hasattr(symbolic_trace_module, "_is_fx_tracing_flag"):
        pytest.skip("this torch's flag cannot be cleared from outside")
    traced = torch.fx.symbolic_trace(Net(during))
    assert torch.allclose(results[0], net(x) + 1)
    assert calls
    assert nodes(traced) == NET_NODES


# Putting in and taking out


def _objects() -> dict[str, Any]:
    module = symbolic_trace_module
    found = {f"module {name}": value for name, value in vars(module).items() if name != "__builtins__"}
    found |= {f"patcher {name}": value for name, value in vars(module._Patcher).items()}
    functions = [value for value in found.values() if inspect.isfunction(value)]
    found |= {f"code {function.__qualname__}": function.__code__ for function in functions}
    trace = inspect.unwrap(module.Tracer.trace)
    return found | {"trace": trace, "code of trace": trace.__code__, "class": type(module)}


def test_undo_puts_back_every_object() -> None:
    uninstall()
    before = _objects()
    install()
    assert {name for name, value in _objects().items() if before.get(name) is not value} >= {
        "patcher patch",
        "patcher patch_method",
    }
    uninstall()
    after = _objects()
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] is not after[name]} <= {"module _is_fx_tracing_flag"}


@pytest.mark.parametrize("repairs_in_order", [(fx_flag, symbolic_trace), (symbolic_trace, fx_flag)])
@pytest.mark.parametrize("newest_first", [True, False])
def test_the_repairs_of_a_trace_go_in_and_out_in_either_order(repairs_in_order: Any, newest_first: bool) -> None:
    uninstall()
    before = _objects()
    needed = [repair for repair in repairs_in_order if repair.probe(symbolic_trace_module)]
    for repair in needed:
        repair.repair(symbolic_trace_module)
    with under_way(trace_net) as traced:
        assert Net()(torch.ones(3)).shape == (3,)
    assert nodes(traced[0]) == NET_NODES
    for repair in reversed(needed) if newest_first else needed:
        repair.undo()
    after = _objects()
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before if name != "module _is_fx_tracing_flag")


def test_uninstall_while_a_trace_is_under_way_harms_neither_it_nor_other_threads() -> None:
    net, x = Net(), torch.randn(2, 3)
    expected = net(x)
    with under_way(trace_net) as traced:
        uninstall()
        assert torch.equal(net(x), expected)
    assert nodes(traced[0]) == NET_NODES
    assert is_plain()


def test_install_while_a_trace_is_under_way_lets_it_end_as_it_began() -> None:
    uninstall()
    with under_way(trace_net) as traced:
        install()
    assert nodes(traced[0]) == NET_NODES
    assert is_plain()
    with under_way(trace_net) as traced:
        assert Net()(torch.ones(3)).shape == (3,)
    assert nodes(traced[0]) == NET_NODES
