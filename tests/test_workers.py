"""Workers and groups: one known state, exceptions that come back, and an end of all together."""

from __future__ import annotations

import contextvars
import gc
import threading

import pytest
import torch

import graphsafe as gs
from tests.helpers import SHOWS_FAULTS

DEADLINE_S = 20.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def test_worker_returns_its_value_and_has_a_context_of_its_name() -> None:
    def work(a: int, *, b: int) -> tuple[int, str, str]:
        return a + b, gs.current_context().name, threading.current_thread().name

    worker = gs.spawn(work, 1, b=2, device="cpu", name="adder")
    assert worker.result(DEADLINE_S) == (3, "adder", "adder")
    assert worker.result(DEADLINE_S)[0] == 3  # again
    assert worker.done()


def test_worker_hands_its_exception_back_with_the_traceback() -> None:
    def broken() -> None:
        raise KeyError("lost")

    worker = gs.spawn(broken, device="cpu")
    with pytest.raises(KeyError, match="lost") as caught:
        worker.result(DEADLINE_S)
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_worker_result_times_out_and_can_be_asked_again() -> None:
    release = threading.Event()
    worker = gs.spawn(release.wait, DEADLINE_S, device="cpu", name="slow")
    with pytest.raises(TimeoutError, match="slow"):
        worker.result(0.01)
    release.set()
    assert worker.result(DEADLINE_S) is True


def test_worker_starts_in_one_known_state() -> None:
    def state() -> tuple[bool, bool, torch.device]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        found = gs.spawn(state, device="cpu").result(DEADLINE_S)
    assert found == (True, False, torch.device("cpu"))


def test_worker_sees_the_spawners_context_variables_but_not_the_reverse() -> None:
    def work() -> str:
        seen = variable.get()
        variable.set("the worker's")
        return seen

    token = variable.set("the spawner's")
    try:
        assert gs.spawn(work, device="cpu").result(DEADLINE_S) == "the spawner's"
        assert variable.get() == "the spawner's"
    finally:
        variable.reset(token)


def test_worker_sees_the_spawners_torch_settings_forward_and_backward() -> None:
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

    def work() -> None:
        Look.apply(torch.ones(2, requires_grad=True)).sum().backward()

    with config.patch(recompile_limit=77):
        gs.spawn(work, device="cpu").result(DEADLINE_S)
        assert seen == [77, 77]
        seen.clear()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(DEADLINE_S)
    if SHOWS_FAULTS:  # A8
        assert 77 not in seen, "the pinned torch no longer shows the fault: the test is no proof any more"


def test_spawn_rejects_a_device_that_is_not_there_before_anything_runs() -> None:
    ran = threading.Event()
    with pytest.raises(gs.GraphsafeError, match="cuda:99"):
        gs.spawn(ran.set, device="cuda:99")
    with pytest.raises(gs.GraphsafeError, match="cannot be called"):
        gs.spawn(3, device="cpu")  # type: ignore[arg-type]
    assert not ran.is_set()


def test_spawn_takes_the_device_of_the_spawners_context() -> None:
    with gs.thread_context("cpu"):
        assert gs.spawn(lambda: gs.current_context().device).result(DEADLINE_S) == torch.device("cpu")


def test_result_gives_the_callers_seat_back_while_it_waits() -> None:
    def needs_the_seat() -> float:
        with gs.current_context().eager():
            return torch.rand(()).item()

    with gs.thread_context("cpu") as context, context.eager():
        assert 0 <= gs.spawn(needs_the_seat).result(DEADLINE_S) < 1


def test_group_sets_stop_on_the_first_failure_and_raises_all_of_them() -> None:
    def fails() -> None:
        raise ValueError("first")

    def follows(stop: threading.Event) -> None:
        assert stop.wait(DEADLINE_S)
        raise KeyError("second")

    with pytest.raises(ExceptionGroup) as caught, gs.WorkerGroup(timeout=DEADLINE_S) as group:
        group.spawn(follows, group.stop, device="cpu")
        group.spawn(fails, device="cpu")
    assert sorted(type(e).__name__ for e in caught.value.exceptions) == ["KeyError", "ValueError"]


def test_group_joins_its_workers_and_their_results_stay() -> None:
    with gs.WorkerGroup() as group:
        workers = [group.spawn(lambda i=i: i * i, device="cpu") for i in range(4)]
    assert all(worker.done() for worker in workers)
    assert [worker.result() for worker in workers] == [0, 1, 4, 9]


def test_group_error_in_the_body_stops_the_workers_and_joins_the_group() -> None:
    with pytest.raises(ExceptionGroup) as caught, gs.WorkerGroup(timeout=DEADLINE_S) as group:
        worker = group.spawn(group.stop.wait, DEADLINE_S, device="cpu")
        raise ValueError("body")
    assert [type(e) for e in caught.value.exceptions] == [ValueError]
    assert worker.result() is True


def test_group_interrupt_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), gs.WorkerGroup(timeout=DEADLINE_S) as group:
        worker = group.spawn(group.stop.wait, DEADLINE_S, device="cpu")
        raise KeyboardInterrupt
    assert worker.result() is True


def test_group_worker_that_outlasts_the_timeout_is_reported_with_its_stack() -> None:
    release = threading.Event()

    def the_deaf_one() -> None:
        release.wait(DEADLINE_S)

    try:
        with pytest.raises(ExceptionGroup) as caught, gs.WorkerGroup(timeout=0.05) as group:
            group.spawn(the_deaf_one, device="cpu", name="deaf")
            group.stop.set()
        (error,) = caught.value.exceptions
        assert isinstance(error, TimeoutError) and "deaf" in str(error) and "the_deaf_one" in str(error)
    finally:
        release.set()


def test_group_spawn_outside_its_block_is_an_error() -> None:
    group = gs.WorkerGroup()
    with pytest.raises(gs.GraphsafeError, match="outside"):
        group.spawn(print, device="cpu")
    with group:
        pass
    with pytest.raises(gs.GraphsafeError, match="outside"):
        group.spawn(print, device="cpu")
    with pytest.raises(gs.GraphsafeError, match="once"):
        group.__enter__()


def test_worker_failure_is_named_and_said_where_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("unheard")

    worker = gs.spawn(fails, device="cpu", name="alice")
    worker._thread.join(DEADLINE_S)
    assert "alice" in repr(worker) and "failed" in repr(worker)
    del worker
    gc.collect()
    assert "alice" in caplog.text and "unheard" in caplog.text
    caplog.clear()
    with pytest.raises(ExceptionGroup) as caught, gs.WorkerGroup(timeout=DEADLINE_S) as group:
        group.spawn(fails, device="cpu", name="bob")
    assert "bob" in str(caught.value.exceptions[0].__notes__)
    assert "bob" in caplog.text  # at once, before the others have ended


def test_group_without_a_timeout_logs_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.05")
    monkeypatch.setattr(gs.gate, "POLL_S", 0.01)
    release = threading.Event()

    def the_late_one() -> None:
        while "the_late_one" not in caplog.text:
            release.wait(0.01)

    with gs.WorkerGroup() as group:
        group.spawn(the_late_one, device="cpu")
    assert "still waits for 1 workers" in caplog.text


def test_spawn_inside_a_capture_is_an_error() -> None:
    with gs.thread_context("cpu"), gs.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        gs.spawn(print, device="cpu")


def test_spawn_does_not_draw_its_seed_from_another_threads_generator() -> None:
    drew, go_on = threading.Event(), threading.Event()
    numbers: list[torch.Tensor] = []

    def worker() -> None:
        with gs.current_context().eager():
            numbers.append(torch.rand(2))
            drew.set()  # 1: its generator stands in for the default one
            assert go_on.wait(DEADLINE_S)
            numbers.append(torch.rand(2))

    with gs.thread_context("cpu", seed=3) as context, context.eager():
        expected = [torch.rand(2), torch.rand(2)]
    torch.manual_seed(21)
    first = torch.randint(2**63 - 1, ())
    torch.manual_seed(21)
    one = gs.spawn(worker, device="cpu", seed=3)
    assert drew.wait(DEADLINE_S)
    seeds: list[int] = []
    spawner = threading.Thread(target=lambda: seeds.append(gs.context.draw_seed()), daemon=True)
    spawner.start()  # 2: wants a seed, and has to wait
    go_on.set()  # 3
    one.result(DEADLINE_S)
    spawner.join(DEADLINE_S)
    assert all(torch.equal(a, b) for a, b in zip(numbers, expected, strict=True))
    assert seeds == [int(first)]


def test_worker_result_raises_with_the_same_traceback_however_often() -> None:
    worker = gs.spawn(lambda: [][0], device="cpu")
    lengths = []
    for _ in range(5):
        with pytest.raises(IndexError) as caught:
            worker.result(DEADLINE_S)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
