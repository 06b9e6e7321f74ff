"""A12: a first launch is tuned once, by one thread, and every launch has its own thread's arguments."""

from __future__ import annotations

import importlib.util
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphsafe.compile import install, installed, uninstall
from graphsafe.repairs import autotuner
from graphsafe.repairs.hooks import hooks
from tests.helpers import DEADLINE_S, SHOWS_FAULTS, join_threads, run_program, run_threads


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Each test starts and ends on plain torch."""
    was_installed = bool(installed())
    uninstall()
    yield
    autotuner.undo()
    uninstall()
    if was_installed:
        install()


class AnnouncingLock:
    """An RLock that says when a thread has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.waited_for, self.num_entered = threading.RLock(), threading.Event(), 0

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waited_for.set()
            self.lock.acquire(timeout=DEADLINE_S)
        self.num_entered += 1

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> AnnouncingLock:
    """The lock of every artefact of the test."""
    announcing = AnnouncingLock()
    monkeypatch.setattr(autotuner, "_lock_of", lambda artefact: announcing)
    return announcing


# Triton's Autotuner, or where there is no Triton a class that keeps its arguments in the same places


class Config:
    def __init__(self, kwargs: dict[str, Any], pre_hook: Callable[[Any], None] | None = None) -> None:
        self.kwargs, self.pre_hook = kwargs, pre_hook

    def all_kwargs(self) -> dict[str, Any]:
        return dict(self.kwargs)


class Autotuner:
    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: list[Any],
        key: list[str],
        reset_to_zero: Any,
        restore_value: Any,
        pre_hook: Any = None,
        prune_configs_by: Any = None,
        do_bench: Any = None,
    ) -> None:
        self.fn, self.arg_names, self.configs, self.keys = fn, arg_names, configs, key
        self.do_bench, self.cache = do_bench, {}  # type: ignore[var-annotated]
        self.pre_hook = pre_hook or (lambda kwargs, reset_only=False: None)
        self.prune = (prune_configs_by or {}).get("early_config_prune")

    def _bench(self, args: Any, config: Any, kwargs: Any) -> Any:
        named = {**self.nargs, **kwargs, **config.all_kwargs()}

        def kernel_call() -> None:
            self.pre_hook(named)
            self.fn.run(*args, **kwargs, **config.all_kwargs())

        return self.do_bench(kernel_call, quantiles=())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs: Any = dict(zip(self.arg_names, args, strict=False))
        config = self.configs[0]
        if len(self.configs) > 1:
            key = tuple({**self.nargs, **kwargs}[name] for name in self.keys)
            if key not in self.cache:
                timings = {config: self._bench(args, config, kwargs) for config in self.prune_configs(kwargs)}
                self.cache[key] = min(timings, key=lambda config: timings[config])
                self.pre_hook({**self.nargs, **kwargs}, reset_only=True)
            config = self.cache[key]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    def prune_configs(self, kwargs: Any) -> Any:
        return self.prune(self.configs, self.nargs, **kwargs) if self.prune else self.configs

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        result = [self.fn.warmup(*args, **kwargs, **config.all_kwargs()) for config in self.prune_configs(kwargs)]
        self.nargs = None
        return result


def stand_in_module() -> types.ModuleType:
    module = types.ModuleType(autotuner.TRITON)
    members = {name: value for name, value in vars(Autotuner).items() if name not in ("__dict__", "__weakref__")}
    module.Autotuner, module.Config = type("Autotuner", (), members), Config  # type: ignore[attr-defined]
    return module


@pytest.fixture(params=["stand-in", "triton"])
def module(request: pytest.FixtureRequest) -> types.ModuleType:
    if request.param == "stand-in":
        return stand_in_module()
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    import triton.runtime.autotuner as found

    if not autotuner.probe(found):
        pytest.skip("this Triton lacks A12")
    return found


class Kernel:
    """A kernel under an autotuner with two configs, that logs what each part of a launch gets.

    Attributes:
        launched: what the kernel ran with, benchmarks left out.
        hooked: the arguments that the chosen config's hook got.
        pruned: the arguments that the pruning got, one entry a tuning.
        benchmarked: the arguments that the autotuner's hook got in benchmarks.
        in_benchmark: called in each benchmark, with the key's argument.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self.launched: list[Any] = []
        self.hooked: list[Any] = []
        self.pruned: list[Any] = []
        self.benchmarked: list[Any] = []
        self.in_benchmark: Callable[[int], object] = lambda n: None
        self._benchmarking = threading.local()
        configs = [module.Config({"BLOCK": block}, pre_hook=self._hook) for block in (1, 2)]
        self.tuner = module.Autotuner(
            self,
            ["x", "n"],
            configs,
            ["n"],
            None,
            None,
            pre_hook=self._tuner_hook,
            prune_configs_by={"early_config_prune": self._prune},
            do_bench=self._bench,
        )

    @staticmethod
    def fn(x: Any, n: int, BLOCK: int) -> None:
        """The function that Triton looks for below its decorators."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self._benchmarking, "on", False):
            self.launched.append(args)
        return args[0]

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]

    def _hook(self, named: Any) -> None:
        if not getattr(self._benchmarking, "on", False):
            self.hooked.append((named["x"], named["n"]))

    def _tuner_hook(self, named: Any, reset_only: bool = False) -> None:
        self.benchmarked.append((named["x"], named["n"]))

    def _prune(self, configs: Any, named: Any, **kwargs: Any) -> Any:
        self.pruned.append((named["x"], named["n"]))
        return configs

    def _bench(self, kernel_call: Callable[[], None], quantiles: Any) -> Any:
        self._benchmarking.on = True
        try:
            kernel_call()
            self.in_benchmark(self.benchmarked[-1][1])
        finally:
            self._benchmarking.on = False
        return [1.0, 1.0, 1.0]


def stop_in_benchmark(kernel: Kernel) -> tuple[threading.Event, threading.Event]:
    """Have the first benchmark set the first event and wait for the second one."""
    benchmarking, go_on = threading.Event(), threading.Event()

    def in_benchmark(n: int) -> None:
        if not benchmarking.is_set():
            benchmarking.set()
            assert go_on.wait(DEADLINE_S)

    kernel.in_benchmark = in_benchmark
    return benchmarking, go_on


@contextmanager
def tuning(kernel: Kernel, *args: Any) -> Iterator[list[Any]]:
    """Another thread launches with ``args`` and stands still in its benchmark for the length of the block.

    Yields:
        what its launch returned, or the exception, after the block.
    """
    benchmarking, go_on = stop_in_benchmark(kernel)
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(kernel.tuner.run(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert benchmarking.wait(DEADLINE_S)
    try:
        yield outcome
    finally:
        go_on.set()
        join_threads([thread])


def test_a_launch_beside_a_benchmark_disturbs_it_without_the_repair(module: types.ModuleType) -> None:
    kernel = Kernel(module)
    with tuning(kernel, "mine", 1) as outcome:  # 1. the other thread benchmarks
        kernel.tuner.run("theirs", 1)  # 2. this one launches, tunes too, and clears the arguments
    assert isinstance(outcome[0], TypeError)  # 3. the benchmark goes on without its own
    assert len(kernel.pruned) == 2
    assert autotuner.probe(module)


def test_a_launch_waits_for_the_benchmark_of_its_key_and_both_get_their_own_arguments(
    module: types.ModuleType, lock: AnnouncingLock
) -> None:
    autotuner.repair(module)
    assert module.Autotuner.nargs
    kernel = Kernel(module)
    second: list[Any] = []
    thread = threading.Thread(target=lambda: second.append(kernel.tuner.run("theirs", 1)), daemon=True)
    with tuning(kernel, "mine", 1) as outcome:  # 1. the first thread benchmarks
        thread.start()
        assert lock.waited_for.wait(DEADLINE_S)  # 2. the second one has to tune too, and waits
    join_threads([thread])  # 3. the first one has tuned, and the second one launches
    assert (outcome, second) == (["mine"], ["theirs"])
    assert kernel.pruned == [("mine", 1)], "tuned once"
    assert set(kernel.benchmarked) == {("mine", 1)}
    assert sorted(kernel.hooked) == [("mine", 1), ("theirs", 1)]
    assert sorted(kernel.launched) == [("mine", 1), ("theirs", 1)]
    assert autotuner._calls.nargs == {}


def test_a_launch_of_another_key_tunes_after_the_first_with_its_own_arguments(
    module: types.ModuleType, lock: AnnouncingLock
) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)
    second: list[Any] = []
    thread = threading.Thread(target=lambda: second.append(kernel.tuner.run("theirs", 2)), daemon=True)
    with tuning(kernel, "mine", 1):
        thread.start()
        assert lock.waited_for.wait(DEADLINE_S)
        assert set(kernel.benchmarked) == {("mine", 1)}
    join_threads([thread])
    assert kernel.pruned == [("mine", 1), ("theirs", 2)]
    assert set(kernel.benchmarked[-3:]) == {("theirs", 2)}


def test_a_launch_of_a_tuned_key_takes_no_lock_beside_a_benchmark(
    module: types.ModuleType, lock: AnnouncingLock
) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)
    kernel.tuner.run("first", 1)
    kernel.launched.clear(), kernel.hooked.clear()
    with tuning(kernel, "mine", 2):
        entered = lock.num_entered
        assert kernel.tuner.run("theirs", 1) == "theirs"
        assert kernel.tuner.run("again", n=1) == "again"
        assert lock.num_entered == entered
        assert kernel.hooked == [("theirs", 1), ("again", 1)]
    assert kernel.hooked[2:] == [("mine", 2)]
    assert not lock.waited_for.is_set()


def test_eight_threads_that_launch_first_at_once_tune_once(module: types.ModuleType) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)
    kernel.in_benchmark = lambda n: time.sleep(0.002)  # gives the others the time to come in
    assert run_threads(8, lambda index: kernel.tuner.run(index, 5)) == list(range(8))
    assert len(kernel.pruned) == 1
    assert sorted(kernel.hooked) == sorted(kernel.launched) == [(index, 5) for index in range(8)]


def test_a_tuning_that_fails_frees_the_lock_and_the_arguments_and_the_next_launch_tunes(
    module: types.ModuleType,
) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)

    def fail(n: int) -> None:
        raise ValueError("in the benchmark")

    kernel.in_benchmark = fail
    with pytest.raises(ValueError, match="in the benchmark") as caught:
        kernel.tuner.run("x", 1)
    assert caught.value.__context__ is None
    assert autotuner._calls.nargs == {}
    kernel.in_benchmark = lambda n: None
    assert run_threads(1, lambda _: kernel.tuner.run("y", 1)) == ["y"]
    assert kernel.pruned == [("x", 1), ("y", 1)]


def test_a_benchmark_that_launches_the_same_kernel_keeps_the_outer_launchs_arguments(module: types.ModuleType) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)

    def relaunch(n: int) -> None:
        if n == 1:
            kernel.tuner.run("inner", 2)

    kernel.in_benchmark = relaunch
    kernel.tuner.run("outer", 1)
    assert kernel.pruned[:2] == [("outer", 1), ("inner", 2)]
    assert kernel.hooked[-1] == ("outer", 1)


def test_an_autotuner_around_another_one_tunes_both() -> None:
    module = stand_in_module()  # Triton's own would give its keywords twice
    autotuner.repair(module)
    inner, tuned = Kernel(module), []

    def bench(kernel_call: Callable[[], None], quantiles: Any) -> Any:
        tuned.append("outer")
        kernel_call()
        return [1.0]

    configs = [module.Config({}), module.Config({})]
    outer = module.Autotuner(inner.tuner, ["x", "n"], configs, ["n"], None, None, do_bench=bench)
    assert run_threads(4, lambda index: outer.run(index, 1)) == list(range(4))
    assert (len(inner.pruned), len(tuned)) == (1, 2)


def test_warmup_has_its_threads_arguments(module: types.ModuleType) -> None:
    autotuner.repair(module)
    kernel = Kernel(module)
    with tuning(kernel, "mine", 1) as outcome:
        assert kernel.tuner.warmup("theirs", 3) == ["theirs", "theirs"]
        assert kernel.pruned[-1] == ("theirs", 3)
    assert outcome == ["mine"]


def test_undo_puts_the_class_back_and_a_launch_under_way_ends(module: types.ModuleType) -> None:
    before = dict(vars(module.Autotuner))
    autotuner.repair(module)
    kernel = Kernel(module)
    with tuning(kernel, "mine", 1) as outcome:
        autotuner.undo()
        assert dict(vars(module.Autotuner)) == before
    assert outcome == ["mine"]
    assert kernel.tuner.run("x", 1) == "x"


def test_a_launch_under_way_when_the_repair_goes_in_ends_with_its_arguments(module: types.ModuleType) -> None:
    kernel = Kernel(module)
    with tuning(kernel, "mine", 1) as outcome:
        autotuner.repair(module)
    assert outcome == ["mine"]
    assert set(kernel.benchmarked) == {("mine", 1)}


# Where the lock stands: compile, gate, first launch, buffers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A CUDA device that is not there, and whether the current stream captures."""
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def test_a_first_launch_takes_its_seat_before_the_lock_and_a_later_one_takes_neither(
    module: types.ModuleType, lock: AnnouncingLock, cuda: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seats: list[tuple[int | None, int]] = []
    monkeypatch.setattr(hooks, "seat_scope", lambda index: nullcontext(seats.append((index, lock.num_entered))))
    autotuner.repair(module)
    kernel = Kernel(module)
    kernel.tuner.run("x", 1)
    assert seats == [(3, 0)]
    assert lock.num_entered == 1
    kernel.tuner.run("x", 1)
    assert (len(seats), lock.num_entered) == (1, 1)


def test_a_capturing_thread_waits_for_no_benchmark(
    module: types.ModuleType, lock: AnnouncingLock, cuda: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "seat_scope", lambda index: nullcontext())
    autotuner.repair(module)
    kernel = Kernel(module)
    with tuning(kernel, "mine", 1) as outcome:
        cuda["capturing"] = True
        assert kernel.tuner.run("theirs", 1) == "theirs"
        cuda["capturing"] = False
    assert outcome == ["mine"]
    assert not lock.waited_for.is_set()


# Inductor's CachingAutotuner

TUNER = """
import types
import torch
import torch._inductor.runtime.triton_heuristics as heuristics
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType

class Tuner(heuristics.CachingAutotuner):
    '''Inductor's own, but for what needs a GPU: two candidates that are there at once, timed by ``bench_all``.'''

    def __init__(self, bench_all, num_candidates=2):
        properties = DeviceProperties(type="cpu", index=0, multi_processor_count=1, cc=0)
        config = types.SimpleNamespace(kwargs={}, num_warps=1, num_stages=1)
        super().__init__(
            types.SimpleNamespace(__name__="kernel", fn=lambda x: x, arg_names=["x"]),
            triton_meta={"device": properties, "signature": {}}, configs=[config], save_cache_hook=None,
            mutated_arg_names=[], optimize_mem=False, heuristic_type=HeuristicType.POINTWISE)
        self.bench_all, self.num_candidates = bench_all, num_candidates

    def precompile(self, *args, **kwargs):
        self.launchers = [self.candidate(index) for index in range(self.num_candidates)]

    def candidate(self, index):
        def launcher(*args, stream):
            return index, args, stream
        config = types.SimpleNamespace(kwargs={}, num_warps=1, num_stages=1)
        vars(launcher).update(config=config, n_regs=0, n_spills=0, shared=0, cache_hash="", store_cubin=False)
        return launcher

    def benchmark_all_configs(self, *args, **kwargs):
        self.bench_all(self, args)
        return {launcher: -index for index, launcher in enumerate(self.launchers)}
"""

TWO_FIRST_LAUNCHES = (
    TUNER
    + """
benchmarking, second_too = threading.Event(), threading.Event()
benchmarked = []

def bench_all(tuner, args):
    benchmarked.append(args)
    if len(benchmarked) == 1:
        benchmarking.set()                  # 1. the first thread benchmarks
        second_too.wait(5)                  # 3. and waits until the second one does; on plain torch it comes
    else:
        second_too.set()

tuner = Tuner(bench_all)
thread = threading.Thread(target=tuner.run, args=(1,), kwargs=dict(stream=0))
thread.start()
assert benchmarking.wait(30)
tuner.run(2, stream=0)                      # 2. the second one launches
thread.join(30)
print(json.dumps(benchmarked))
"""
)


def test_plain_inductor_benchmarks_in_every_thread_that_comes_first() -> None:
    import torch._inductor.runtime.triton_heuristics as heuristics

    benchmarked = run_program(TWO_FIRST_LAUNCHES)
    assert len(benchmarked) == (2 if autotuner.probe(heuristics) else 1)
    if SHOWS_FAULTS:
        assert len(benchmarked) == 2, "the pinned torch no longer shows the fault: the test is no proof any more"


@pytest.fixture
def tuner_class() -> Any:
    import torch._inductor.runtime.triton_heuristics as heuristics

    if not autotuner.probe(heuristics):
        pytest.skip("this torch lacks A12")
    install()
    assert heuristics.CachingAutotuner.run.__wrapped__
    namespace: dict[str, Any] = {}
    exec(TUNER, namespace)
    return namespace["Tuner"]


def test_inductors_first_launch_benchmarks_once_and_the_second_thread_launches_the_choice(
    tuner_class: Any, lock: AnnouncingLock
) -> None:
    benchmarked: list[Any] = []

    def bench_all(tuner: Any, args: Any) -> None:
        benchmarked.append(args)
        thread.start()  # 1. this thread benchmarks
        assert lock.waited_for.wait(DEADLINE_S)  # 2. the other one comes first too, and waits

    tuner = tuner_class(bench_all)
    second: list[Any] = []
    thread = threading.Thread(target=lambda: second.append(tuner.run("theirs", stream=8)), daemon=True)
    assert tuner.run("mine", stream=7) == (1, ("mine",), 7)
    join_threads([thread])  # 3. and launches what was chosen
    assert second == [(1, ("theirs",), 8)]
    assert benchmarked == [("mine",)]


def test_inductors_later_launches_are_torchs_own_function(tuner_class: Any, lock: AnnouncingLock) -> None:
    tuner = tuner_class(lambda tuner, args: None, num_candidates=1)
    tuner.run(1, stream=0)
    assert lock.num_entered == 1
    assert tuner.run.__func__ is type(tuner).run.__wrapped__
    assert tuner.run(2, stream=5)[1:] == ((2,), 5)
    assert lock.num_entered == 1


def test_inductors_eight_first_launches_at_once_benchmark_once(tuner_class: Any) -> None:
    benchmarked: list[Any] = []

    def bench_all(tuner: Any, args: Any) -> None:
        benchmarked.append(args)
        tuner.run(*args, stream=0) if len(tuner.launchers) == 1 else time.sleep(0.01)

    tuner = tuner_class(bench_all)
    assert run_threads(8, lambda index: tuner.run(index, stream=index)) == [(1, (i,), i) for i in range(8)]
    assert len(benchmarked) == 1


def test_inductor_tunes_again_once_its_launchers_are_dropped(tuner_class: Any, lock: AnnouncingLock) -> None:
    benchmarked: list[Any] = []
    tuner = tuner_class(lambda tuner, args: benchmarked.append(args))
    tuner.run(1, stream=0)
    names = {"__name__": "kernel", "__globals__": {}, "fn": None, "used_global_vals": None, "_hash_lock": None}
    tuner.fn = types.SimpleNamespace(repr=lambda fn: "kernel", **names)
    tuner.prepare_for_pickle()
    assert not tuner.launchers
    vars(tuner).pop("_cached_launcher", None)
    tuner._cached_launcher = None
    tuner.run(2, stream=0)
    assert benchmarked == [(1,), (2,)]
    assert lock.num_entered == 2


def test_inductors_first_launch_that_fails_frees_the_lock(tuner_class: Any) -> None:
    outcomes = iter([ValueError("in the benchmark"), None])

    def bench_all(tuner: Any, args: Any) -> None:
        if (error := next(outcomes)) is not None:
            raise error

    tuner = tuner_class(bench_all)
    with pytest.raises(ValueError, match="in the benchmark"):
        tuner.run(1, stream=0)
    assert run_threads(1, lambda _: tuner.run(2, stream=0)) == [(1, (2,), 0)]


def test_nothing_of_the_repair_is_stored_with_inductors_tuner(tuner_class: Any) -> None:
    tuner = tuner_class(lambda tuner, args: None)
    before = set(vars(tuner))
    tuner.run(1, stream=0)
    assert {name for name in set(vars(tuner)) - before if "graphsafe" in name} == set()


def test_undo_puts_back_inductors_run(tuner_class: Any) -> None:
    import torch._inductor.runtime.triton_heuristics as heuristics

    original = heuristics.CachingAutotuner.run.__wrapped__
    uninstall()
    assert vars(heuristics.CachingAutotuner)["run"] is original
    assert not hasattr(vars(heuristics.DebugAutotuner)["run"], "__wrapped__")
