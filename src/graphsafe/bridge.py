"""Joins the caller's autograd graph with work that has one of its own: a replayed forward, then a replayed backward.

Guarantees:
- Gradients reach the inputs and every leaf that the function reads. They are the caller's own: memory of a graph never
  becomes a ``.grad``.
- An output that no loss uses passes no gradient on, so a leaf that it alone reaches stays without one.
- What a forward saved is read by its own backward alone: its buffers are taken until then (``Passage.in_flight``).
- What a backward needs and was changed in place since its forward raises, as in eager torch.

It rests on two facts of torch: a node's saved tensors are freed by the backward that may not be repeated, and
``sequence_nr`` of nodes grows in each thread.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import Node

from . import walk
from .context import ThreadContext
from .errors import GraphsafeError
from .repairs import donated_buffers, private
from .signature import Call

Gradients = tuple[torch.Tensor | None, ...]
_FREED = torch.empty(0)  # stands for all that a backward frees


class Passage:
    """One call's way from forward to backward.

    Args:
        outputs: that require grad; the caller gets them through ``cross``.
        leaves: that the function read and that require grad.
        saved: tensors from outside that the backward reads, as far as known.
        run: computes the gradients of inputs and leaves from ``inner`` and those of the outputs; None where there is
            none.
        inner: the outputs with their history, which the backward frees that may not be repeated.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor], Gradients, tuple[bool, ...]], Gradients],
        inner: Sequence[torch.Tensor] = (),
    ) -> None:
        self.outputs, self.leaves, self._saved, self._run, self.inner = outputs, leaves, saved, run, inner
        self._versions = [tensor._version for tensor in saved]
        self._node: weakref.ref[Any] | None = None

    def cross(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, as functions of the caller's inputs and the leaves."""
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # the caller's hooks have nothing to do here
            crossed: tuple[torch.Tensor, ...] = _Bridge.apply(  # type: ignore[no-untyped-call]
                self, *inputs, *self.leaves
            )
        self.outputs = self.inner = ()
        return crossed

    def note(self, node: Any) -> None:
        self._node = weakref.ref(node)

    @property
    def in_flight(self) -> bool:
        """Whether a backward may still come."""
        node = None if self._node is None else self._node()
        if node is None:
            return False
        try:
            node._raw_saved_tensors  # noqa: B018
        except RuntimeError:  # freed by its backward
            return False
        return True

    def backward(self, inner: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]) -> Gradients:
        for tensor, version in zip(self._saved, self._versions, strict=True):
            if tensor._version != version:
                raise GraphsafeError(
                    f"A tensor of shape {tuple(tensor.shape)} that this backward needs was changed in place since its "
                    f"forward (version {tensor._version}, then {version}). Run the backward before the optimizer's "
                    "step, or before whatever else changes it."
                )
        return self._run(inner, gradients, needed)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*(passage.inner or (_FREED,)))
        ctx.set_materialize_grads(False)
        ctx.passage = passage
        passage.note(ctx)
        return tuple(passage.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inner = ctx.saved_tensors  # torch's own error for a second backward
        if torch.is_grad_enabled():  # which create_graph asks for
            raise GraphsafeError(
                "A gradient of a graphed function was asked for with create_graph=True; a captured backward has no "
                "backward of its own. Call the function itself where you need second derivatives."
            )
        passage: Passage = ctx.passage
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return (None, *passage.backward(inner, gradients, ctx.needs_input_grad[1:]))


def sequence_number() -> int:
    """The number of the next node of this thread."""
    probe = torch.empty((), requires_grad=True).view(())
    assert probe.grad_fn is not None
    return int(probe.grad_fn._sequence_nr())


def leaves_of(
    outputs: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor], since: int, outside: Iterable[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """The leaves that require grad and that ``outputs`` depend on, ``inputs`` excepted.

    Args:
        since: ``sequence_number()`` before the outputs were computed.
        outside: tensors that were there before, of other threads too, whose numbers say nothing here.
    Raises:
        GraphsafeError: they depend on a tensor from outside that is no leaf.
    """
    skip = {id(tensor) for tensor in inputs}
    found: dict[int, torch.Tensor] = {}
    before = {tensor.grad_fn for tensor in outside if tensor.grad_fn is not None}
    roots: list[Node] = []
    for output in outputs:
        if output.grad_fn is not None:
            roots.append(output.grad_fn)
        elif output.requires_grad and id(output) not in skip:
            found[id(output)] = output
    for node in private.nodes_below(roots):
        if private.takes_gradients(node):
            variable = node.variable
            if id(variable) not in skip:
                found[id(variable)] = variable
            continue
        if node in before or node._sequence_nr() < since:
            raise GraphsafeError(
                f"The function reads a tensor that is neither an argument nor a leaf (it comes from {node.name()}). A "
                "graph cannot pass its gradient on: pass that tensor as an argument, or detach() it."
            )
    return list(found.values())


def check_used(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] | None,
    since: int,
) -> None:
    """Raise GraphsafeError unless ``outputs`` depend on all these; ``parameters=None`` allows whatever is not used."""
    if parameters is None or not outputs:
        return
    used = {id(leaf) for leaf in leaves_of(outputs, (), since)}
    unused = [f"input {i} of those that require grad" for i, x in enumerate(inputs) if id(x) not in used]
    unused += [f"a parameter of shape {tuple(x.shape)}" for x in parameters if id(x) not in used]
    if unused:
        raise GraphsafeError(
            f"No output depends on {', '.join(unused)}. Pass allow_unused_input=True if that is right: "
            "they then get no gradient."
        )


class _Packed:
    """A saved tensor, and the version it must have when it is read; None: any."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None) -> None:
        self.tensor, self.version = tensor, version


class SavedTensors:
    """Notes what autograd saves in a block that is captured, and lets it be read whatever its version is by then.

    Every replay writes to static inputs and every optimizer's step to parameters, which torch would take for a mistake;
    ``Passage`` compares versions call by call instead. What the block itself made must have the version that was saved.

    Attributes:
        found: what was saved of ``outside``.
    """

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        self._outside = storages(outside)  # views share their base's version
        self.found: list[torch.Tensor] = []
        self._made: list[_Packed] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        alias = tensor.detach()
        if storages([tensor]) & self._outside:
            self.found.append(tensor)
            return _Packed(alias, None)
        packed = _Packed(alias, alias._version)
        self._made.append(packed)
        return packed

    def hand_out(self, outputs: Iterable[torch.Tensor]) -> None:
        """These are given out as they are: their versions too are compared call by call from now on."""
        given = storages(outputs)
        for packed in self._made:
            if storages([packed.tensor]) & given:
                packed.version = None
                self.found.append(packed.tensor)


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where the memory of dense tensors begins."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout is torch.strided}


def _unpack(packed: _Packed) -> torch.Tensor:
    tensor, version = packed.tensor, packed.version
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor


class _PerThread(threading.local):
    """Whether this thread differentiates inside a backward of the caller's."""

    def __init__(self) -> None:
        self.inside = 0


_per_thread = _PerThread()


class _Hook:
    """A leaf's gradient hook that runs in the caller's backward alone, not in the one inside of it as well."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if _per_thread.inside else self._hook(gradient)


@contextmanager
def _hooks_once(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gradient hooks of the leaves do nothing in this thread during the block; other threads may run them meanwhile."""
    for leaf in leaves:
        hooks: Any = leaf._backward_hooks or {}
        for key, hook in tuple(hooks.items()):
            if not isinstance(hook, _Hook):
                wrapped = _Hook(hook)
                if key in hooks:  # another thread may have removed it meanwhile
                    hooks[key] = wrapped
    _per_thread.inside += 1
    try:
        yield
    finally:
        _per_thread.inside -= 1


def differentiate(
    outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]
) -> Gradients:
    """The gradients of those of ``sources`` that are needed; None for the rest, and where there is none.

    The graph stays. Called inside the caller's backward: what was saved is overwritten only where that keeps no graph.
    """
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    wanted = [source for source, need in zip(sources, needed, strict=True) if need]
    overwriting = nullcontext() if private.keeps_graph() else donated_buffers.allowed(outputs)
    with _hooks_once(wanted), overwriting:
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        )
    return tuple(next(found) if need else None for need in needed)


def forget_casts(device_type: str) -> None:
    """Drop autocast's casts of weights: those of an earlier call have a history that is not this one's."""
    if torch.is_autocast_enabled(device_type):
        torch.clear_autocast_cache()


def check_result(leaves: Iterable[Any]) -> None:
    """Raise GraphsafeError where tensors are hidden in what a function returned."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | int | float | complex | str | bytes | None):
            continue
        lazy = inspect.isgenerator(leaf) or inspect.iscoroutine(leaf) or inspect.isasyncgen(leaf)
        if lazy or walk.tensors(leaf):
            raise GraphsafeError(
                f"The function returned an object of type {type(leaf).__name__}, in which no outputs are found. Return "
                "tensors, tuples, lists, dicts or named tuples of them, or register the type with torch.utils._pytree."
            )


def check_changed_input(index: int, differentiable: bool) -> None:
    """Raise where an input that was changed in place takes part in differentiation."""
    if differentiable:
        raise GraphsafeError(
            f"The function changes its input {index} in place, and gradients flow through it. A graph's inputs are "
            "copies, so the change would not reach autograd: return the new value instead."
        )


def call_eagerly(
    context: ThreadContext,
    fn: Callable[..., Any],
    call: Call,
    exclusive: Callable[[], bool],
    must_be_used: Sequence[torch.Tensor] | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """A real call of ``fn`` on a seat, whose backward takes a seat too.

    Args:
        exclusive: whether the seat must be: whether it draws random numbers, as far as known.
        must_be_used: see ``check_used``.
    Returns:
        its result, and the leaves that gradients reach, inputs excepted.
    """
    if not torch.is_grad_enabled():
        args, kwargs = call.with_tensors(call.tensors)
        with context.seat(exclusive=exclusive()):
            result = fn(*args, **kwargs)
        check_result(private.tree_flatten(result)[0])
        return result, []
    inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
    given = [tensor.detach().requires_grad_() if tensor.requires_grad else tensor for tensor in call.tensors]
    args, kwargs = call.with_tensors(given)
    forget_casts(context.device.type)
    since = sequence_number()
    versions = [-1 if tensor.is_inference() else tensor._version for tensor in given]
    with context.seat(exclusive=exclusive()):
        try:
            result = fn(*args, **kwargs)
        except RuntimeError as exc:
            if "a leaf Variable that requires grad" not in str(exc):
                raise
            raise GraphsafeError(
                "The function changes an input that requires grad in place. A graph's inputs are copies, so the change "
                "would not reach autograd: return the new value instead."
            ) from exc
    for index, (tensor, version) in enumerate(zip(given, versions, strict=True)):
        if version >= 0 and tensor._version != version:
            check_changed_input(index, tensor.requires_grad)
    leaves, spec = private.tree_flatten(result)
    check_result(leaves)
    crossing = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not crossing:
        return result, []
    outputs = [leaves[i] for i in crossing]
    own = [tensor for tensor in given if tensor.requires_grad]
    sources = leaves_of(outputs, own, since)
    check_used(outputs, own, must_be_used, since)

    def run(inner: Sequence[torch.Tensor], gradients: Gradients, needed: tuple[bool, ...]) -> Gradients:
        context.check_thread("A backward of the context")
        with context.seat(exclusive=exclusive()):
            return differentiate(inner, [*own, *sources], gradients, needed)

    passage = Passage([output.detach() for output in outputs], sources, (), run, outputs)
    del outputs, result
    for index, tensor in zip(crossing, passage.cross(inputs), strict=True):
        leaves[index] = tensor
    return private.tree_unflatten(leaves, spec), sources
