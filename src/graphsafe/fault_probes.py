"""Probes of faults by what torch and graphsafe do, in a process of their own.

Some faults show only while a setting of the whole process is changed: a stance, a config, a recompile limit. So the
probes run in a child process, on the CPU, and the caller's process stays as it is.

Guarantees:
- Nothing of the calling process is read or changed but its module path and its environment.
- The child ends by the deadline, and when ``Probes.close()`` is called.
- A probe that cannot run says so; it is never taken for a result.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

import torch

from .compile import install
from .context import thread_context
from .repairs import private
from .workers import spawn

Status = Literal["present", "repaired", "absent"]

DEADLINE_S = 120.0  # for all probes together, the child's imports of torch included
_STEP_S = 30.0  # for one wait on a thread
_NUM_THREADS = 4
_CHILD = "import sys; sys.path[:0] = sys.argv[1:]; from graphsafe import fault_probes; fault_probes.main()"
_DROPPED = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCH_LOGS", "TORCH_TRACE", "PYTHONWARNINGS")


@dataclass(frozen=True)
class Finding:
    """What one probe saw.

    Attributes:
        status: ``"absent"``: this torch lacks the fault; ``"repaired"``: graphsafe ends it; ``"present"``.
        detail: what was looked at.
        checked: False where the probe could not run; the status is then "present", to be on the safe side.
    """

    status: Status
    detail: str
    checked: bool = True


class Probes:
    """The child process that probes. It runs from construction on; ``results()`` waits for it."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        # Not a pipe: nobody need read while the child writes.
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble = ""
        environment = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable or "python", "-c", _CHILD, *(path or os.getcwd() for path in sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            self._trouble = f"no process could be started: {error}"

    def results(self) -> Mapping[str, Finding]:
        """A finding for each of ``PROBES``, by the fault's id; waits for the child to end."""
        if self._process is not None:
            try:
                code = self._process.wait(self._deadline_s)
                self._trouble = f"the probing process ended with status {code}" if code else ""
            except subprocess.TimeoutExpired:
                self._trouble = f"the probing process did not end in {self._deadline_s:.0f} s"
        self.close()
        self._output.seek(0)
        found = {}
        for line in self._output:
            fault, finding = json.loads(line)
            found[fault] = Finding(**finding)
        missing = Finding("present", f"not probed: {self._trouble or 'the probing process said nothing'}", False)
        return {fault: found.get(fault, missing) for fault in PROBES}

    def close(self) -> None:
        """End the child, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


# What runs in the child


def main() -> None:
    """Run every probe and write a line of JSON for each as soon as it is known."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    for fault, probe in PROBES.items():
        try:
            finding = probe()
        except Exception as error:
            finding = Finding("present", f"not probed: {type(error).__name__}: {error}"[:300], False)
        print(json.dumps([fault, asdict(finding)]), flush=True)
    os._exit(0)  # a thread that hangs does not keep the process


def _in_thread(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns in a plain thread."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(fn()), daemon=True)
    thread.start()
    thread.join(_STEP_S)
    if not values:
        raise RuntimeError("a plain thread did not answer")
    return values[0]


def _while_in_thread(enter: Callable[[], Any], look: Callable[[], Any]) -> Any:
    """What ``look()`` returns here while another thread is inside the block that ``enter()`` makes."""
    inside, looked = threading.Event(), threading.Event()

    def body() -> None:
        with enter():
            inside.set()
            looked.wait(_STEP_S)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        if not inside.wait(_STEP_S):
            raise RuntimeError("a plain thread could not enter the block")
        return look()
    finally:
        looked.set()
        thread.join(_STEP_S)


class _Counting:
    """A backend that runs the graph as it is, and counts compiles and compiled calls."""

    def __init__(self) -> None:
        self.compiles = 0
        self.calls = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        self.compiles += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def _with_and_without_repairs(seen: Callable[[], bool], what: str) -> Finding:
    if not seen():
        return Finding("absent", f"{what}: not in this torch")
    install()
    if seen():
        return Finding("present", what)
    return Finding("repaired", f"{what}: on plain torch, no longer with install()")


def _stance_of_another_thread() -> Finding:
    def seen() -> bool:
        backend = _Counting()
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(2))
        _while_in_thread(lambda: torch.compiler.set_stance("force_eager"), lambda: compiled(torch.ones(2)))
        return backend.calls == 1  # the second call ran eagerly

    return _with_and_without_repairs(seen, "a thread set a stance, and another thread's compiled call ran eagerly")


def _guards_skipped_by_another_thread() -> Finding:
    def seen() -> bool:
        compiled = torch.compile(lambda x, up: x + 1 if up else x - 1, backend=_Counting())
        compiled(torch.zeros(2), True)
        value = _while_in_thread(
            lambda: torch.compiler.set_stance(skip_guard_eval_unsafe=True), lambda: compiled(torch.zeros(2), False)
        )
        return bool(value[0] != -1)

    return _with_and_without_repairs(seen, "a thread skipped guards, and another thread's call gave a wrong result")


def _settings_in_workers() -> Finding:
    config: Any = torch.compiler.config
    before, probing = config.cache_key_tag, "graphsafe is probing"  # a setting that every supported torch has

    def look() -> bool:
        return bool(config.cache_key_tag == probing)

    config.cache_key_tag = probing
    try:
        if _in_thread(look):
            return Finding("absent", "a plain thread saw a config set by the thread that started it")
        if spawn(look, device="cpu", seed=0).result(_STEP_S):
            return Finding("repaired", "a config set before spawn() reached the worker; a plain thread saw the default")
        return Finding("present", "neither a worker nor a plain thread saw a config set before it started")
    finally:
        config.cache_key_tag = before


def _backward_thread() -> Finding:
    class Spy(torch.autograd.Function):
        thread = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            Spy.thread = threading.get_ident()
            return grads[0]

    if not private.multithreading_enabled():
        return Finding("absent", "autograd's device threads are off in a plain thread")
    with thread_context("cpu", seed=0):
        confined = not private.multithreading_enabled()
        apply: Any = Spy.apply
        apply(torch.ones(2, requires_grad=True)).sum().backward()
        own = Spy.thread == threading.get_ident()
    after = private.multithreading_enabled()
    if confined and own and after:
        return Finding("repaired", "inside a context autograd's device threads are off, and on again after it")
    return Finding("present", f"device threads off in a context: {confined}, on after it: {after}, own thread: {own}")


def _state_of_workers() -> Finding:
    def look() -> tuple[object, ...]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), str(torch.empty(0).device)

    usual = spawn(look, device="cpu", seed=0).result(_STEP_S)
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        changed = spawn(look, device="cpu", seed=0).result(_STEP_S)
    if usual == changed == (True, False, "cpu"):
        return Finding("repaired", "workers start alike, whatever grad mode, autocast and device their spawner has")
    return Finding("present", f"workers of spawners in different modes started as {usual} and {changed}")


def _first_calls_together() -> Finding:
    install()  # without it torch 2.11 may crash here
    compiled = torch.compile(lambda x: (x + 1).sum(), backend=_Counting())
    barrier = threading.Barrier(_NUM_THREADS)
    answers: list[object] = []

    def call() -> None:
        barrier.wait(_STEP_S)
        try:
            answers.append(float(compiled(torch.ones(2))))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}"[:200])

    threads = [threading.Thread(target=call, daemon=True) for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_STEP_S)
    if answers == [4.0] * _NUM_THREADS:
        return Finding("absent", f"{_NUM_THREADS} threads made the first call of one function together: no error")
    return Finding("present", f"{_NUM_THREADS} threads made the first call of one function together: {answers}")


PROBES: Mapping[str, Callable[[], Finding]] = {
    "A8": _settings_in_workers,
    "A3": _backward_thread,
    "A14": _state_of_workers,
    "A9": _stance_of_another_thread,
    "A10": _guards_skipped_by_another_thread,
    "A11": _first_calls_together,
}
