"""attach(): a context for a thread that graphsafe did not start, which ends in that thread and with it."""

from __future__ import annotations

import _thread
import concurrent.futures
import ctypes
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import graphsafe as gs
from graphsafe.repairs import private

from .helpers import join_threads, run_threads

DEADLINE_S = 30.0
module = importlib.import_module("graphsafe.attach")


class Watched:
    """A resource that notes in which thread, and where in it, the context closed it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.closed_in: tuple[int, str] | None = None
        self.error = error
        self.closes = 0

    def close(self) -> None:
        self.closes += 1
        self.closed_in = (threading.get_ident(), sys._getframe(1).f_code.co_name)
        if self.error is not None:
            raise self.error


def in_thread(fn: Callable[[], object], name: str = "attached") -> threading.Thread:
    thread = threading.Thread(target=fn, name=name, daemon=True)
    thread.start()
    join_threads([thread], DEADLINE_S)
    return thread


def row(name: str) -> gs.stats.ContextStats | None:  # type: ignore[name-defined]
    return next((one for one in gs.stats().contexts if one.name == name), None)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have "cpu:1" be a device of its own, so that a thread can have two contexts without a GPU."""
    resolve = gs.context.resolve_device

    def resolve_two(device: torch.device | str | int | None) -> torch.device:
        return torch.device("cpu:1") if str(device) == "cpu:1" else resolve(device)

    monkeypatch.setattr(gs.context, "resolve_device", resolve_two)
    monkeypatch.setattr(module, "resolve_device", resolve_two)
    yield


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not gs.context.active_contexts()
    assert private.multithreading_enabled()


def test_attach_enters_a_context_and_returns_it_again() -> None:
    context = gs.attach("cpu", name="mine")
    try:
        assert gs.current_context() is context and gs.attach() is context and gs.attach("cpu") is context
        assert not private.multithreading_enabled()
        with context.eager():
            torch.rand(2)
        shown = row("mine")
        assert shown is not None and shown.alive and shown.eager_steps == 1
    finally:
        context.close()
    assert private.multithreading_enabled() and context.closed
    context.close()
    with pytest.raises(gs.NoContextError):
        gs.current_context()
    after = gs.attach("cpu")
    assert after is not context and not after.closed
    after.close()


def test_attach_refuses_another_seed_or_name_than_the_context_has() -> None:
    context = gs.attach("cpu", seed=5, name="five")
    try:
        assert gs.attach("cpu", seed=5, name="five") is context
        with pytest.raises(gs.GraphsafeError, match=r"seed 5, not 6"):
            gs.attach("cpu", seed=6)
        with pytest.raises(gs.GraphsafeError, match=r"name 'five', not 'six'"):
            gs.attach("cpu", name="six")
    finally:
        context.close()


def test_attach_with_a_seed_draws_what_a_context_of_that_seed_draws() -> None:
    with gs.thread_context("cpu", seed=9) as context, context.eager():
        expected = torch.rand(4)
    context = gs.attach("cpu", seed=9)
    with context.eager():
        found = torch.rand(4)
    context.close()
    assert torch.equal(found, expected)


def test_attach_rejects_a_device_that_is_not_there() -> None:
    with pytest.raises(gs.GraphsafeError, match="cuda:99"):
        gs.attach("cuda:99")
    with pytest.raises(gs.GraphsafeError, match="seed"):
        gs.attach("cpu", seed="one")  # type: ignore[arg-type]


def test_attach_inside_a_block_of_the_device_returns_the_blocks_context() -> None:
    with gs.thread_context("cpu") as context:
        assert gs.attach() is context and gs.attach("cpu") is context
        with pytest.raises(gs.GraphsafeError, match="leave the block"):
            context.close()
        assert not context.closed
    context.close()  # has ended: nothing to do
    with pytest.raises(gs.GraphsafeError, match="attach"):
        gs.thread_context("cpu").close()


def test_attached_context_is_not_entered_again() -> None:
    context = gs.attach("cpu")
    try:
        with pytest.raises(gs.GraphsafeError, match="without `with`"), gs.attach("cpu"):
            pass
        assert gs.attach("cpu") is context and not context.closed
    finally:
        context.close()


def test_attached_context_is_closed_by_its_own_thread_alone() -> None:
    context = gs.attach("cpu", name="owned")

    def work(_: int) -> None:
        with pytest.raises(gs.WrongThreadError, match="owned"):
            context.close()

    run_threads(1, work, DEADLINE_S)
    assert not context.closed
    context.close()
    run_threads(1, lambda _: context.close(), DEADLINE_S)  # has ended: nothing to do, for anyone


def test_attach_and_close_inside_a_capture() -> None:
    context = gs.attach("cpu")
    try:
        with gs.capture() as graph:
            assert gs.attach() is context  # changes nothing, so it may be called
            with pytest.raises(gs.GraphsafeError, match="inside a capture"):
                context.close()
            x = torch.ones(2) + 1
        graph.replay()
        assert x.tolist() == [2, 2]
    finally:
        context.close()


def test_attach_of_another_device_inside_a_capture_is_an_error(two_devices: None) -> None:
    first = gs.attach("cpu")
    with gs.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        gs.attach("cpu:1")
    assert gs.context.active_contexts() == (first,)
    second = gs.attach("cpu:1")
    with gs.context.current_context("cpu").gate.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        gs.attach("cpu")
    assert gs.current_context() is second
    second.close()
    first.close()


def test_attached_contexts_of_two_devices_close_in_any_order(two_devices: None) -> None:
    for first_to_close in (0, 1):
        contexts = [gs.attach("cpu"), gs.attach("cpu:1")]
        assert gs.current_context() is contexts[1]
        assert gs.attach("cpu") is contexts[0] and gs.current_context() is contexts[0]
        closing, other = contexts[first_to_close], contexts[1 - first_to_close]
        closing.close()
        assert not private.multithreading_enabled()
        assert gs.current_context() is other and closing.closed and not other.closed
        other.close()
        assert private.multithreading_enabled()


def test_attached_context_ends_with_the_block_that_it_was_attached_in(two_devices: None) -> None:
    with gs.thread_context("cpu") as outer:
        context = gs.attach("cpu:1")
        assert gs.attach("cpu") is outer and gs.current_context() is context  # a block's is returned as it is
        watched = Watched()
        context.register(watched)
    assert context.closed and watched.closes == 1


def test_attached_context_is_not_closed_inside_a_later_block(two_devices: None) -> None:
    context = gs.attach("cpu")
    with gs.thread_context("cpu:1"), pytest.raises(gs.GraphsafeError, match="Leave that block"):
        context.close()
    assert not context.closed
    context.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_attached_context_ends_in_its_thread_and_with_it(fails: bool) -> None:
    watched, graphs, idents = Watched(), [], []

    def work() -> None:
        idents.append(threading.get_ident())
        context = gs.attach("cpu")
        context.register(watched)
        with gs.capture() as graph:
            torch.ones(2) + 1
        graph.replay()
        graphs.append(graph)
        if fails:
            raise KeyError("the thread's own")

    name = f"ends-{fails}"
    thread = in_thread(work, name)
    assert watched.closes == 1 and watched.closed_in is not None and watched.closed_in[0] == idents[0]
    shown = row(name)
    assert shown is not None and not shown.alive and shown.captures == 1 and shown.replays == 1
    with pytest.raises(gs.GraphsafeError):
        graphs[0].replay()
    assert thread not in threading.enumerate() and "_delete" not in vars(thread)
    assert threading.active_count() == len(threading.enumerate())


def test_attached_contexts_of_two_devices_end_innermost_first(two_devices: None) -> None:
    order: list[str] = []

    class Noted(Watched):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def close(self) -> None:
            order.append(self.name)

    kept: list[Noted] = []

    def work() -> None:
        for device in ("cpu", "cpu:1"):
            kept.append(Noted(device))
            gs.attach(device).register(kept[-1])

    in_thread(work)
    assert order == ["cpu:1", "cpu"]


def test_attached_context_ends_in_a_thread_that_threading_does_not_know() -> None:
    watched, ended = Watched(), threading.Event()
    ident: list[int] = []

    def work() -> None:
        ident.append(threading.get_ident())
        gs.attach("cpu", name="raw").register(watched)

    close = watched.close

    def close_and_say() -> None:
        close()
        ended.set()

    watched.close = close_and_say  # type: ignore[method-assign]
    _thread.start_new_thread(work, ())
    assert ended.wait(DEADLINE_S)
    assert watched.closed_in is not None and watched.closed_in[0] == ident[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a thread through pthread_create")
def test_attached_context_ends_in_a_thread_that_python_did_not_start() -> None:
    libc = ctypes.CDLL(None)
    watched = Watched()
    ident: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def work(_: int) -> None:
        ident.append(threading.get_ident())
        context = gs.attach("cpu", name="foreign")
        with context.eager():
            torch.rand(2)
        context.register(watched)
        context.eager().__enter__()  # a seat that nobody leaves is given back too

    handle = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(handle), None, work, None) == 0
    assert libc.pthread_join(handle, None) == 0
    assert watched.closes == 1 and watched.closed_in is not None and watched.closed_in[0] == ident[0]
    shown = row("foreign")
    assert shown is not None and not shown.alive and shown.eager_steps == 2
    with gs.thread_context("cpu") as context, context.eager():
        pass


def test_attached_thread_that_ends_with_a_seat_gives_it_back(caplog: pytest.LogCaptureFixture) -> None:
    in_thread(lambda: gs.attach("cpu").eager().__enter__(), "careless")
    assert "careless" in caplog.text and "seat" in caplog.text
    before = torch.default_generator.get_state()
    with gs.thread_context("cpu", seed=1) as context, context.eager():
        torch.rand(2)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_attached_thread_that_ends_in_a_gpus_capture_keeps_its_context(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    contexts: list[gs.ThreadContext] = []

    def work() -> None:
        contexts.append(gs.attach("cpu", name="captures"))
        contexts[0].register(watched)
        cuda = gs.gate.DeviceGate(torch.device("cuda", 0))
        monkeypatch.setattr(gs.gate, "capturing", lambda: cuda)

    in_thread(work)
    monkeypatch.undo()
    assert watched.closes == 0 and "captures" in caplog.text and "inside a capture" in caplog.text
    assert gs.context.left_behind == contexts
    gs.context.left_behind.clear()
    gs.context.retire(contexts[0])


def test_attached_context_that_fails_to_end_is_logged_and_the_others_end(
    two_devices: None, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Watched(RuntimeError("stuck")), Watched()

    def work() -> None:
        gs.attach("cpu").register(good)
        gs.attach("cpu:1", name="bad-one").register(bad)

    thread = in_thread(work)
    assert bad.closes == 1 and good.closes == 1
    assert "bad-one" in caplog.text and "stuck" in caplog.text
    shown = row("bad-one")
    assert shown is not None and not shown.alive
    assert gs.context.left_behind and gs.context.left_behind.pop().name == "bad-one"
    assert not thread.is_alive()


def test_attached_contexts_let_go_of_by_another_thread_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    taken: list[object] = []
    contexts: list[gs.ThreadContext] = []
    gone, end = threading.Event(), threading.Event()

    def work() -> None:
        contexts.append(gs.attach("cpu", name="kidnapped"))
        contexts[0].register(watched)
        taken.append(gs.context._per_thread.attached)
        gs.context._per_thread.attached = None
        gone.set()  # 1: the record's last reference is now the other thread's
        assert end.wait(DEADLINE_S)  # 3

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert gone.wait(DEADLINE_S)
    taken.clear()  # 2: here its finaliser runs
    assert watched.closes == 0 and not contexts[0].closed
    assert "kidnapped" in caplog.text and contexts[0] in gs.context.left_behind
    end.set()
    join_threads([thread], DEADLINE_S)
    assert watched.closes == 0
    gs.context.left_behind.remove(contexts[0])
    gs.context.retire(contexts[0])


def test_attach_as_a_pools_initializer() -> None:
    watched: dict[str, Watched] = {}

    def request(barrier: threading.Barrier) -> tuple[str, int]:
        barrier.wait(DEADLINE_S)
        context = gs.current_context("cpu")
        if context.name not in watched:
            watched[context.name] = Watched()
            context.register(watched[context.name])
        return context.name, id(context)

    with concurrent.futures.ThreadPoolExecutor(2, "served", initializer=gs.attach, initargs=("cpu",)) as pool:
        barrier = threading.Barrier(2)
        seen = [set(pool.map(request, [barrier] * 2, timeout=DEADLINE_S)) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] and {name for name, _ in seen[0]} == {"served_0", "served_1"}
    assert [one.closes for one in watched.values()] == [1, 1]
    assert all((shown := row(f"served_{i}")) is not None and not shown.alive for i in range(2))


def test_attach_from_many_threads_at_once_gives_each_its_own() -> None:
    alive_before = sum(one.alive for one in gs.stats().contexts)

    def work(i: int) -> tuple[int, int]:
        context = gs.attach("cpu", name=f"crowd-{i}")
        for _ in range(20):
            assert gs.attach("cpu") is context
            with context.eager():
                torch.rand(2)
        return id(context), context.seed or 0

    found = run_threads(12, work, DEADLINE_S)
    assert len({context for context, _ in found}) == 12 and len({seed for _, seed in found}) == 12
    assert sum(one.alive for one in gs.stats().contexts) == alive_before
    assert all((shown := row(f"crowd-{i}")) is not None and shown.eager_steps == 20 for i in range(12))


def test_main_threads_attached_context_ends_when_the_interpreter_exits() -> None:
    done = run("""
import threading, torch, graphsafe as gs
class Resource:
    def close(self): print("closed in", threading.current_thread().name)
one = Resource()
gs.attach("cpu").register(one)
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed in MainThread\n", "")


def test_daemon_thread_with_a_context_does_not_disturb_the_interpreters_exit() -> None:
    done = run("""
import threading, torch, graphsafe as gs
ready = threading.Event()
class Resource:
    def close(self): print("closed")
one = Resource()
def work():
    context = gs.attach("cpu")
    context.register(one)
    with context.eager():
        ready.set()
        threading.Event().wait()
gs.attach("cpu", name="main")
threading.Thread(target=work, daemon=True).start()
assert ready.wait(30)
print("end")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_thread_that_outlasts_the_main_one_ends_its_context_before_the_interpreter_exits() -> None:
    done = run("""
import threading, torch, graphsafe as gs
class Resource:
    def close(self): print("closed in", threading.current_thread().name)
one = Resource()
def work():
    gs.attach("cpu").register(one)
    threading.main_thread().join()
threading.Thread(target=work, name="late").start()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed in late\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_has_the_forking_threads_context_alone() -> None:
    done = run("""
import os, threading, warnings, torch, graphsafe as gs
warnings.simplefilter("ignore")
class Resource:
    def __init__(self, name): self.name = name
    def close(self): print("closed", self.name, "in the", "child" if os.getpid() != parent else "parent", flush=True)
parent = os.getpid()
others, mine = Resource("other's"), Resource("mine")
ready, end = threading.Event(), threading.Event()
def work():
    gs.attach("cpu", name="other").register(others)
    ready.set()
    assert end.wait(30)
thread = threading.Thread(target=work)
thread.start()
assert ready.wait(30)
context = gs.attach("cpu", name="main")
context.register(mine)
gs.context._registry_lock.acquire()  # as if the other thread held it while this one forks
child = os.fork()
if child == 0:
    assert gs.attach("cpu") is context
    rows = {one.name: one.alive for one in gs.stats().contexts}
    assert rows == {"main": True, "other": False}, rows
    with context.eager():
        torch.rand(2)
    def more():
        with gs.attach("cpu").eager():
            torch.rand(2)
    new = threading.Thread(target=more)
    new.start()
    new.join(30)
    assert not new.is_alive()
    raise SystemExit(7)
gs.context._registry_lock.release()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
end.set()
thread.join(30)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "closed mine in the child",
        "closed other's in the parent",
        "closed mine in the parent",
    ]
