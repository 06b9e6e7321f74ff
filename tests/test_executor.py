"""Executor: a pool whose threads own contexts, from concurrent.futures' side and from asyncio's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import gc
import importlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import graphsafe as gs
from graphsafe.repairs import private

from .helpers import join_threads

DEADLINE_S = 30.0
module = importlib.import_module("graphsafe.executor")
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def pool() -> Iterator[gs.Executor]:
    with gs.Executor(1, "cpu", seed=3) as executor:
        yield executor


def together(executor: gs.Executor, n: int, fn: Callable[[], Any]) -> list[Any]:
    """What ``fn()`` returns in ``n`` calls that wait for each other, so that each has a thread of its own."""
    barrier = threading.Barrier(n)

    def call() -> Any:
        barrier.wait(DEADLINE_S)
        return fn()

    return [future.result(DEADLINE_S) for future in [executor.submit(call) for _ in range(n)]]


def of_this_thread() -> tuple[str, str, int | None]:
    context = gs.current_context()
    return context.name, threading.current_thread().name, context.seed


def seats() -> int:
    return sum(len(gate._holders) for gate in gs.gate.all_gates())


def test_executor_is_the_standard_librarys(pool: gs.Executor) -> None:
    assert isinstance(pool, concurrent.futures.ThreadPoolExecutor)
    assert pool.submit(divmod, 7, 2).result(DEADLINE_S) == (3, 1)
    assert list(pool.map(pow, [2, 3], [3, 2], timeout=DEADLINE_S)) == [8, 9]
    futures = [pool.submit(abs, -i) for i in range(4)]
    assert sorted(f.result() for f in concurrent.futures.as_completed(futures, DEADLINE_S)) == [0, 1, 2, 3]
    called = threading.Event()
    pool.submit(int).add_done_callback(lambda future: called.set() if future.result() == 0 else None)
    assert called.wait(DEADLINE_S)
    assert pool.submit(dict, fn=1, self=2).result(DEADLINE_S) == {"fn": 1, "self": 2}


@pytest.mark.parametrize("max_workers", [0, -1, 1.5, None, True, "2"])
def test_executor_rejects_a_number_of_threads_that_is_none(max_workers: Any) -> None:
    with pytest.raises(ValueError, match="max_workers"):
        gs.Executor(max_workers, "cpu")


def test_executor_rejects_a_device_or_seed_that_is_none_at_once() -> None:
    with pytest.raises(gs.GraphsafeError, match="cuda:99"):
        gs.Executor(1, "cuda:99")
    with pytest.raises(gs.GraphsafeError, match="seed"):
        gs.Executor(1, "cpu", seed="one")  # type: ignore[arg-type]


def test_executor_takes_the_device_of_the_callers_context() -> None:
    with gs.thread_context("cpu"), gs.Executor(1) as executor:
        assert executor.device == torch.device("cpu")


def test_executor_threads_have_a_context_each_for_their_life_and_it_ends_with_them() -> None:
    executor = gs.Executor(3, "cpu", seed=1)
    closed: list[tuple[str, int]] = []

    class Resource:
        def close(self) -> None:
            closed.append((threading.current_thread().name, threading.get_ident()))

    def first() -> tuple[int, int, Resource]:
        resource = Resource()
        gs.current_context().register(resource)
        return id(gs.current_context()), threading.get_ident(), resource

    found = together(executor, 3, first)
    assert len({context for context, _, _ in found}) == 3
    again = together(executor, 3, lambda: id(gs.current_context()))
    assert set(again) == {context for context, _, _ in found}
    rows = [row for row in gs.stats().contexts if row.alive and row.name.startswith("executor-cpu_")]
    assert {row.name for row in rows} == {f"executor-cpu_{i}" for i in range(3)}
    assert not closed
    executor.shutdown()
    assert sorted(ident for _, ident in closed) == sorted(ident for _, ident, _ in found)
    assert {name for name, _ in closed} == {f"executor-cpu_{i}" for i in range(3)}
    assert not any(row.alive and row.name.startswith("executor-cpu_") for row in gs.stats().contexts)


def test_executor_threads_keep_their_graphs_between_requests_and_lose_them_at_the_end() -> None:
    local = threading.local()
    graphs: list[gs.Graph] = []

    def request(value: float) -> tuple[float, int]:
        if not hasattr(local, "graph"):
            local.x = torch.zeros(3)
            with gs.capture() as local.graph:
                local.y = local.x * 2 + 1
            graphs.append(local.graph)
        local.x.fill_(value)
        local.graph.replay()
        return local.y[0].item(), id(local.graph)

    with gs.Executor(2, "cpu", seed=0) as executor:
        values = [together(executor, 2, functools.partial(request, float(i))) for i in range(4)]
        alive = {row.name: (row.captures, row.replays) for row in gs.stats().contexts if row.alive}
        assert [alive[f"executor-cpu_{i}"] for i in range(2)] == [(1, 4)] * 2
    assert [[value for value, _ in pair] for pair in values] == [[2.0 * i + 1] * 2 for i in range(4)]
    assert len({graph for pair in values for _, graph in pair}) == len(graphs) == 2
    for graph in graphs:
        with pytest.raises(gs.GraphsafeError):
            graph.replay()


def test_executor_thread_trains_over_several_requests_as_one_thread_does() -> None:
    def make() -> tuple[torch.nn.Module, gs.TrainStep]:
        model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, gs.TrainStep(lambda x: torch.nn.functional.dropout(model(x)).square().mean(), optimizer)

    x = torch.ones(2, 4)
    with gs.thread_context("cpu", seed=11) as context:
        seed = context.seed
        _, step = make()
        expected = [step(x).item() for _ in range(6)]
    with gs.Executor(1, "cpu", seed=0) as executor:
        executor.submit(lambda: gs.current_context().reseed(seed)).result(DEADLINE_S)
        _, pooled = executor.submit(make).result(DEADLINE_S)
        found = [executor.submit(pooled, x).result(DEADLINE_S).item() for _ in range(6)]
        replays = next(r.replays for r in gs.stats().contexts if r.alive and r.name == "executor-cpu_0")
    assert found == expected and replays == 2


def test_executor_seeds_are_distinct_and_the_same_in_each_run() -> None:
    def run(seed: int | None) -> dict[str, int | None]:
        with gs.Executor(4, "cpu", seed=seed) as executor:
            return {name: seed for name, _, seed in together(executor, 4, of_this_thread)}

    first = run(7)
    assert len(set(first.values())) == 4 and run(7) == first and run(8) != first
    torch.manual_seed(3)
    drawn = run(None)
    torch.manual_seed(3)
    assert run(None) == drawn and drawn != first


def test_executor_call_sees_the_submitters_context_variables_and_keeps_its_own(pool: gs.Executor) -> None:
    def call() -> str:
        seen = variable.get()
        variable.set("the call's")
        return seen

    token = variable.set("the submitter's")
    try:
        assert pool.submit(call).result(DEADLINE_S) == "the submitter's"
        assert variable.get() == "the submitter's"
    finally:
        variable.reset(token)
    assert pool.submit(variable.get).result(DEADLINE_S) == "unset"


def test_executor_call_sees_the_submitters_torch_settings_in_forward_and_backward(pool: gs.Executor) -> None:
    import torch._dynamo.config as config

    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(config.recompile_limit)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(config.recompile_limit)
            return gradient

    with config.patch(recompile_limit=77):
        pool.submit(lambda: Look.apply(torch.ones(2, requires_grad=True)).sum().backward()).result(DEADLINE_S)
    assert seen == [77, 77]


def test_executor_call_starts_in_one_known_state_whatever_the_last_one_left(pool: gs.Executor) -> None:
    def state() -> tuple[Any, ...]:
        found = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device.type)
        return (*found, private.multithreading_enabled(), gs.current_context().device.type)

    def leave_a_mess() -> tuple[Any, ...]:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_default_device("meta")
        torch.autograd.set_multithreading_enabled(True)
        found = state()
        gs.current_context().close()
        return found

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        assert pool.submit(state).result(DEADLINE_S) == (True, False, "cpu", False, "cpu")
    seed = pool.submit(lambda: gs.current_context().seed).result(DEADLINE_S)
    assert pool.submit(leave_a_mess).result(DEADLINE_S) == (False, True, "meta", True, "cpu")
    assert pool.submit(state).result(DEADLINE_S) == (True, False, "cpu", False, "cpu")
    assert pool.submit(lambda: gs.current_context().seed).result(DEADLINE_S) == seed


def test_executor_call_has_the_pools_context_current_though_the_last_one_attached_another(
    pool: gs.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attaching = importlib.import_module("graphsafe.attach")
    for where in (attaching, gs.context):
        monkeypatch.setattr(where, "resolve_device", lambda device: torch.device(device))
    assert pool.submit(lambda: gs.attach("cpu:1").device).result(DEADLINE_S) == torch.device("cpu:1")
    assert pool.submit(lambda: gs.current_context().device).result(DEADLINE_S) == torch.device("cpu")
    assert pool.submit(lambda: len(gs.context.active_contexts())).result(DEADLINE_S) == 2


def test_executor_call_hands_its_exception_back_with_one_traceback(pool: gs.Executor) -> None:
    def broken() -> None:
        raise KeyError("lost")

    future = pool.submit(broken)
    lengths = set()
    for _ in range(3):
        with pytest.raises(KeyError, match="lost") as caught:
            future.result(DEADLINE_S)
        assert any(entry.name == "broken" for entry in caught.traceback)
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1
    assert isinstance(future.exception(), KeyError)
    with pytest.raises(TimeoutError, match="the call's own"):
        pool.submit(functools.partial(_raise, TimeoutError("the call's own"))).result(DEADLINE_S)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(functools.partial(_raise, KeyboardInterrupt())).result(DEADLINE_S)
    assert pool.submit(int).result(DEADLINE_S) == 0


def _raise(error: BaseException) -> None:
    raise error


def test_executor_failed_call_leaves_no_cycle_that_keeps_its_arguments(pool: gs.Executor) -> None:
    class Big:
        pass

    def fails(big: Big) -> None:
        raise KeyError

    big = Big()
    alive = weakref.ref(big)
    gc.disable()
    try:
        future = pool.submit(fails, big)
        del big
        with contextlib.suppress(KeyError):
            future.result(DEADLINE_S)
        del future
        pool.submit(int).result(DEADLINE_S)  # the thread has let go of the call before
        assert alive() is None
    finally:
        gc.enable()


def test_executor_call_that_fails_in_a_seat_or_capture_leaves_the_thread_well(pool: gs.Executor) -> None:
    def fails_in_a_seat() -> None:
        with gs.current_context().eager():
            torch.rand(2)
            raise KeyError

    def fails_in_a_capture() -> None:
        with gs.capture():
            torch.rand(2).sum().item()

    def fails_and_leaves_a_seat() -> None:
        gs.current_context().eager().__enter__()
        raise KeyError

    def works() -> float:
        with gs.current_context().eager():
            torch.rand(1)
        with gs.capture() as graph:
            y = torch.ones(2) + 1
        graph.replay()
        return y.sum().item()

    for fails, error in (
        (fails_in_a_seat, KeyError),
        (fails_in_a_capture, gs.CaptureError),
        (fails_and_leaves_a_seat, KeyError),
    ):
        with pytest.raises(error):
            pool.submit(fails).result(DEADLINE_S)
        assert seats() == 0
        assert pool.submit(works).result(DEADLINE_S) == 4


def test_executor_call_that_returns_with_a_seat_is_reported_and_the_seat_given_back(
    pool: gs.Executor, caplog: pytest.LogCaptureFixture
) -> None:
    def forgets() -> int:
        gs.current_context().eager().__enter__()
        return 5

    assert pool.submit(forgets).result(DEADLINE_S) == 5
    assert seats() == 0 and "forgets" in caplog.text and "seat held" in caplog.text


def test_executor_call_that_returns_with_a_capture_open_fails_and_harms_no_later_call(pool: gs.Executor) -> None:
    kept: list[Any] = []
    for begin in (gs.capture, lambda: gs.context.current_context().gate.capture()):

        def forgets(begin: Callable[[], Any] = begin) -> int:
            kept.append(begin())
            kept[-1].__enter__()
            return 5

        with pytest.raises(gs.GraphsafeError, match=r"forgets.* returned with a capture open"):
            pool.submit(forgets).result(DEADLINE_S)
        assert seats() == 0
        assert pool.submit(lambda: float((torch.ones(2) + 1).sum())).result(DEADLINE_S) == 4
        with gs.thread_context("cpu"), gs.current_context().eager():
            torch.rand(1)

    def captures() -> float:
        with gs.capture() as graph:
            y = torch.ones(2) + 1
        graph.replay()
        return y.sum().item()

    assert pool.submit(captures).result(DEADLINE_S) == 4


def test_executor_call_that_fails_with_a_capture_open_ends_in_its_own_error(pool: gs.Executor) -> None:
    def fails() -> None:
        gs.capture().__enter__()
        raise KeyError

    with pytest.raises(KeyError):
        pool.submit(fails).result(DEADLINE_S)
    assert seats() == 0
    assert pool.submit(lambda: torch.ones(2).sum().item()).result(DEADLINE_S) == 2


class Doubled(torch.overrides.TorchFunctionMode):
    """Doubles what every function returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 2


class Halved(private.DispatchMode):
    """Has operators do something else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ZeroDivisionError


def suspended(block: Any) -> Iterator[None]:
    with block:
        yield


@pytest.mark.parametrize(
    "block",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
        Doubled,
        Halved,
    ],
)
def test_executor_call_sees_no_mode_that_the_one_before_never_left(
    pool: gs.Executor, caplog: pytest.LogCaptureFixture, block: Callable[[], Any]
) -> None:
    kept: list[Any] = []

    def leaves_open() -> None:
        kept.extend([suspended(block()), suspended(block())])
        for one in kept:
            next(one)

    def trains() -> tuple[Any, ...]:
        model = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        loss = (model(torch.ones(1, 2)) ** 2).sum()
        loss.backward()
        assert model.weight.grad is not None
        with torch.autocast("cpu"):
            first = model(torch.ones(1, 2))
            with torch.no_grad():
                model.weight.fill_(2.0)
        with torch.autocast("cpu"):  # the end of the block before has let go of the weight as it was
            second = model(torch.ones(1, 2))
        found = (first.dtype, first.tolist(), second.tolist(), model.weight.grad.tolist())
        return (*found, torch.is_inference_mode_enabled(), torch.empty(1).device.type)

    expected = pool.submit(trains).result(DEADLINE_S)
    pool.submit(leaves_open).result(DEADLINE_S)
    assert pool.submit(trains).result(DEADLINE_S) == expected
    silent = block in (torch.no_grad,) or isinstance(block(), torch.autocast)
    assert ("leaves_open" in caplog.text) == (not silent)
    pool.submit(kept.clear).result(DEADLINE_S)
    assert pool.submit(trains).result(DEADLINE_S) == expected


def test_executor_result_gives_the_callers_seat_back_while_it_waits(pool: gs.Executor) -> None:
    def needs_the_seat() -> float:
        with gs.current_context().eager():
            return torch.rand(()).item()

    with gs.thread_context("cpu") as context:
        with context.eager():
            assert 0 <= pool.submit(needs_the_seat).result(DEADLINE_S) < 1
        with context.eager():
            assert pool.submit(needs_the_seat).exception(DEADLINE_S) is None
        with context.eager():
            other = gs.Executor(1, "cpu")
            late = other.submit(needs_the_seat)
            other.shutdown()
            assert late.done()


def test_executor_result_times_out_and_can_be_asked_again(pool: gs.Executor) -> None:
    release = threading.Event()
    future = pool.submit(release.wait, DEADLINE_S)
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(0)
    release.set()
    assert future.result(DEADLINE_S) is True


def test_executor_result_without_a_timeout_logs_what_it_waits_for(
    pool: gs.Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.05")
    pause = threading.Event()

    def late() -> int:
        while "call of an Executor" not in caplog.text:
            pause.wait(0.01)
        return 3

    assert pool.submit(late).result() == 3


def test_executor_call_is_cancelled_before_it_starts(pool: gs.Executor) -> None:
    running, release = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        running.set()
        assert release.wait(DEADLINE_S)

    busy = pool.submit(first)
    assert running.wait(DEADLINE_S)
    waiting = pool.submit(ran.append, 1)
    assert not busy.cancel() and waiting.cancel() and waiting.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(DEADLINE_S)
    release.set()
    pool.submit(ran.append, 2).result(DEADLINE_S)
    assert ran == [2]


def test_executor_shutdown_cancels_the_calls_that_wait() -> None:
    executor = gs.Executor(1, "cpu")
    running, release = threading.Event(), threading.Event()

    def first() -> int:
        running.set()
        assert release.wait(DEADLINE_S)
        return 1

    busy = executor.submit(first)
    assert running.wait(DEADLINE_S)
    waiting = [executor.submit(int) for _ in range(2)]
    waiting[1].cancel()
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    done, pending = concurrent.futures.wait(waiting, DEADLINE_S)
    assert len(done) == 2 and not pending
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(int)
    release.set()
    assert busy.result(DEADLINE_S) == 1
    executor.shutdown()


def test_executor_submit_inside_a_capture_is_an_error(pool: gs.Executor) -> None:
    with gs.thread_context("cpu"), gs.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        pool.submit(int)


def test_executor_call_submits_another_one() -> None:
    with gs.Executor(2, "cpu") as executor:
        assert executor.submit(lambda: executor.submit(of_this_thread).result(DEADLINE_S)).result(DEADLINE_S)[0]


def test_executor_that_is_dropped_ends_its_threads() -> None:
    executor = gs.Executor(1, "cpu")
    thread = executor.submit(threading.current_thread).result(DEADLINE_S)
    del executor
    gc.collect()
    join_threads([thread], DEADLINE_S)


def test_executor_thread_that_cannot_have_its_context_fails_the_call_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no stream left")

    with gs.Executor(1, "cpu") as executor:
        with monkeypatch.context() as patched:
            patched.setattr(module, "attach", no_memory)
            with pytest.raises(torch.OutOfMemoryError, match="no stream"):
                executor.submit(int).result(DEADLINE_S)
        assert executor.submit(int).result(DEADLINE_S) == 0  # the pool is not broken


class Noted:
    """A hand-over that notes the threads that made and took it."""

    made: ClassVar[list[Noted]] = []

    def __init__(self, roots: tuple[Any, ...], devices: Any) -> None:
        self.roots, self.devices = roots, list(devices)
        self.maker = threading.current_thread().name
        self.takers: list[str] = []
        self.tensors: list[torch.Tensor] = []
        Noted.made.append(self)

    def take(self) -> None:
        self.takers.append(threading.current_thread().name)


@pytest.fixture
def handovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    monkeypatch.setattr(module, "Handover", Noted)
    Noted.made = []
    yield Noted.made
    Noted.made = []


def test_executor_hands_over_to_the_pools_thread_and_to_each_that_asks(
    pool: gs.Executor, handovers: list[Noted]
) -> None:
    x = torch.ones(2)
    future = pool.submit(torch.add, x, other=x)
    future.result(DEADLINE_S)
    there, back = handovers
    assert there.roots == (x,) and pool.device in there.devices
    assert (there.maker, there.takers) == ("MainThread", ["executor-cpu_0"])
    assert back.roots[0] is future.result() and back.devices == [pool.device]
    assert (back.maker, back.takers) == ("executor-cpu_0", ["MainThread"] * 2)
    list(pool.map(abs, [1]))
    assert handovers[3].takers == ["MainThread"]
    if hasattr(concurrent.futures.Future, "_get_snapshot"):
        assert future._get_snapshot()[2] is future.result()  # type: ignore[attr-defined]
        assert len(back.takers) == 5


def test_executor_hands_over_what_arguments_closures_and_partials_carry_and_searches_no_model(
    pool: gs.Executor, handovers: list[Noted]
) -> None:
    class Batch:
        pass

    class Server:
        def handle(self, *given: Any) -> None:
            pass

    batch, server, model = Batch(), Server(), torch.nn.Linear(1, 1)
    a, b, c, d = (torch.ones(1) for _ in range(4))

    def closure(given: Any = [a]) -> None:  # noqa: B006
        _ = server, model, b, inner

    def inner() -> None:
        _ = c, closure

    cases = (
        (closure, (), [[a], b, c]),
        (server.handle, (batch, model, closure), [batch, [a], b, c]),
        (functools.partial(server.handle, a, model, key={"d": d}), (b,), [a, {"d": d}, b]),
        (contextvars.copy_context().run, (functools.partial(closure, d),), [d, [a], b, c]),  # as asyncio.to_thread
    )
    for fn, args, expected in cases:
        handovers.clear()
        with contextlib.suppress(TypeError):
            pool.submit(fn, *args).result(DEADLINE_S)
        found = handovers[0].roots
        same = [
            any(one is other or (type(one) is not torch.Tensor and one == other) for one in found) for other in expected
        ]
        assert len(found) == len(expected) and all(same)


def test_executor_hands_over_to_the_event_loops_thread(handovers: list[Noted]) -> None:
    async def main(executor: gs.Executor) -> torch.Tensor:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(executor)
        first, second = await asyncio.gather(
            loop.run_in_executor(executor, torch.ones, 3), asyncio.to_thread(lambda: variable.get())
        )
        assert second == "the task's"
        with pytest.raises(KeyError):
            await loop.run_in_executor(None, functools.partial(_raise, KeyError()))
        return first

    def loop_thread() -> None:
        variable.set("the task's")
        with gs.Executor(2, "cpu") as executor:
            found.append(asyncio.run(main(executor)))

    found: list[torch.Tensor] = []
    thread = threading.Thread(target=loop_thread, name="loop", daemon=True)
    thread.start()
    join_threads([thread], DEADLINE_S)
    assert found and found[0].tolist() == [1, 1, 1]
    back = [one for one in handovers if one.maker != "loop"]
    assert len(back) == 2 and all(one.takers == ["loop"] for one in back)


def test_executor_awaited_call_is_cancelled_with_its_task(pool: gs.Executor) -> None:
    running, release = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        running.set()
        assert release.wait(DEADLINE_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        busy = loop.run_in_executor(pool, first)
        waiting = loop.run_in_executor(pool, ran.append, 1)
        assert running.wait(DEADLINE_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)  # the loop tells the pool of the cancellation
        release.set()
        await busy
        await loop.run_in_executor(pool, ran.append, 2)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert ran == [2]


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )


def test_interpreter_exits_with_a_live_executor_and_its_contexts_end() -> None:
    done = run_program("""
import threading, torch, graphsafe as gs
from concurrent.futures import thread
class Resource:
    def close(self): print("closed in", threading.current_thread().name)
def last_call():
    while not thread._shutdown:  # until the interpreter exits
        threading.Event().wait(0.01)
    print("last call")
one = Resource()
executor = gs.Executor(1, "cpu")
executor.submit(lambda: gs.current_context().register(one)).result(30)
executor.submit(last_call)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["last call", "closed in executor-cpu_0"]
