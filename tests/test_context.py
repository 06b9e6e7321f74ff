"""Contexts: everything is as found on exit, RNG is the context's own, and threads do not mix."""

from __future__ import annotations

import threading

import pytest
import torch

import graphsafe as gs
from graphsafe import gate
from graphsafe.repairs import private

from .helpers import run_threads

DEADLINE_S = 30.0


def test_context_confines_autograd_and_restores_it() -> None:
    assert private.multithreading_enabled()
    with pytest.raises(KeyError), gs.thread_context("cpu"):
        assert not private.multithreading_enabled()
        raise KeyError
    assert private.multithreading_enabled()
    with pytest.raises(gs.NoContextError):
        gs.current_context()


def test_context_second_on_the_same_device_is_an_error() -> None:
    with gs.thread_context("cpu", name="first"), pytest.raises(gs.GraphsafeError, match="first"):
        gs.thread_context("cpu").__enter__()


def test_context_is_entered_once() -> None:
    context = gs.thread_context("cpu")
    with context:
        pass
    with pytest.raises(gs.GraphsafeError, match="once"):
        context.__enter__()


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "mps"])
def test_context_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(gs.GraphsafeError, match=device.split(":")[0]):
        gs.thread_context(device)


def test_context_current_is_the_innermost_or_the_devices() -> None:
    with gs.thread_context("cpu") as context:
        assert gs.current_context() is context
        assert gs.current_context("cpu") is context
        assert context.device == torch.device("cpu") and context.stream is None and context.pool is None
        context.synchronize()


def test_eager_draws_from_the_contexts_generator_alone() -> None:
    def draws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        with gs.thread_context("cpu", seed=seed) as context:
            with context.eager():
                first = torch.rand(8)
            torch.rand(3)  # outside: the default generator
            with context.eager():
                return first, torch.rand(8)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b = draws(1), draws(1)
    torch.manual_seed(5)
    draws(2)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], a[1])
    torch.manual_seed(5)
    with gs.thread_context("cpu", seed=3) as context, context.eager():
        torch.rand(100)
    assert torch.equal(torch.rand(3), expected)  # the default generator is where it was


def test_eager_draws_are_a_solo_runs_whatever_other_threads_draw() -> None:
    def series(seed: int) -> list[torch.Tensor]:
        found = []
        with gs.thread_context("cpu", seed=seed) as context:
            for _ in range(50):
                with context.eager():
                    found.append(torch.rand(4))
        return found

    alone = [series(seed) for seed in range(4)]
    together: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def work(i: int) -> None:
        together[i] = series(i)

    run_threads(4, work, DEADLINE_S)
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_context_seed_comes_from_the_spawner_and_is_distinct() -> None:
    def seeds() -> list[int]:
        torch.manual_seed(11)
        workers = [gs.spawn(lambda: gs.current_context().seed, device="cpu") for _ in range(4)]
        return [worker.result(DEADLINE_S) for worker in workers]

    first = seeds()
    assert len(set(first)) == 4
    assert seeds() == first


def test_context_of_another_thread_cannot_be_used() -> None:
    with gs.thread_context("cpu", name="owner") as context:

        def work(_: int) -> None:
            with pytest.raises(gs.WrongThreadError, match="owner"):
                context.eager()
            with pytest.raises(gs.WrongThreadError):
                context.__exit__(None, None, None)

        run_threads(1, work, DEADLINE_S)
        assert not context.closed


def test_eager_after_the_end_is_an_error() -> None:
    with gs.thread_context("cpu") as context:
        pass
    with pytest.raises(gs.NoContextError):
        context.eager()


def test_context_errors_pickle() -> None:
    import pickle

    for error in (
        gs.NoContextError("capture()", "cpu"),
        gs.WrongThreadError("x", "a", "b"),
        gs.CaptureError("what", "op", "f.py:1", "cure", ("other",)),
        gs.GateTimeout("x", 1.0, "report"),
        gs.ShapeMismatchError("x", (1,), (2,)),
        gs.RingClosed("produce"),
        gs.UnsupportedTorchError("2.8", "2.9"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


def test_import_under_an_old_torch_says_which_is_needed() -> None:
    import subprocess
    import sys

    code = "import torch; torch.__version__ = '2.8.1+cpu'\nimport graphsafe"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "UnsupportedTorchError" in done.stderr and "2.9" in done.stderr


def test_stats_show_contexts_by_name_also_after_their_end() -> None:
    with gs.thread_context("cpu", name="the-one") as context:
        with gs.capture() as graph:
            torch.ones(2) + 1
        graph.replay()
        row = next(c for c in gs.stats().contexts if c.name == "the-one")
        assert row.alive and row.captures == 1 and row.replays == 1
        assert "the-one" in str(gs.stats())
        assert context.counters.failed_captures == 0
    row = next(c for c in gs.stats().contexts if c.name == "the-one")
    assert not row.alive and row.captures == 1
    assert "the-one (ended)" in str(gs.stats())


def test_context_nested_in_a_capture_is_an_error() -> None:
    with gs.thread_context("cpu"), gs.capture(), pytest.raises(gs.GraphsafeError, match="inside a capture"):
        gs.thread_context("cpu").__enter__()


def test_seeding_reaches_the_default_generator_while_another_thread_draws_from_its_own() -> None:
    gs.install()
    seated, seeded, release = threading.Event(), threading.Event(), threading.Event()
    draws: list[torch.Tensor] = []

    def worker() -> None:
        with gs.current_context().eager():
            draws.append(torch.rand(4))
            seated.set()  # 1: its generator stands in for the default one
            assert release.wait(20)
            draws.append(torch.rand(4))

    def seeder() -> None:
        torch.manual_seed(1234)  # 2: has to wait
        seeded.set()

    with gs.thread_context("cpu", seed=7) as context, context.eager():
        expected = [torch.rand(4), torch.rand(4)]
    one = gs.spawn(worker, device="cpu", seed=7)
    assert seated.wait(20)
    other = threading.Thread(target=seeder, daemon=True)
    other.start()
    assert not seeded.wait(0.1)
    release.set()  # 3: the worker draws on, then gives its seat back
    one.result(20)
    other.join(20)
    assert all(torch.equal(a, b) for a, b in zip(draws, expected, strict=True))
    found = torch.rand(4)
    torch.manual_seed(1234)
    assert torch.equal(found, torch.rand(4))


def test_eager_keeps_what_the_contexts_generator_was_drawn_from_by_name() -> None:
    with gs.thread_context("cpu", seed=3) as context:
        numbers = []
        for _ in range(3):
            with context.eager():
                numbers.append(torch.rand((), generator=context.generator).item())
        assert len(set(numbers)) == 3
        assert context.counters.eager_steps == 3


def test_eager_block_made_outside_a_task_may_be_entered_in_it() -> None:
    import asyncio

    async def main(block) -> None:
        with block:
            pass

    with gs.thread_context("cpu") as context:
        asyncio.run(main(context.eager()))
        with context.eager():
            pass


def test_stats_do_not_grow_with_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(gs.stats().contexts)
    monkeypatch.setattr(gs.context, "MAX_ENDED", before + 2)
    for number in range(6):
        with gs.thread_context("cpu", name=f"many-{number}") as context, context.eager():
            pass
    assert len(gs.stats().contexts) == before + 3
    assert next(c for c in gs.stats().contexts if c.name == "(others)").eager_steps == 4


@pytest.mark.parametrize(("owner", "name"), [(gate.Scope, "_leave"), (gate.DeviceGate, "give")])
def test_context_end_gives_back_a_seat_that_a_caught_interrupt_left(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSAFE_TIMEOUT_S", "5")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = torch.get_rng_state()
    with gs.thread_context("cpu", seed=1) as context:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), context.eager():
            torch.rand(3)
            # 1: the interrupt comes at the entry of the function that would give the seat back
            patch.setattr(owner, name, interrupt)
        assert context.gate._holders
    # 2: no exception has passed through the context
    assert torch.equal(torch.get_rng_state(), before)

    def other(_: int) -> None:
        with gs.thread_context("cpu", seed=2) as own, own.eager():
            pass

    run_threads(1, other, DEADLINE_S)


def test_context_end_leaves_a_seat_alone_that_was_taken_before_it() -> None:
    cpu = gate.gate_for(torch.device("cpu"))
    with cpu.seat(exclusive=True):
        with gs.thread_context("cpu", seed=1) as context, context.eager():
            pass
        with pytest.raises(KeyError), gs.thread_context("cpu", seed=1):
            raise KeyError
        assert len(cpu._holders) == 1
    assert not cpu._holders
