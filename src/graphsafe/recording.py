"""What a capture sees of the operators: the checks that a GPU's capture would fail, and a recorder for the CPU.

Guarantees:
- Host reads, shapes that depend on data, and random numbers from an unknown generator are refused with the operator
  and the user's line, before they return a value. Reading a CPU tensor that holds the same values in every call, such
  as ``torch.arange(4)``, is allowed.
- Dispatch modes are used on the CPU alone: under one, compiled functions run eagerly, and compiled again afterwards.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import rules
from .failures import refuse, users_frame
from .placement import FACTORIES, Placement, tensors_in
from .repairs import dispatch_skip, observing
from .repairs.private import DispatchMode, tree_flatten, tree_unflatten

_PLAIN = frozenset({"__get__", "__set__", "size", "stride", "dim", "numel", "is_floating_point"})  # not worth a look
HostReadChecks = contextlib.nullcontext  # CaptureChecks sees the functions too


class Checks(DispatchMode):
    """Looks at every operator and function of a block, and has ``found()`` decide about those that break a capture.

    Args:
        generators: those that a capture knows.
        placement: which of the block's tensors are the host's.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Iterable[torch.Generator], placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placement = placement
        self.functions = _Functions(self)
        self._stack = contextlib.ExitStack()  # what ends with the block
        self._generators = tuple(generators)
        self.num_quiet = 0  # enclosing calls whose operators are not to be looked at
        self.looking = False  # while the checks themselves ask a tensor

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(dispatch_skip.stays_compiled())
            stack.enter_context(observing.compiled_runs_eagerly())
            stack.enter_context(self.functions)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        with self._stack:
            super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.look(self.check, func, args, kwargs)
        result = func(*args, **kwargs)
        self.look(self.placement.computed, func, args, kwargs, result)
        return result

    def look(self, ask: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call ``ask``, whose own calls of torch's functions are nobody's business."""
        self.looking, before = True, self.looking
        try:
            ask(*args, **kwargs)
        finally:
            self.looking = before

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at an operator before it runs."""
        why = rules.operator(func, args, kwargs, self._generators)
        if why is not None and not self.num_quiet and not (why == rules.READ and self._same_in_every_call(args)):
            self.found(func, why)

    def check_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Look at a function before it runs. Returns whether its own operators are nobody's business."""
        why = rules.function(func, args, kwargs)
        if why is None:
            return rules.only_on_cpu(func, args, kwargs)
        if why == rules.SHAPE:  # a value for masked places: a number, and so the host's scalars, need no count
            value = tensors_in(rules.argument(args, kwargs, 2, "values"))
            if not any(map(self.placement.is_host, value)):
                self.found(func, why)
            return False
        harmless = self.placement.is_host(args[0]) if func is torch.Tensor.cpu else self._same_in_every_call(args)
        if not harmless and not self.num_quiet:
            self.found(func, why)
        return not harmless

    def _same_in_every_call(self, args: tuple[Any, ...]) -> bool:
        tensors = tensors_in(args)
        return bool(tensors) and all(map(self.placement.is_constant, tensors))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        return func(*args, **kwargs)

    def after_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Note what a function has made. Returns what the caller is to get."""
        name = rules.name_of(func)
        if name in FACTORIES and kwargs.get("device") is None and torch.get_default_device().type == "cpu":
            self.look(self.placement.made, name, args, kwargs, result)
        return result

    def found(self, func: Any, why: str) -> None:
        """Decide about an operator or function that breaks a capture."""
        raise NotImplementedError


class _Functions(TorchFunctionMode):
    """The part of Checks that sees functions: some reads show in no operator on the CPU."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        checks, kwargs = self._checks, kwargs or {}
        if checks.looking or hasattr(func, "overloadpacket") or getattr(func, "__name__", "") in _PLAIN:
            return func(*args, **kwargs)  # operators come by the dispatch mode
        checks.looking = True
        try:
            quiet = checks.check_function(func, args, kwargs)
        finally:
            checks.looking = False
        checks.num_quiet += quiet
        try:
            result = checks.call(func, args, kwargs)
        finally:
            checks.num_quiet -= quiet
        return checks.after_function(func, args, kwargs, result)


class CaptureChecks(Checks):
    """Refuses what a GPU's capture would refuse, or would get wrong at a replay."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__((generator,), Placement())

    def found(self, func: Any, why: str) -> None:
        frame, sites = sys._getframe(1), []
        outermost: FrameType | None = users_frame(frame)
        line = None if outermost is None else linecache.getline(outermost.f_code.co_filename, outermost.f_lineno)
        inner: FrameType | None = frame
        while inner is not None and inner is not outermost:
            sites.append(inner.f_code.co_filename)
            inner = inner.f_back
        what = f"Inside a capture {why}."
        refuse(rules.label(func), what, rules.cure(func, why, line, sites))


class OperatorRecorder(CaptureChecks):
    """Records the operators of a block below autograd, so that ``replay()`` runs them again on the same tensors."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.draws = True
        self._infers = False  # whether any of it ran in inference mode, whose tensors are written there alone
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = tuple(tensor.detach() for tensor in _fresh(func, result))
        self._infers = self._infers or torch.is_inference_mode_enabled()
        self._calls.append((func, _frozen(args), _frozen(kwargs), outputs))
        return result

    def replay(self) -> None:
        with torch.inference_mode() if self._infers else torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                if torch.Tag.inplace_view in getattr(func, "tags", ()):
                    continue  # only how a tensor is read has changed, and that for good
                again = _fresh(func, func(*args, **kwargs))
                for output, value in zip(outputs, again, strict=True):
                    output.copy_(value)


def _frozen(arguments: Any) -> Any:
    """The arguments with aliases of their tensors, which keep the shape and strides that these have now."""
    leaves, spec = tree_flatten(arguments)
    return tree_unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _fresh(func: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a result that are neither an argument nor a view of one."""
    if not hasattr(func, "_schema"):  # an operator of higher order: it returns new tensors
        return tuple(tensors_in(result))
    returns = func._schema.returns
    if len(returns) == 1:
        result = (result,)
    found: list[torch.Tensor] = []
    for part, declared in zip(result or (), returns, strict=False):
        if declared.alias_info is None:
            found.extend(leaf for leaf in tree_flatten(part)[0] if isinstance(leaf, torch.Tensor))
    return tuple(found)
