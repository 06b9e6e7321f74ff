"""What a failed capture says, what it blames, and that nothing is left of it: on the CPU and on a device acted out."""

from __future__ import annotations

import ctypes
import dis
import gc
import importlib
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe import collector, compile_gate, cuda_errors, gate, sessions
from graphsafe.capture import capture_call, capture_with_retries
from graphsafe.repairs import nested_backward, private, synchronize, thread_errors

from . import fake_cuda
from .fake_cuda import NOT_PERMITTED, FakeCuda, context_on, cuda_error
from .helpers import DEADLINE_S, SHOWS_FAULTS, join_threads, plain_torch, run_program

captures = importlib.import_module("graphsafe.capture")  # the package has a class of that name
HERE = Path(__file__).name


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.patch(monkeypatch)


@pytest.fixture(autouse=True)
def no_notes_of_other_tests() -> Iterator[None]:
    cuda_errors._notes.clear()
    yield
    cuda_errors._notes.clear()


def in_thread(work: Callable[[], Any], name: str = "other") -> threading.Thread:
    """A started thread, whose own error ends it quietly."""

    def body() -> None:
        with suppress(RuntimeError):
            work()

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def die(error: BaseException) -> None:
    raise error


def notes() -> list[str]:
    return [note.text for note in cuda_errors._notes]


# What an error says


def test_capture_error_shows_its_thread_and_pickles_with_what_others_saw() -> None:
    error = gs.CaptureError("It failed.", "aten.item", "f.py:3", "Do not.", ("'b': sync",), thread="drafter")
    error.attach(("'c': sync too",))
    error.foreign = True
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.args == error.args and again.foreign
    assert again.thread == "drafter" and again.others == ("'b': sync", "'c': sync too")
    for part in ("The thread: 'drafter'", "aten.item", "f.py:3", "Do not.", "another thread: 'b': sync"):
        assert part in str(error)
    assert gs.CaptureError("It failed.").thread is None


def test_capture_on_the_cpu_names_the_thread_that_captured() -> None:
    def work() -> None:
        with gs.capture():
            torch.ones(2, requires_grad=True).sum().backward()
            raise gs.CaptureError("mine")

    def reads() -> None:
        x = torch.rand(2)
        with gs.capture():
            (x * 2).sum().item()

    with pytest.raises(gs.CaptureError) as caught:
        gs.spawn(reads, device="cpu", name="reader").result(DEADLINE_S)
    assert caught.value.thread == "reader" and HERE in str(caught.value.location)
    with pytest.raises(gs.CaptureError, match="mine"):
        gs.spawn(work, device="cpu").result(DEADLINE_S)


def test_capture_says_the_line_the_cause_and_the_cure_of_the_blocks_own_error(cuda: FakeCuda) -> None:
    with context_on(cuda) as context:
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            cuda.host_read()
        error = caught.value
        assert HERE not in error.what and HERE.replace("test_capture_errors", "fake_cuda") in str(error.location)
        assert "not permitted" in error.what and "host reads" in str(error.cure).lower()
        assert error.thread == threading.current_thread().name and not error.foreign and error.others == ()
        assert context.counters.failed_captures == 1


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("CUDA error: capturing stream has unjoined work", "wait_stream"),
        ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream", "legacy default"),
        ("CUDA error: dependency created on uncaptured work in another stream", "hand-overs"),
        ("CUDA error: operation would result in a merge of two independent capture sequences", "Do hand-overs"),
        ("CUDA error: operation not permitted on an event last recorded in a capturing stream", "event"),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "default generator"),
        ("Offset increment outside graph capture encountered unexpectedly.", "default generator"),
    ],
)
def test_capture_knows_a_cure_for_what_the_block_did_and_does_not_try_it_again(
    cuda: FakeCuda, text: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LATE_S", 0.0)
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        raise cuda_error(text)

    with context_on(cuda) as context:
        with pytest.raises(gs.CaptureError) as caught:
            capture_with_retries(context, body, lambda: None)
        assert cure in str(caught.value.cure) and not caught.value.foreign and len(calls) == 1


# Whom it blames


def break_from_another_thread(cuda: FakeCuda, *, noted: bool = True) -> None:
    """Another thread synchronises the device, in a seat of its own where its error is noted."""

    def work() -> None:
        with gs.thread_context("cpu") as context, context.eager() if noted else context.released():
            cuda.break_captures()

    join_threads([in_thread(work, "synchroniser")])


def test_capture_that_another_thread_broke_shows_that_threads_error(cuda: FakeCuda) -> None:
    with context_on(cuda), pytest.raises(gs.CaptureError) as caught, gs.capture():
        break_from_another_thread(cuda)
        cuda.operation()
    error = caught.value
    assert error.foreign and len(error.others) == 1
    assert "'synchroniser'" in error.others[0] and "not permitted" in error.others[0] and ".py:" in error.others[0]
    assert error.others[0] in str(error) and pickle.loads(pickle.dumps(error)).others == error.others


def test_capture_that_another_thread_broke_fails_at_its_end_where_the_block_saw_nothing(cuda: FakeCuda) -> None:
    with context_on(cuda) as context:
        before = cuda.state()
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            break_from_another_thread(cuda)
        assert caught.value.foreign and "'synchroniser'" in caught.value.others[0]
        assert cuda.state() == before and context.counters.captures == 0


def test_capture_waits_for_the_error_of_whoever_broke_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, waiting = threading.Event(), threading.Event()
    wait_for = cuda_errors._changed.wait_for

    def told(predicate: Callable[[], Any], timeout: float) -> Any:
        if timeout > 0:
            waiting.set()
        return wait_for(predicate, timeout)

    def work() -> None:
        try:
            cuda.break_captures()
        except RuntimeError as error:
            broken.set()  # 1. the capture is broken, and nobody knows why
            assert waiting.wait(DEADLINE_S)  # 3. the capture asks
            cuda_errors.note(error)  # 4. and is told

    monkeypatch.setattr(cuda_errors._changed, "wait_for", told)
    monkeypatch.setattr(sessions, "LATE_S", DEADLINE_S)
    with context_on(cuda), pytest.raises(gs.CaptureError) as caught, gs.capture():
        thread = in_thread(work, "late")
        assert broken.wait(DEADLINE_S)
        cuda.operation()  # 2. fails
    join_threads([thread])
    assert caught.value.foreign and "'late'" in caught.value.others[0]


def test_capture_shows_no_error_from_before_it_began_and_none_of_its_own_thread(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LATE_S", 0.0)
    monkeypatch.setattr(sessions, "MARGIN_S", 0.0)
    join_threads([in_thread(lambda: cuda_errors.note(cuda_error("CUDA error: earlier")))])
    with context_on(cuda), pytest.raises(gs.CaptureError) as caught, gs.capture():
        cuda_errors.note(cuda_error("CUDA error: mine"))
        cuda.broken.extend(cuda.capturing.values())
        cuda.operation()
    assert caught.value.foreign and caught.value.others == () and len(notes()) == 2


def test_capture_blames_the_error_that_the_block_swallowed_where_it_can_be_known(cuda: FakeCuda) -> None:
    def swallows() -> None:
        try:
            cuda.host_read()
        except RuntimeError:
            cuda.operation()

    with context_on(cuda), pytest.raises(gs.CaptureError) as caught, gs.capture():
        swallows()
    assert "not permitted" in caught.value.what and not caught.value.foreign


def test_capture_begun_while_another_failure_is_handled_does_not_blame_that_one(cuda: FakeCuda) -> None:
    with context_on(cuda):
        try:
            with gs.capture():
                cuda.host_read()
        except gs.CaptureError as first:
            assert not first.foreign
            with pytest.raises(gs.CaptureError) as caught, gs.capture():
                break_from_another_thread(cuda)
                cuda.operation()
    assert caught.value.foreign and "previous error" in caught.value.what


def test_capture_that_cannot_begin_is_tried_again_and_leaves_nothing(cuda: FakeCuda) -> None:
    undone: list[int] = []
    with context_on(cuda) as context:
        before = cuda.state()
        cuda.fail_begin.append(cuda_error(NOT_PERMITTED))
        with pytest.raises(gs.CaptureError) as caught, gs.capture():
            raise AssertionError("the block does not run")
        assert caught.value.foreign and cuda.state() == before
        cuda.fail_begin.append(cuda_error(NOT_PERMITTED))
        graph, value = capture_with_retries(context, lambda: 5, lambda: undone.append(1))
        assert value == 5 and undone == [1] and cuda.state() == before
        graph.replay()
        assert cuda.graphs[-1].replays == 1


def test_capture_that_foreign_work_broke_is_tried_again_and_one_of_its_own_is_not(cuda: FakeCuda) -> None:
    calls: list[int] = []

    def broken_once() -> int:
        calls.append(1)
        if len(calls) == 1:
            break_from_another_thread(cuda)
        cuda.operation()
        return len(calls)

    with context_on(cuda) as context:
        assert capture_with_retries(context, broken_once, lambda: None)[1] == 2
        assert (context.counters.captures, context.counters.failed_captures) == (1, 1)
        calls.clear()
        with pytest.raises(gs.CaptureError):
            capture_with_retries(context, lambda: (calls.append(1), cuda.host_read()), lambda: None)
        assert len(calls) == 1


def test_capture_broken_for_good_shows_the_last_errors_of_the_other_thread(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "FIRST_PAUSE_S", 0.0)

    def body() -> None:
        break_from_another_thread(cuda)
        cuda.operation()

    with context_on(cuda) as context, pytest.raises(gs.CaptureError) as caught:
        capture_with_retries(context, body, lambda: None)
    assert context.counters.failed_captures == captures.NUM_RETRIES + 1
    assert caught.value.foreign and any("'synchroniser'" in other for other in caught.value.others)


# What is noted


def test_errors_of_seats_workers_and_executors_are_noted_once(cuda: FakeCuda) -> None:
    def in_a_seat() -> None:
        with gs.current_context().eager():
            raise cuda_error("CUDA error: in a seat")

    def outside() -> None:
        raise cuda_error("CUDA error: outside of seats")

    for work in (in_a_seat, outside):
        with pytest.raises(RuntimeError):
            gs.spawn(work, device="cpu", name="worker").result(DEADLINE_S)
    with gs.Executor(1, "cpu") as pool:
        for work in (in_a_seat, outside):
            with pytest.raises(RuntimeError):
                pool.submit(work).result(DEADLINE_S)
    found = [
        (note.thread.partition("-")[0], note.text.partition(": ")[2].partition(" The")[0])
        for note in cuda_errors._notes
    ]
    seat, out = "CUDA error: in a seat", "CUDA error: outside of seats"
    assert found == [("worker", seat), ("worker", out), ("executor", seat), ("executor", out)]
    assert all(HERE in text for text in notes())


def fails_to_synchronize(device: Any = None) -> None:
    raise RuntimeError("CUDA error: from synchronize")


def test_error_of_a_repaired_synchronize_is_noted() -> None:
    module = types.ModuleType("torch.cuda")
    module.synchronize = fails_to_synchronize  # type: ignore[attr-defined]
    synchronize.repair(module)
    try:
        with pytest.raises(RuntimeError):
            fails_to_synchronize()
    finally:
        synchronize._patches._undo.pop()()
    assert len(notes()) == 1 and "from synchronize" in notes()[0]


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (cuda_error("CUDA error: an illegal memory access"), True),
        (RuntimeError("CUDA error: operation not permitted"), True),
        (RuntimeError("Offset increment outside graph capture encountered unexpectedly."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("the user's own"), False),
        (ValueError("CUDA error in the user's words"), False),
        (gs.GraphsafeError("about CUDA"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_errors_that_come_from_cuda_are_noted(error: BaseException, counts: bool) -> None:
    cuda_errors.note(error)
    cuda_errors.note(error)
    assert len(notes()) == counts


def test_notes_are_bounded_and_keep_nothing_alive() -> None:
    for i in range(3 * cuda_errors.MAX_NOTES):
        cuda_errors.note(cuda_error(f"CUDA error: {i}"))
    assert len(notes()) == cuda_errors.MAX_NOTES
    assert all(isinstance(value, str | int | float) for note in cuda_errors._notes for value in vars(note).values())


def test_thread_that_dies_of_a_cuda_error_is_noted_under_install_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    usual = threading.excepthook

    def thread_dies(text: str) -> None:
        thread = threading.Thread(target=die, args=(cuda_error(text),), name="dying")
        thread.start()
        thread.join(DEADLINE_S)

    with plain_torch():
        thread_dies("CUDA error: on plain torch")
        assert notes() == [] and len(printed) == 1
        gs.install()
        thread_dies("CUDA error: under install")
        assert "under install" in notes()[0] and cuda_errors._notes[0].thread == "dying" and len(printed) == 2
        gs.uninstall()
        assert threading.excepthook is usual
        thread_dies("CUDA error: afterwards")
        assert len(notes()) == 1 and len(printed) == 3


def test_excepthook_that_someone_else_has_set_since_stays_and_ours_falls_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    thread_errors.repair(threading)
    ours = threading.excepthook

    def theirs(args: Any) -> None:
        ours(args)

    monkeypatch.setattr(threading, "excepthook", theirs)
    thread_errors.undo()
    assert threading.excepthook is theirs
    thread = threading.Thread(target=die, args=(cuda_error("CUDA error: later"),))
    thread.start()
    thread.join(DEADLINE_S)
    assert notes() == [] and len(printed) == 1


# Compiles


def test_compile_inside_a_capture_says_why_it_recompiles() -> None:
    with plain_torch():
        gs.install()
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        captured = gate.gate_for(torch.device("cuda", 0)).capture()
        with pytest.raises(compile_gate.CompileInCapture) as caught, captured:
            compiled(torch.ones(2, dtype=torch.float64))
        assert "recompiles because" in caught.value.what and "dtype" in caught.value.what
        assert caught.value.thread == threading.current_thread().name
        fresh = torch.compile(lambda x: x - 1, backend="eager")
        with pytest.raises(compile_gate.CompileInCapture) as first, gate.gate_for(torch.device("cuda", 0)).capture():
            fresh(torch.ones(2))
        assert "recompiles because" not in first.value.what and "TORCH_LOGS" in str(first.value.cure)


# Nested backwards

DEEP = """
import torch
from torch.utils.checkpoint import checkpoint

threads = []
class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        threads.append(threading.get_ident())
        return gradient

def nested(x, depth):
    return Look.apply(x) if depth == 0 else checkpoint(nested, x, depth - 1, use_reentrant=True)

with torch.autograd.set_multithreading_enabled(False):
    nested(torch.ones(2, requires_grad=True), 70).sum().backward()
import graphsafe as gs
with gs.thread_context("cpu"):
    with gs.capture():
        pass
    nested(torch.ones(2, requires_grad=True), 70).sum().backward()
print(json.dumps([ident == threading.get_ident() for ident in threads]), flush=True)
import os
os._exit(0)  # torch's pool thread may make a usual end of the process an abort
"""


def nested(x: torch.Tensor, depth: int) -> torch.Tensor:
    return x * 1 if depth == 0 else checkpoint(nested, x, depth - 1, use_reentrant=True)


class InnerBackward(torch.autograd.Function):
    """Its backward calls torch.autograd.grad, ``depth`` deep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones_like(gradient, requires_grad=True)
                torch.autograd.grad(InnerBackward.apply(x, ctx.depth - 1), x, torch.ones_like(gradient))
        return gradient, None


def test_backward_nested_too_deep_leaves_its_thread_on_plain_torch_and_outside_of_captures() -> None:
    plain, outside = run_program(DEEP)
    assert plain == outside
    if SHOWS_FAULTS:
        assert not plain, "the pinned torch no longer shows the fault: the test is no proof any more"


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(
    "deep", [nested, lambda x, depth: InnerBackward.apply(x, depth)], ids=["checkpoint", "Function"]
)
def test_backward_nested_too_deep_inside_a_capture_is_refused(deep: Callable[..., Any], installed: bool) -> None:
    with plain_torch():
        if installed:
            gs.install()
        x = torch.ones(2, requires_grad=True)
        with gs.thread_context("cpu"):
            limit = nested_backward.MAX_DEPTH
            with gs.capture() as graph:
                deep(x, limit).sum().backward()
            graph.replay()
            with pytest.raises(gs.CaptureError, match="nested too deep") as caught, gs.capture():
                deep(x, limit + 1).sum().backward()
            assert "use_reentrant=False" in str(caught.value.cure) and HERE in str(caught.value.location)
            assert gate.capturing() is None and nested_backward._per_thread.depth == 0
            with gs.capture():
                deep(x, 3).sum().backward()


def test_engine_that_counts_is_torchs_own_and_dynamo_leaves_it_alone() -> None:
    with plain_torch(), gs.thread_context("cpu"):
        with gs.capture():
            pass
        engine = torch.autograd.Variable._execution_engine
        assert isinstance(engine, torch._C._ImperativeEngine) and torch.autograd._is_checkpoint_valid()
        nested_backward.watch(lambda: None)
        assert torch.autograd.Variable._execution_engine is engine

        def step(x: torch.Tensor) -> torch.Tensor:
            y = (x * 2).sum()
            y.backward()
            return y.detach() + 1

        x = torch.ones(2, requires_grad=True)
        compiled = torch.compile(step, backend="eager")
        assert compiled(x).item() == 5 and x.grad is not None and x.grad.tolist() == [2.0, 2.0]


# Nothing is left


def snapshot(context: Any) -> dict[str, Any]:
    cpu = context.device.type == "cpu"
    return {
        "held": list(gate.held()),
        "gates": [len(one._holders) + len(one._waiters) for one in gate.all_gates()],
        "capturing": gate.capturing(),
        "collector": (gc.isenabled(), len(collector.collector_guard._users)),
        "modes": private.open_modes(),
        "default": private.state_bytes(torch.default_generator.get_state()) if cpu else 0,
        "generator": private.state_bytes(context.generator.get_state()) if cpu else context.generator.state.offset,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "saved": context._saved is None,
    }


class Place:
    """Where a capture runs: the CPU, or the device that is acted out."""

    def __init__(self, kind: str, cuda: FakeCuda | None) -> None:
        self.kind, self.cuda = kind, cuda

    def context(self) -> AbstractContextManager[Any]:
        return gs.thread_context("cpu", seed=1) if self.cuda is None else context_on(self.cuda)

    def state(self, context: Any) -> dict[str, Any]:
        return snapshot(context) | (self.cuda.state() if self.cuda is not None else {})

    def work(self) -> None:
        if self.cuda is None:
            (torch.ones(3) * 2 + torch.rand(3)).sum()
        else:
            self.cuda.operation()

    def check_next(self, context: Any) -> None:
        before = context.counters.captures
        with gs.capture() as graph:
            self.work()
        graph.replay()
        assert context.counters.captures == before + 1
        graph.reset()


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(request.param, fake_cuda.patch(monkeypatch) if request.param == "cuda" else None)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("mine"),
        RuntimeError("mine, about nothing"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_the_users_inside_a_capture_passes_and_leaves_nothing(place: Place, error: BaseException) -> None:
    with place.context() as context:
        place.check_next(context)
        before = place.state(context)
        with pytest.raises(type(error)) as caught, gs.capture():
            place.work()
            raise error
        assert caught.value is error and place.state(context) == before
        assert context.counters.failed_captures == 1
        place.check_next(context)


def test_users_error_in_a_capture_that_was_broken_meanwhile_is_still_the_users(cuda: FakeCuda) -> None:
    with context_on(cuda), pytest.raises(RuntimeError, match="about nothing") as caught, gs.capture():
        break_from_another_thread(cuda)
        raise RuntimeError("mine, about nothing")
    assert not isinstance(caught.value, gs.CaptureError)


def test_block_that_leaves_another_stream_and_modes_behind_leaves_nothing(cuda: FakeCuda) -> None:
    with context_on(cuda) as context:
        before = cuda.state()
        for fails in (False, True):
            with suppress(KeyError), gs.capture():
                cuda.set_stream(fake_cuda.FakeStream("another"))
                if fails:
                    raise KeyError
            assert cuda.state() == before
        assert (context.counters.captures, context.counters.failed_captures) == (1, 1)


def test_capture_left_by_return_break_and_a_closed_generator(place: Place) -> None:
    def by_return() -> gs.Graph:
        with gs.capture() as graph:
            place.work()
            return graph

    def by_generator() -> Iterator[gs.Graph]:
        with gs.capture() as graph:
            place.work()
            yield graph

    with place.context() as context:
        place.check_next(context)
        by_return().replay()
        for _ in range(2):
            with gs.capture() as graph:
                place.work()
                break
        graph.replay()
        before = place.state(context) | {"generator": None}
        steps = by_generator()
        abandoned = next(steps)
        assert gate.capturing() is not None
        steps.close()  # type: ignore[attr-defined]
        assert place.state(context) | {"generator": None} == before
        with pytest.raises(gs.GraphsafeError, match="capture failed"):
            abandoned.replay()
        place.check_next(context)


def test_capture_left_by_another_thread_is_an_error_there_and_goes_on_here(place: Place) -> None:
    with place.context() as context:
        block = gs.capture()
        graph = block.__enter__()
        place.work()
        errors: list[BaseException] = []

        def leave() -> None:
            try:
                block.__exit__(None, None, None)
            except gs.WrongThreadError as error:
                errors.append(error)

        join_threads([in_thread(leave)])
        assert len(errors) == 1 and gate.capturing() is not None
        block.__exit__(None, None, None)
        graph.replay()
        place.check_next(context)


def test_graph_reset_inside_its_own_capture_is_an_error(place: Place) -> None:
    with place.context() as context:
        with gs.capture() as graph:
            place.work()
            with pytest.raises(gs.GraphsafeError, match="inside its own capture"):
                graph.reset()
        graph.replay()
        place.check_next(context)


def test_context_closed_inside_a_capture_is_an_error_and_the_capture_goes_on() -> None:
    def work() -> None:
        context = gs.attach("cpu")
        with gs.capture() as graph:
            torch.ones(2) + 1
            with pytest.raises(gs.GraphsafeError, match="capture"):
                context.close()
        graph.replay()
        context.close()

    gs_errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            gs_errors.append(error)

    join_threads([in_thread(body)])
    assert gs_errors == []


def test_context_left_by_an_error_with_a_capture_open_puts_everything_back() -> None:
    modes, collecting = private.open_modes(), gc.isenabled()
    default = torch.default_generator.get_state()
    block = gs.capture()
    with pytest.raises(KeyError), gs.thread_context("cpu", seed=1):
        block.__enter__()
        torch.rand(2)
        raise KeyError
    assert gate.capturing() is None and gate.held() == [] and private.open_modes() == modes
    assert gc.isenabled() == collecting and torch.equal(torch.default_generator.get_state(), default)
    with gs.thread_context("cpu") as context:
        Place("cpu", None).check_next(context)


def test_capture_that_is_given_up_from_outside_its_block_puts_everything_back(place: Place) -> None:
    with place.context() as context:
        place.check_next(context)
        before = place.state(context)
        block = gs.capture()
        graph = block.__enter__()
        place.work()
        gate.abandon(context.gate)  # as an executor does after a call
        assert place.state(context) == before
        block.__exit__(None, None, None)  # does no harm
        with pytest.raises(gs.GraphsafeError, match="nothing to replay"):
            graph.replay()
        graph.reset()
        place.check_next(context)


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_worker_that_dies_inside_a_capture_leaves_the_device_to_others(error: type[BaseException]) -> None:
    def dies() -> None:
        with gs.capture():
            torch.rand(3)
            raise error

    def works() -> float:
        with gs.capture() as graph:
            x = torch.ones(2) * 3
        graph.replay()
        return float(x.sum())

    default = torch.default_generator.get_state()
    with pytest.raises(error):
        gs.spawn(dies, device="cpu", seed=1).result(DEADLINE_S)
    assert torch.equal(torch.default_generator.get_state(), default) and gc.isenabled()
    assert gs.spawn(works, device="cpu", seed=2).result(DEADLINE_S) == 6.0


def test_worker_that_is_interrupted_inside_a_capture_leaves_nothing() -> None:
    inside, stop = threading.Event(), threading.Event()
    ident: list[int] = []

    def spins() -> None:
        ident.append(threading.get_ident())
        with gs.capture():
            x = torch.ones(2)
            inside.set()
            while not stop.is_set():
                x = x + 1

    worker = gs.spawn(spins, device="cpu", seed=1)
    assert inside.wait(DEADLINE_S)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident[0]), ctypes.py_object(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.result(DEADLINE_S)
    finally:
        stop.set()
    assert gc.isenabled() and not any(one._holders or one._waiters for one in gate.all_gates())
    with gs.thread_context("cpu") as context:
        Place("cpu", None).check_next(context)


OURS = (
    "capture.py",
    "sessions.py",
    "graph.py",
    "gate.py",
    "collector.py",
    "private.py",
    "nested_backward.py",
    "recording.py",
)
# Python looks for a signal, or an exception set for the thread, after these.
CHECKED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")


class Interrupts:
    """Raises KeyboardInterrupt at the ``n``-th place in our code where Python would; counts them."""

    def __init__(self, n: int = 0) -> None:
        self.n, self.count, self.where = n, 0, ""
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Interrupts:
        sys.settrace(self._first)  # newer Pythons trace instructions once a frame has asked for it before
        (lambda: None)()
        sys.settrace(None)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _first(self, frame: FrameType, event: str, argument: object) -> None:
        frame.f_trace_opcodes = True

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.name not in OURS or "graphsafe" not in path.parts:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before, self._last[frame] = self._last.get(frame, ""), now
            # The first instructions of __exit__ are Python's own gap: nothing can be put around them.
            if before in CHECKED and not (before == "RESUME" and frame.f_code.co_name == "__exit__"):
                self.count += 1
                if self.count == self.n:
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._step


@pytest.mark.parametrize("way", ["capture", "capture_call"])
def test_interrupt_anywhere_in_a_capture_leaves_nothing(place: Place, way: str) -> None:
    if way == "capture_call" and place.cuda is None:
        pytest.skip("on the CPU there is no such call")

    def once(context: Any) -> None:
        if way == "capture_call":
            capture_call(context, place.work)
            return
        with gs.capture():
            place.work()

    with place.context() as context:
        once(context)
        with Interrupts() as counted:
            once(context)
    assert counted.count > 100
    for n in range(1, counted.count + 1):
        with place.context() as context:
            before = place.state(context)
            interrupts = Interrupts(n)
            try:
                with interrupts:
                    once(context)
                    raise AssertionError(f"point {n} was not reached, or the interrupt at {interrupts.where} was lost")
            except KeyboardInterrupt:
                pass
            assert place.state(context) == before, interrupts.where
            assert not context.resources(), interrupts.where
            place.check_next(context)


# Inference mode


def test_capture_in_inference_mode_makes_its_state_outside_of_it(cuda: FakeCuda) -> None:
    with context_on(cuda), torch.inference_mode():
        with gs.capture():
            assert torch.is_inference_mode_enabled()
        assert cuda.graphs[-1].generator is not None
        assert cuda.graphs[-1].generator.state.made_in_inference == [False, False]
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


def test_capture_on_the_cpu_in_inference_mode_replays_outside_of_it() -> None:
    x = torch.ones(3)
    with gs.thread_context("cpu"):
        with torch.inference_mode(), gs.capture() as graph:
            y = x * 2
        with gs.capture() as inner, torch.inference_mode():
            z = x * 3
        x.fill_(5.0)
        graph.replay()
        inner.replay()
        assert y.tolist() == [10.0] * 3 and z.tolist() == [15.0] * 3
        assert not torch.is_inference_mode_enabled()


# Bytes


def test_graph_knows_its_bytes_and_stats_have_a_row_for_each(cuda: FakeCuda) -> None:
    def grows(num_bytes: int) -> Callable[[], None]:
        def body() -> None:
            cuda.reserved_bytes += num_bytes

        return body

    with context_on(cuda) as context:
        with gs.capture() as own:
            grows(4096)()
        line = sys._getframe().f_lineno - 2
        first, _ = capture_call(context, grows(1024), shared_pool=True, name="first")
        second, _ = capture_call(context, grows(512), shared_pool=True)
        given, _ = capture_call(context, grows(256), pool=first.pool, name="given")
        assert [graph.num_bytes for graph in (own, first, second, given)] == [4096, 1024, 512, 256]
        assert first.pool == second.pool == given.pool != own.pool
        first.replay()
        first.replay()
        row = next(c for c in gs.stats().contexts if c.alive and c.name == context.name)
        assert {(g.name, g.num_bytes, g.replays, g.pool_shared) for g in row.graphs} == {
            (f"{__file__}:{line}", 4096, 0, False),
            ("first", 1024, 2, True),
            (second.name, 512, 0, True),
            ("given", 256, 0, True),
        }
        assert "grows" in second.name and row.graph_bytes == 4096 + 1024 + 512 + 256
        shown = [line for line in str(gs.stats()).splitlines() if not line.startswith("compiled ")]
        assert len(shown) == 1 + len(gs.stats().contexts)
        second.reset()
        row = next(c for c in gs.stats().contexts if c.alive and c.name == context.name)
        assert len(row.graphs) == 3


def test_graph_on_the_cpu_has_no_bytes_and_counts_its_replays() -> None:
    with gs.thread_context("cpu", name="counted") as context:
        with gs.capture() as graph:
            torch.ones(2) + 1
        graph.replay()
        row = next(c for c in gs.stats().contexts if c.alive and c.name == "counted")
        assert graph.num_bytes == 0 and [g.replays for g in row.graphs] == [1] and not row.graphs[0].pool_shared
    ended = next(c for c in gs.stats().contexts if not c.alive and c.name == "counted")
    assert ended.graphs == () and context.closed


def test_pool_that_a_failed_capture_made_unusable_is_replaced(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cuda.new_pool()
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        if len(calls) == 1:
            monkeypatch.setattr(private, "_spoiled", {pool})  # as an older torch would have it
            break_from_another_thread(cuda)
        cuda.operation()

    with context_on(cuda) as context:
        graph, _ = capture_with_retries(context, body, lambda: None, pool=pool)
        assert graph.pool is not None and graph.pool != pool and graph.pool_shared
        graph.replay()
