"""Gate: who excludes whom, who waits for whom, and what a deadline reports."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import pytest
import torch

from graphsafe import GateTimeout, GraphsafeError, WrongThreadError, gate, thread_context
from graphsafe.errors import CaptureError
from graphsafe.waits import wait_for

from .helpers import run_threads

DEADLINE_S = 20.0


@pytest.fixture
def device_gate() -> gate.DeviceGate:
    return gate.DeviceGate(torch.device("meta"))


def waits(one: gate.DeviceGate, count: int) -> None:
    """Returns once ``count`` threads wait at the gate."""
    with one._changed:
        assert one._changed.wait_for(lambda: len(one._waiters) >= count, DEADLINE_S)


class Notified(gate.DeviceGate):
    """Tells waiters of every arrival, so that a test can wait for one."""

    def _may_go(self, hold: gate.Hold) -> bool:
        self._changed.notify_all()
        return super()._may_go(hold)


def test_gate_shared_seats_go_together(device_gate: gate.DeviceGate) -> None:
    inside = threading.Barrier(3)

    def work(_: int) -> None:
        with device_gate.seat(exclusive=False):
            inside.wait(DEADLINE_S)  # only passes if all three hold a seat at once

    run_threads(3, work, DEADLINE_S)


@pytest.mark.parametrize("kind", ["seat", "capture"])
def test_gate_exclusive_holder_is_alone(device_gate: gate.DeviceGate, kind: str) -> None:
    inside, most = 0, 0
    lock = threading.Lock()

    def work(i: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            scope = device_gate.capture() if kind == "capture" else device_gate.seat(exclusive=True)
            with scope:
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1

    run_threads(4, work, DEADLINE_S)
    assert most == 1 and inside == 0


def test_gate_two_holders_that_capture_do_not_wait_for_each_other(device_gate: gate.DeviceGate) -> None:
    both_seated = threading.Barrier(2)
    captured: list[int] = []

    def work(i: int) -> None:
        with device_gate.seat(exclusive=False):
            both_seated.wait(DEADLINE_S)  # 1: both hold a seat
            with device_gate.capture():  # 2: both ask to capture
                captured.append(i)

    run_threads(2, work, DEADLINE_S)
    assert sorted(captured) == [0, 1]


def test_gate_capture_comes_before_new_seats() -> None:
    one = Notified(torch.device("meta"))
    order: list[str] = []
    first_in, release = threading.Event(), threading.Event()

    def holder() -> None:
        with one.seat(exclusive=True):
            first_in.set()
            assert release.wait(DEADLINE_S)

    def seat() -> None:
        with one.seat(exclusive=True):
            order.append("seat")

    def capture() -> None:
        with one.capture():
            order.append("capture")

    threads = [threading.Thread(target=f, daemon=True) for f in (holder, seat, capture)]
    threads[0].start()
    assert first_in.wait(DEADLINE_S)  # 1: the holder is in
    threads[1].start()
    waits(one, 1)  # 2: a seat is asked for
    threads[2].start()
    waits(one, 2)  # 3: a capture is asked for, later
    release.set()  # 4: both may go; the capture goes first
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == ["capture", "seat"]


def test_gate_timeout_names_the_holder_and_shows_its_stack(
    device_gate: gate.DeviceGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.05")
    monkeypatch.setattr(gate, "all_gates", lambda: [device_gate])
    seated, release = threading.Event(), threading.Event()

    def the_slow_holder() -> None:
        with device_gate.seat(exclusive=True):
            seated.set()
            release.wait(DEADLINE_S)

    thread = threading.Thread(target=the_slow_holder, name="slow", daemon=True)
    thread.start()
    assert seated.wait(DEADLINE_S)
    try:
        with pytest.raises(GateTimeout, match="'slow' holds an exclusive seat") as caught, device_gate.capture():
            pass
        assert "the_slow_holder" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    finally:
        release.set()
        thread.join(DEADLINE_S)
    with device_gate.capture():  # the waiter left nothing behind
        pass


def test_gate_deadline_stands_still_while_the_holder_compiles(
    device_gate: gate.DeviceGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.05")
    monkeypatch.setattr(gate, "POLL_S", 0.01)
    seated, release = threading.Event(), threading.Event()

    def holder() -> None:
        ident = threading.get_ident()
        gate.compiling[ident] = 0.0
        try:
            with device_gate.seat(exclusive=True):
                seated.set()
                release.wait(DEADLINE_S)
        finally:
            del gate.compiling[ident]

    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    assert seated.wait(DEADLINE_S)
    timer = threading.Timer(0.5, release.set)  # ten deadlines later
    timer.start()
    with device_gate.seat(exclusive=True):
        assert release.is_set()
    thread.join(DEADLINE_S)


def test_gate_timeout_setting_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "soon")
    with pytest.raises(GraphsafeError, match="GRAPHSAFE_TIMEOUT_S"):
        wait_for(threading.Condition(), lambda: True, None, "nothing")


def test_gate_seats_on_two_devices_taken_in_opposite_orders_do_not_deadlock() -> None:
    gates = [gate.DeviceGate(torch.device("cuda", i)) for i in range(2)]
    first = threading.Barrier(2)

    def work(i: int) -> None:
        with gates[i].seat(exclusive=True):
            first.wait(DEADLINE_S)  # 1: each holds its own
            with gates[1 - i].seat(exclusive=True):  # 2: each wants the other's
                pass

    run_threads(2, work, DEADLINE_S)


def test_gate_released_gives_seats_back_and_takes_them_again(device_gate: gate.DeviceGate) -> None:
    log: list[str] = []

    def other() -> None:
        with device_gate.seat(exclusive=True):
            log.append("other")

    seat = device_gate.seat(exclusive=True, on_take=lambda: log.append("take"), on_give=lambda: log.append("give"))
    with seat, gate.released():
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)  # hangs unless the seat was given back
    assert log == ["take", "give", "other", "take", "give"]


def test_gate_nothing_waits_inside_the_threads_own_capture(device_gate: gate.DeviceGate) -> None:
    with device_gate.capture():
        with device_gate.seat(exclusive=True), gate.released():
            pass
        with pytest.raises(CaptureError, match="inside a capture"), device_gate.capture():
            pass


def test_seat_left_by_another_thread_raises_and_is_free(device_gate: gate.DeviceGate) -> None:
    scope = device_gate.seat(exclusive=True)
    scope.__enter__()

    def leave(_: int) -> None:
        with pytest.raises(WrongThreadError):
            scope.__exit__(None, None, None)

    run_threads(1, leave, DEADLINE_S)
    with device_gate.capture():
        pass


def test_seat_of_one_asyncio_task_is_not_anothers() -> None:
    async def holder(context, entered: asyncio.Event, leave: asyncio.Event) -> None:
        with context.eager():
            entered.set()
            await leave.wait()

    async def main(context) -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(holder(context, entered, leave), name="first")
        await entered.wait()
        with pytest.raises(WrongThreadError, match="first"), context.eager():
            pass
        leave.set()
        await task
        with context.eager():  # free again
            pass

    with thread_context("cpu") as context:
        asyncio.run(main(context))


def test_wait_for_logs_a_report_when_it_has_no_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "0.02")
    condition = threading.Condition()
    with condition:
        assert wait_for(condition, lambda: "the goods" in caplog.text, None, "the goods")
    assert "has waited" in caplog.text


def test_wait_for_returns_false_at_its_timeout() -> None:
    condition = threading.Condition()
    with condition:
        assert wait_for(condition, lambda: False, 0.01, "nothing") is False


class Interrupted(gate.DeviceGate):
    """Is interrupted at the entry of ``give``, as many times as told."""

    interrupts = 0

    def give(self, hold: gate.Hold) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        super().give(hold)


def takes_a_seat(one: gate.DeviceGate) -> None:
    """Another thread takes a seat, or this raises at the deadline."""

    def take(_: int) -> None:
        with one.seat(exclusive=True):
            pass

    run_threads(1, take, DEADLINE_S)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "5")
    return Interrupted(torch.device("meta"))


def leave_interrupted(one: Interrupted, interrupts: int, log: list[str]) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        one.seat(exclusive=True, on_take=lambda: log.append("take"), on_give=lambda: log.append("give")),
    ):
        one.interrupts = interrupts


def test_seat_is_given_back_when_an_interrupt_comes_before_that(interrupted: Interrupted) -> None:
    log: list[str] = []
    leave_interrupted(interrupted, 1, log)
    assert log == ["take", "give"]
    takes_a_seat(interrupted)


def test_thread_does_not_wait_for_a_seat_that_interrupts_made_it_lose(interrupted: Interrupted) -> None:
    log: list[str] = []
    leave_interrupted(interrupted, 2, log)
    assert log == ["take"]  # 1: it holds the seat, and has forgotten it
    with interrupted.seat(exclusive=True):  # 2: raises a GateTimeout where it waits for itself
        assert log == ["take", "give"]
    takes_a_seat(interrupted)
    assert log == ["take", "give"]


def test_abandon_gives_back_what_interrupts_made_a_thread_lose_but_no_other_threads(interrupted: Interrupted) -> None:
    log: list[str] = []
    seated, release = threading.Event(), threading.Event()
    leave_interrupted(interrupted, 2, log)

    def holder() -> None:
        with interrupted.seat(exclusive=False):
            seated.set()
            assert release.wait(DEADLINE_S)

    gate.abandon(interrupted)
    assert log == ["take", "give"]
    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    assert seated.wait(DEADLINE_S)
    kept = interrupted.seat(exclusive=False)
    with kept:
        gate.abandon(interrupted, but=tuple(gate.held()))
        assert len(interrupted._holders) == 2
        gate.abandon(interrupted)
        assert len(interrupted._holders) == 1
    release.set()
    thread.join(DEADLINE_S)
    takes_a_seat(interrupted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_waits_for_no_thread_that_it_has_not() -> None:
    seated, release = threading.Event(), threading.Event()
    one = gate.gate_for(torch.device("cpu"))

    def holder() -> None:
        with one.seat(exclusive=True):
            seated.set()
            release.wait(DEADLINE_S)

    thread = threading.Thread(target=holder, daemon=True)
    thread.start()
    assert seated.wait(DEADLINE_S)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(10)
            with thread_context("cpu") as context, context.eager():
                status = 0 if gc.isenabled() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join(DEADLINE_S)
    assert status == 0


def test_seat_that_is_just_being_taken_is_not_taken_for_lost() -> None:
    """A finaliser, a signal's handler or what runs on taking may take a seat itself."""
    device = gate.gate_for(torch.device("cpu"))
    given: list[str] = []

    def on_take() -> None:
        if not given:
            given.append("began")
            with device.seat(exclusive=False):
                pass

    with device.seat(exclusive=True, on_take=on_take, on_give=lambda: given.append("given")):
        assert given == ["began"] and [hold.kind for hold in device._holders] == [gate.Kind.EXCLUSIVE]
    assert given == ["began", "given"] and not device._holders
