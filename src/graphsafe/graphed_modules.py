"""``torch.cuda.make_graphed_callables`` from any thread: functions and modules of one shape, as graphs.

Guarantees:
- torch's arguments and meaning, but for its faults: gradients accumulate right, outputs do not change later, several
  calls may be in flight, and the warm-up calls are real ones, so no buffer of a module has moved on before the first.
- A thread captures at its own first calls. Nothing is captured when the callables are made, so no context is needed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .context import ThreadContext
from .errors import ShapeMismatchError, require
from .graphed import GraphedCallable
from .repairs import private
from .signature import Call


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
    capture_error_mode: str = "thread_local",
) -> Any:
    """Graphed versions of functions or modules, to be called with tensors like ``sample_args``.

    Args:
        callables: a function or ``torch.nn.Module``, or a tuple of them. A module comes back itself, with a ``forward``
            that runs as a graph while its ``training`` flag is as it is now, and as ever otherwise.
        sample_args: the arguments of one call, tensors or containers of tensors; for a tuple of callables a tuple for
            each. Their shapes, dtypes and devices are those of every call; their values are not used.
        num_warmup_iters: eager calls in each thread before it captures.
        allow_unused_input: allow inputs and parameters that require grad and that no output depends on.
        pool: a graph memory pool handle for the first graphs, which one thread may then use alone.
        capture_error_mode: "thread_local" alone.

    Returns:
        as many callables as were given. A call needs a context on the tensors' device.
    Raises:
        GraphsafeError: an argument does not fit, or at a first call: an input or parameter is unused.
    """
    require(
        capture_error_mode == "thread_local",
        f"capture_error_mode is {capture_error_mode!r}; graphsafe captures in 'thread_local' mode alone, in which "
        "other threads' work does not break a capture.",
    )
    several = isinstance(callables, tuple)
    fns: tuple[Any, ...] = callables if several else (callables,)
    samples: tuple[Any, ...] = sample_args if several else (sample_args,)
    require(
        isinstance(sample_args, tuple) and len(samples) == len(fns) and all(isinstance(s, tuple) for s in samples),
        "sample_args is a tuple of tensors, or for a tuple of callables as long a tuple of such tuples.",
    )
    for fn in fns:
        require(callable(fn), f"callables has {fn!r}; it is a function or a module, or a tuple of them.")
    made = tuple(
        _graphed(fn, sample, num_warmup_iters, allow_unused_input, pool)
        for fn, sample in zip(fns, samples, strict=True)
    )
    return made if several else made[0]


def _graphed(fn: Any, sample: tuple[Any, ...], num_warmup_iters: int, allow_unused: bool, pool: Any) -> Any:
    if not isinstance(fn, torch.nn.Module):
        return _Sampled(fn, sample, num_warmup_iters, allow_unused, pool)
    trainable = [name for name, buffer in fn.named_buffers() if buffer.requires_grad]
    require(not trainable, f"The buffers {trainable} require grad; of a graphed module only parameters may.")
    original, training = fn.forward, fn.training
    graphed = _Sampled(original, sample, num_warmup_iters, allow_unused, pool, fn)

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not fn:  # a deep copy, with weights of its own
            return getattr(original, "__func__", type(module).forward)(module, *args, **kwargs)
        return (graphed if module.training == training else original)(*args, **kwargs)

    fn.forward = types.MethodType(forward, fn)
    return fn


class _Sampled(GraphedCallable):
    """A graphed function whose calls are all like a sample."""

    def __init__(
        self,
        fn: Callable[..., Any],
        sample: tuple[Any, ...],
        num_warmup_iters: int,
        allow_unused: bool,
        pool: tuple[int, int] | None,
        module: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(fn, num_warmup_iters)
        self._arguments = (fn, sample, num_warmup_iters, allow_unused, pool, module)
        leaves, _ = private.tree_flatten(sample)
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        require(not odd, f"sample_args holds {odd}; it holds tensors alone. Use graphsafe.graphed for other arguments.")
        self._sample = [_described(leaf) for leaf in leaves]
        self._allow_unused, self._module = allow_unused, module
        self._given_pool = pool
        self._owner: ThreadContext | None = None  # who uses the given pool

    def _check_call(self, call: Call) -> None:
        wanted, found = self._sample, [_described(leaf) for leaf in call.leaves]
        if len(found) != len(wanted):
            raise ShapeMismatchError(f"The call of {self._name}", f"{len(wanted)} tensors", f"{len(found)} values")
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            if one != other:
                raise ShapeMismatchError(f"Tensor {index} of the call of {self._name}", one, other)

    def _must_be_used(self) -> Sequence[torch.Tensor] | None:
        if self._allow_unused:
            return None
        return [] if self._module is None else [p for p in self._module.parameters() if p.requires_grad]

    def _pool(self, context: ThreadContext) -> tuple[int, int] | None:
        with self._lock:
            pool, self._given_pool = self._given_pool, None
            if pool is not None:
                self._owner = context
        require(
            self._owner is None or self._owner is context or self._owner.closed,
            f"{self._name} was given a pool, which one thread's graphs alone may use. Leave pool=None for threads.",
        )
        return pool


def _described(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
