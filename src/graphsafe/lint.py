"""Finds what would break a capture of a function, and on which line, without a GPU.

Guarantees:
- The function runs once, really, on the given arguments, and everything that would break a capture is found in that one
  run: nothing is stopped at the first.
- By the same rules as the CPU's capture pass (``rules``). What that cannot know is added: CPU tensors that are made
  inside and meet the device's, optimizers that cannot be captured, synchronising, seeding, reentrant checkpoints.
- Nothing that the function reaches is left changed (``snapshot``).
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from . import gate, optimizers, rules, walk
from .context import active_contexts
from .errors import require
from .failures import users_frame
from .placement import RANDOM, Placement, is_list_index, says_cpu, target_of, tensors_in, without_cuda
from .recording import Checks
from .repairs import observing, private
from .snapshot import Snapshot
from .watch import CallWatch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep

_CPU = torch.device("cpu")

COPY = "a CPU tensor is copied to the device, and a replay would copy from the same host memory again"
MIX = "a CPU tensor that was made here meets tensors of the device; on a GPU torch raises"
BACK = "the host waits for a copy from the device"
_COPY_FIX = (
    "Make constants once, outside the function, or compute them on the device (torch.full, torch.arange, x.new_zeros, "
    "with device=x.device); values that change belong into the inputs."
)
_INDEX_FIX = "Make the index once, outside the step, as a tensor on the device, or use slices."
_BACK_FIX = "Keep the value on the device, return it, and read it after the step."
_NOT_CAPTURABLE = "torch refuses to capture its step while capturable is False"
# Operators that take CPU tensors beside those of the device, and read them as sizes.
_TAKES_SIZES = frozenset({"_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu",
                          "tensor_split", "segment_reduce"})  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that would break a capture.

    Attributes:
        op: the operator or function.
        file, line: where in the user's code; for an operator of a backward the line of its forward, where it is known.
        why: what is wrong, without a full stop.
        fix: what to do.
    """

    op: str
    file: str
    line: int
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.op}: {self.why}. {self.fix}"


def lint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Finding]:
    """Run ``fn(*args, **kwargs)`` once and list what would break a capture of it, in the order met; [] where nothing.

    Args:
        fn: a function with whatever backward and optimizer step it does itself, or a TrainStep or graphed function.
        args, kwargs: its arguments. With CUDA tensors the devices are the real ones; else tensors that ``fn`` reaches
            stand for the device's, as does what is made from them or with a device, "cuda" too.
    Returns:
        each operator and line once.
    Raises:
        GraphsafeError: ``fn`` cannot be called, or this thread captures.
        Exception: what ``fn`` raised, with what was found before it as notes.

    Parameters, buffers, gradients, optimizer state, arguments and random generators are afterwards as before; other
    Python state that ``fn`` changes is not, nor a graph of autograd of the caller's that ``fn`` frees. Compiled
    functions run eagerly. Needs memory for a copy of the tensors that ``fn`` reaches.

    An optimizer's step is judged by its class alone. Calls such as ``torch.cuda.synchronize()`` are not seen where a
    Python profiler is on. Random numbers of Python or NumPy, and numbers whose values change, cannot be seen.

    Thread safety: any thread, alone on the devices among what graphsafe manages, as an exclusive eager step.
    """
    own = getattr(type(fn), "_lint_call", None)
    require(own is not None or callable(fn), f"lint() takes a function and got {type(fn).__name__}.")
    require(gate.capturing() is None, "lint() was called inside a capture. Call it before.")
    call: Callable[..., Any] = fn if own is None else own(fn)
    stack = ExitStack()
    try:
        with stack:
            return _lint(stack, fn, call, args, kwargs, managed=own is not None)
    finally:
        stack.close()  # nothing is left to do, unless an interrupt kept `with` from it


def _lint(
    stack: ExitStack, fn: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, managed: bool
) -> list[Finding]:
    roots = (fn, call)
    _take_seat(stack, _CPU)  # before a look at what another thread's lint may be changing
    on_cuda = {tensor.device for tensor in walk.tensors(*roots, args, kwargs) if tensor.device.type == "cuda"}
    devices = [_CPU, *_cuda_devices(on_cuda)]
    for device in devices[1:]:
        _take_seat(stack, device)
    before = Snapshot(roots, (args, kwargs), devices)
    stack.callback(before.restore)
    generators = map(private.default_generator, devices)
    placement = Placement(real=bool(on_cuda), home=before.tensors)
    checks = _LintChecks(generators, placement, managed=managed)
    watch = CallWatch(checks.found_call, checks.saw_memory, checks.functions)
    _leave_as_found(stack, checks, watch)
    try:
        with torch.autograd.set_multithreading_enabled(False), checks, watch:
            call(*args, **kwargs)
    except BaseException as exc:
        for finding in checks.findings.values():
            exc.add_note(f"graphsafe.lint had found: {finding}")
        raise
    return list(checks.findings.values())


def _leave_as_found(stack: ExitStack, checks: Checks, watch: CallWatch) -> None:
    """Have ``stack`` leave what an interrupt may keep ``with`` from leaving: the watch, and all modes of the thread."""
    modes = private.open_modes()

    def leave_modes(_: object, exc: BaseException | None, __: object) -> None:
        private.leave_modes(modes, with_flags=exc is not None and not isinstance(exc, Exception))

    stack.callback(torch.autograd.set_multithreading_enabled, private.multithreading_enabled())
    stack.push(leave_modes)
    stack.callback(lambda: checks._stack.close())
    stack.callback(watch.__exit__)


def _take_seat(stack: ExitStack, device: torch.device) -> None:
    """Take an exclusive seat, with this thread's context's generator where there is one."""
    context = next((context for context in active_contexts() if context.device == device), None)
    one = gate.gate_for(device)
    stack.callback(gate.abandon, one, tuple(gate.held()))  # where an interrupt keeps the seat from being given back
    stack.enter_context((one if context is None else context).seat(exclusive=True))


def _cuda_devices(reached: set[torch.device]) -> list[torch.device]:
    """The CUDA devices that a function may work on or draw from, in the order of their gates."""
    if torch.cuda.is_initialized():
        reached = reached | {torch.device("cuda", torch.cuda.current_device())}
    return sorted(reached, key=lambda device: device.index)


class _LintChecks(Checks):
    """Notes what breaks a capture, and goes on."""

    def __init__(self, generators: Iterable[torch.Generator], placement: Placement, *, managed: bool) -> None:
        super().__init__(generators, placement)
        self.findings: dict[tuple[str, str, int], Finding] = {}
        self._managed = managed  # whether a TrainStep prepares the optimizer
        self._has_cuda = torch.cuda.is_available()
        self._function: Any = None  # the function of torch that the user's code has called
        self._forward: dict[int, tuple[str, int]] = {}  # by an autograd node's number, the line that made it
        self._first_node = observing.next_sequence_number()
        self._steps: list[bool] = []  # for each enclosing record_function, whether it is an optimizer's step
        self._last = ("<unknown>", 0)

    # operators

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = rules.name_of(func)
        if name.startswith("_record_function_"):
            self._note_step(name, args)
            return func(*args, **(kwargs or {}))
        number = observing.next_sequence_number() - 1
        if number >= self._first_node and number not in self._forward:
            frame = users_frame(sys._getframe(1))
            if frame is not None:
                self._last = self._forward[number] = (frame.f_code.co_filename, frame.f_lineno)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().check(func, args, kwargs)
        if self.num_quiet:
            return
        name = rules.name_of(func)
        if self.placement.real:
            self._check_real_copy(func, name, args, kwargs)
            return
        tensors = tensors_in(args, kwargs)
        host = [tensor for tensor in tensors if self.placement.is_host(tensor)]
        if not host or len(host) == len(tensors):
            return
        if name in ("copy_", "copy"):
            to_host = self.placement.is_host(args[0])
            self._found(func, *((BACK, _BACK_FIX) if to_host else (COPY, _COPY_FIX)))
        elif name not in _TAKES_SIZES and any(tensor.dim() > 0 for tensor in host):
            self._found(func, MIX, _COPY_FIX)

    def _check_real_copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "copy_":
            source, target, pinned = args[1], args[0].device, args[0].is_pinned()
        elif name == "_to_copy" and kwargs.get("device") is not None:
            source, target, pinned = args[0], torch.device(kwargs["device"]), bool(kwargs.get("pin_memory"))
        else:
            return
        enqueued = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if source.device.type == "cpu" and target.type == "cuda" and not (enqueued and source.is_pinned()):
            self._found(func, COPY, _COPY_FIX)
        elif source.device.type == "cuda" and target.type == "cpu" and not (enqueued and pinned):
            self._found(func, BACK, _BACK_FIX)

    def _note_step(self, name: str, args: tuple[Any, ...]) -> None:
        if name.startswith("_record_function_exit"):
            if self._steps:
                self._steps.pop()
            return
        step = bool(args) and str(args[0]).startswith("Optimizer.step#")
        if step and not any(self._steps):
            self._check_optimizer()
        self._steps.append(step)

    def _check_optimizer(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            frame = frame.f_back
        if frame is None:
            return
        optimizer: torch.optim.Optimizer = frame.f_locals["self"]
        _, sites = _outwards(frame)
        scaled = any("grad_scaler" in site for site in sites)
        reason = optimizers.why_not(optimizer, scaled=scaled)
        label = f"{type(optimizer).__name__}.step"
        if reason is not None:
            self.found_call(label, *reason, frame)
        elif not self._managed and any(group.get("capturable") is False for group in optimizer.param_groups):
            self.found_call(label, _NOT_CAPTURABLE, "Pass capturable=True; a TrainStep switches it on itself.", frame)

    # functions

    def check_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        quiet = super().check_function(func, args, kwargs)
        name = rules.name_of(func)
        if name in ("__getitem__", "__setitem__") and not self.placement.is_host(args[0]) and is_list_index(args[1]):
            self._found(func, COPY, _INDEX_FIX)
        return quiet

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._function = self._function, func
        try:
            return self._call(func, args, kwargs)
        finally:
            self._function = outer

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, placement = rules.name_of(func), self.placement
        if name == "pin_memory" and not self._has_cuda:
            return args[0]
        target = target_of(name, args, kwargs)
        if target is None or (isinstance(target, torch.device) and target.type == "meta"):
            return func(*args, **kwargs)
        if isinstance(target, torch.Tensor):
            to_host = placement.is_host(target)
        else:
            placement.real = placement.real or (self._has_cuda and target.type == "cuda")
            to_host = target.type == "cpu" and (placement.real or name == "cpu" or says_cpu(self._caller()))
        data: Any = args[name == "new_tensor"] if args else None
        moves = name in ("to", "cuda", "cpu") or (
            name in rules.FROM_VALUES - {"tensor"} and isinstance(data, torch.Tensor)
        )
        was_host = moves and placement.is_host(data)
        empty = isinstance(data, list | tuple) and not data  # nothing is copied
        values = name in (*rules.FROM_VALUES, "new_tensor") and not (isinstance(data, torch.Tensor) or to_host or empty)
        if values or (was_host and not to_host and not placement.real):
            self._found(func, COPY, _COPY_FIX)
        elif moves and to_host and not was_host and not placement.real and name != "cpu":
            self._found(func, BACK, _BACK_FIX)
        self.num_quiet += values
        try:
            result = func(*args, **kwargs) if self._has_cuda else without_cuda(func, name, args, kwargs)
        finally:
            self.num_quiet -= values
        if placement.real or not isinstance(result, torch.Tensor):
            return result
        if moves and to_host and not was_host and result.layout == torch.strided:
            result = result.clone()  # on a GPU it would be memory of its own
        if to_host:
            self.look(placement.put_on_host, [result], constant=name not in RANDOM)
        else:
            self.look(placement.put_on_device, [result])
        return result

    @staticmethod
    def _caller() -> FrameType | None:
        """The frame that calls the function which the checks have in hand."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        return frame

    def saw_memory(self) -> None:
        self.placement.from_memory = True

    # findings

    def found(self, func: Any, why: str) -> None:
        frame, sites = _outwards(sys._getframe(1))
        line = None if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self._found(func, why, rules.cure(func, why, line, sites))

    def _found(self, func: Any, why: str, fix: str) -> None:
        label = str(getattr(func, "overloadpacket", rules.label(func))).removesuffix(".default")
        frame, sites = _outwards(sys._getframe(1))
        node = observing.backward_node() if observing.in_backward() else None
        if node is not None and any(site == _ENGINE for site in sites):  # torch's own backward of something
            self._add(f"{label} in {node[0]}", *self._forward.get(node[1], self._here(frame)), why, fix)
            return
        called = self._function
        if called is not None and called is not func and rules.name_of(called) not in _BACKWARDS:
            label = f"{rules.label(called)} ({label})"
        self._add(label, *self._here(frame), why, fix)

    def found_call(self, op: str, why: str, fix: str, frame: FrameType) -> None:
        """Note a call that no operator shows."""
        self._add(op, *self._here(users_frame(frame)), why, fix)

    def _here(self, frame: FrameType | None) -> tuple[str, int]:
        return self._last if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _add(self, op: str, file: str, line: int, why: str, fix: str) -> None:
        if not any(self._steps):  # torch's steps read their own counters on the CPU
            self.findings.setdefault((op, file, line), Finding(op, file, line, why, fix))


_ENGINE = torch.autograd.graph.__file__
_BACKWARDS = frozenset({"backward", "grad"})


def _outwards(frame: FrameType | None) -> tuple[FrameType | None, list[str]]:
    """The user's innermost frame, and the files between."""
    outermost, sites = users_frame(frame), []
    while frame is not None and frame is not outermost:
        sites.append(frame.f_code.co_filename)
        frame = frame.f_back
    return outermost, sites
