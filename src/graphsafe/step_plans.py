"""What a training step knows of each signature, and the short way to the replay of one that comes again."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from . import gate
from .context import ThreadContext
from .errors import require
from .failures import warn
from .graph import Graph
from .loop import Kind
from .memory import MAX_STALE, Memory
from .optimizers import OptimizerControl
from .repairs import private
from .repairs.rng_positions import Trace
from .signature import Call, StaticInputs, likeness

PARALLEL_WARMUP_ITERS = 11  # torch.cuda.make_graphed_callables and its notes on DDP ask for as many
Tensors = tuple[torch.Tensor, ...]
_gradient = attrgetter("grad")


@dataclass
class Captured:
    """One graph, or on the CPU one checked call: what a replay needs, and what it relies on."""

    inputs: StaticInputs
    graph: Graph | None
    spec: private.TreeSpec
    leaves: list[Any]
    settings: list[dict[str, Any]]
    memory: Memory
    present: tuple[torch.Tensor, ...]  # parameters that had a gradient before the call
    uses: int = 0


@dataclass
class StepPlan:
    """What is known of one signature."""

    summary: str
    admitted: bool
    calls: int = 0
    draws: bool | None = None  # whether a call draws random numbers; None: not known yet
    kinds: set[Kind] = field(default_factory=set)  # that ran eagerly
    compiles: int = 0  # captures given up because a compile started
    traces: dict[Kind, Trace | None] = field(default_factory=dict)  # what eager calls did with the random state
    first: tuple[torch.Tensor, ...] = ()  # parameters that the first micro-batch gives a gradient
    captured: dict[tuple[Kind, tuple[int, ...]], Captured] = field(default_factory=dict)
    is_guest: bool = False  # another thread's graph keeps the parameters' gradients on its stream

    def forget(self) -> None:
        """Let the graphs go, and what was learnt from the calls before them: each kind runs eagerly once more."""
        for captured in self.captured.values():
            if captured.graph is not None:
                captured.graph.close()
        self.captured.clear()
        self.kinds.clear()
        self.draws = None

    def note_guest(self) -> None:
        """Say, once, that the parameters' gradients arrive on another thread's stream."""
        if not self.is_guest:
            self.is_guest = True
            warn(
                "TrainStep runs eagerly while another thread's graph reads its parameters for gradients: autograd "
                "takes a parameter's gradients on one stream. Run that thread's calls under torch.no_grad(), let go of "
                "what they returned, or give each thread parameters of its own."
            )


class FastStep:
    """Tells at little cost whether a further call may replay ``captured``: a whole step without gradients before it.

    Where anything differs from the last such call the long way decides.
    """

    def __init__(
        self, context: ThreadContext, control: OptimizerControl, captured: Captured, call: Call, batch: tuple[Any, ...]
    ) -> None:
        assert context.stream is not None and captured.graph is not None
        self.captured = captured
        self._context, self._ident = context, threading.get_ident()
        self._index, self._stream = context.device.index, context.stream.cuda_stream
        self._alike, self.grad_mode = likeness(call, batch, context.device), torch.is_grad_enabled()
        self._training = captured.memory.training()
        self._parameters = control.parameters
        self._check_settings = control.check_settings
        self._memory = captured.memory

    def tensors(self, batch: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The tensors to load, or None."""
        tensors = self._alike(batch)
        if (
            tensors is None
            or threading.get_ident() != self._ident
            or self._context.closed
            or gate.capturing() is not None
            or private.current_raw_stream(self._index) != self._stream
            or self._memory.training() != self._training
            or not all(map(is_, map(_gradient, self._parameters), repeat(None)))
            or not self._memory.holds()
        ):
            return None
        self._check_settings(self.captured.settings)
        return tensors


def check_arguments(loss_fn: Any, optimizer: Any, **others: Any) -> None:
    """Raise GraphsafeError where an argument of TrainStep makes no sense."""
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "mode": (lambda x: _is_one_of(x, "graph", "eager"), "'graph' or 'eager'"),
        "accumulate": (lambda x: _is_int(x, 1), "an int of at least 1"),
        "num_warmup_iters": (lambda x: _is_int(x, 0), "an int of at least 0"),
        "max_graphs": (lambda x: _is_int(x, 1), "an int of at least 1"),
        "max_grad_norm": (lambda x: x is None or (_is_real(x) and x > 0), "a positive number, or None"),
        "scaler": (lambda x: x is None or isinstance(x, torch.amp.GradScaler), "a torch.amp.GradScaler, or None"),
        "on_mismatch": (lambda x: _is_one_of(x, "capture", "eager", "error"), "'capture', 'eager' or 'error'"),
        "outputs": (lambda x: _is_one_of(x, "copy", "alias"), "'copy' or 'alias'"),
        "set_to_none": (lambda x: isinstance(x, bool), "True or False"),
    }
    require(callable(loss_fn), f"loss_fn is {loss_fn!r}; it is a function that returns the loss.")
    require(is_optimizer, f"optimizer is {type(optimizer).__name__!r}; it is a torch.optim.Optimizer.")
    for name, value in others.items():
        right, rule = rules[name]
        require(right(value), f"{name} is {value!r}; it is {rule}.")


def _is_one_of(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value in words


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def check_warmup(modules: Sequence[torch.nn.Module], mode: str, num_warmup_iters: int) -> None:
    """Raise GraphsafeError where a model in DistributedDataParallel would be captured too early."""
    parallel = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules)
    require(
        mode == "eager" or not parallel or num_warmup_iters >= PARALLEL_WARMUP_ITERS,
        f"num_warmup_iters is {num_warmup_iters}; a model in DistributedDataParallel needs {PARALLEL_WARMUP_ITERS} or "
        "more, since torch builds its buckets anew and times its first iterations on the host.",
    )


def note_stale(plan: StepPlan, captured: Captured, count: int) -> int:
    """What ``captured`` relied on has changed: where that comes at every call, have the signature run eagerly.

    Returns:
        how often it came in a row, ``count`` until now.
    """
    count = count + 1 if captured.uses <= 1 else 0
    if count >= MAX_STALE:
        plan.admitted = False
        warn(
            f"TrainStep's loss_fn reads {captured.memory.changed()}, which was another one at every call, so it runs "
            "eagerly. Pass what changes as part of the batch, or change it in place."
        )
    return count
