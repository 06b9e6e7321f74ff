"""Graph trees of threads (A4, A5, B1) as far as they go without a GPU: torch's own functions, with managers made up."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphsafe.compile import install, installed, uninstall
from graphsafe.repairs import tree_captures, tree_functions, tree_threads, trees
from graphsafe.repairs.hooks import hooks
from tests.helpers import DEADLINE_S, join_threads, run_threads

torch_trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    was_installed = bool(installed())
    uninstall()
    install()
    yield
    trees.mine().close()
    uninstall()
    if was_installed:
        install()


class Manager:
    """What the trees need of torch's tree manager."""

    def __init__(self) -> None:
        self.graph: object = object()
        self.live: list[int] = []
        self.ended_in: int | None = None

    def live_cudagraph_pool_storages_in_curr_execution(self) -> list[int]:
        return self.live

    def shutdown(self) -> None:
        self.graph, self.ended_in = None, threading.get_ident()


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())


def adopt(manager: Manager, device_index: int = 0) -> None:
    torch_trees.get_container(device_index).tree_manager = manager


def test_each_thread_has_trees_of_its_own_and_plain_torch_gives_a_worker_none_or_raises() -> None:
    containers = run_threads(4, lambda _: torch_trees.get_container(0))
    assert len({id(container) for container in containers}) == 4
    assert torch_trees.get_container(0) is torch_trees.get_container(0)
    uninstall()
    raises = tree_threads.raises_in_a_worker(torch_trees)
    assert raises == (not hasattr(torch_trees, "_initialize_tls"))


def test_a_threads_trees_end_in_that_thread_when_it_ends(no_stream: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seats: list[tuple[int | None, int]] = []

    @contextmanager
    def seat(device_index: int | None) -> Iterator[None]:
        seats.append((device_index, threading.get_ident()))
        yield

    monkeypatch.setattr(hooks, "seat_scope", seat)
    manager, idents = Manager(), []

    def body() -> None:
        idents.append(threading.get_ident())
        adopt(manager, 3)

    thread = threading.Thread(target=body)
    thread.start()
    join_threads([thread])
    gc.collect()
    assert manager.ended_in == idents[0]
    assert (3, idents[0]) in seats


def test_trees_whose_output_lives_are_kept_until_it_is_gone(no_stream: None) -> None:
    first, second = Manager(), Manager()
    first.live = [1]
    for manager in (first, second):
        adopt(manager)
        trees.mine().close(0)
    assert first.ended_in is None and second.ended_in is not None
    first.live = []
    adopt(Manager())
    trees.mine().close(0)
    assert first.ended_in is not None


def test_reset_ends_the_trees_of_the_thread_that_calls_it_alone(no_stream: None) -> None:
    mine, others = Manager(), Manager()
    adopt(mine)
    begun, done = threading.Event(), threading.Event()

    def body() -> None:
        adopt(others)
        begun.set()
        assert done.wait(DEADLINE_S)

    thread = threading.Thread(target=body)
    thread.start()
    assert begun.wait(DEADLINE_S)
    torch_trees.reset_cudagraph_trees()
    assert mine.ended_in is not None and others.ended_in is None
    done.set()
    join_threads([thread])
    assert others.ended_in is not None


def cudagraphify(model: Callable[..., Any]) -> Any:
    return compile_fx.cudagraphify(model, (), device_index=0, stack_traces=[], is_backward=False, is_inference=True)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In which threads torch was asked to record."""
    found: list[int] = []

    def record(model: Any, inputs: Any, static: Any, **_: Any) -> Callable[[Any], tuple[int, Any]]:
        found.append(threading.get_ident())
        owner = threading.get_ident()
        return lambda new_inputs: (owner, model(new_inputs))

    monkeypatch.setattr(torch_trees, "cudagraphify_impl", record)
    return found


def test_each_thread_records_a_shared_function_for_itself_and_once(recordings: list[int]) -> None:
    shared = cudagraphify(lambda inputs: sum(inputs))

    def body(index: int) -> int:
        for _ in range(3):
            owner, total = shared([index, 1])
            assert (owner, total) == (threading.get_ident(), index + 1)
        return threading.get_ident()

    idents = run_threads(4, body)
    assert sorted(recordings) == sorted(idents)


def test_plain_torch_replays_in_each_thread_what_the_first_one_recorded(recordings: list[int]) -> None:
    uninstall()
    shared = cudagraphify(lambda inputs: sum(inputs))
    owners = {shared([1])[0]}
    owners |= {owner for owner, _ in run_threads(1, lambda _: shared([1]))}
    newer = "thread_local" in shared.__code__.co_freevars
    assert len(owners) == (2 if newer else 1)


def test_a_function_runs_uncaptured_inside_the_threads_own_capture(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = cudagraphify(lambda inputs: sum(inputs))
    monkeypatch.setattr(hooks, "capturing", lambda: True)
    assert shared([2, 3]) == 5
    assert not recordings
    monkeypatch.setattr(hooks, "capturing", lambda: False)
    assert shared([2, 3])[1] == 5


def test_a_dropped_function_is_forgotten_by_every_thread_in_that_thread(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        def __call__(self, inputs: Any) -> Any:
            return inputs

    model = Model()
    gone = weakref.ref(model)
    kept, shared = cudagraphify(lambda inputs: inputs), cudagraphify(model)
    called, dropped = threading.Barrier(3), threading.Barrier(3)
    functions = [shared]
    counts: list[int] = []

    def body() -> None:
        functions[0]([1])
        called.wait(DEADLINE_S)  # 1. both threads have recorded it
        dropped.wait(DEADLINE_S)  # 2. the last reference is gone
        kept([1])  # 3. the next call of anything forgets it
        counts.append(len(trees.mine()._functions))

    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    called.wait(DEADLINE_S)
    functions.clear()
    del shared, model
    gc.collect()
    dropped.wait(DEADLINE_S)
    join_threads(threads)
    assert counts == [1, 1]
    gc.collect()
    assert gone() is None


def test_warmups_and_recordings_hold_the_device_and_replays_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, bool]] = []

    @contextmanager
    def recording(device_index: int, capture: bool) -> Iterator[None]:
        held.append((device_index, capture))
        yield

    monkeypatch.setattr(hooks, "recording_scope", recording)
    tree_captures.undo()
    calls: list[str] = []

    class Original:
        device_index = 2

        def __init__(self, device_index: int) -> None:
            calls.append("made")

        def record_function(self) -> str:
            return "recorded"

        def run_eager(self) -> str:
            return "warm"

        def run(self) -> str:
            return "replayed"

    stand_in = type(sys)("stand_in")
    stand_in.CUDAGraphTreeManager = Original  # type: ignore[attr-defined]
    stand_in.graph_capture_lock = lock = threading.Lock()  # type: ignore[attr-defined]
    tree_captures.repair(stand_in)
    with lock, stand_in.graph_capture_lock:  # the lock that newer torch has for all devices is not waited for
        manager = Original(2)
    assert (manager.run_eager(), manager.record_function(), manager.run()) == ("warm", "recorded", "replayed")
    assert held == [(2, True), (2, False), (2, True)] and calls == ["made"]
    tree_captures.undo()
    assert stand_in.graph_capture_lock is lock and Original(1).run_eager() == "warm" and len(held) == 3


def test_a_torch_that_records_elsewhere_is_refused_before_anything_is_replaced() -> None:
    def run(inputs: Any) -> Any:
        return inputs

    with pytest.raises(Exception, match="unknown place"):
        tree_functions.fresh(run)
