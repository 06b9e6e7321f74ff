"""The eager training loop: forward, backward, and every so often clip, step and zero.

Guarantees:
- Runs the same operators whether it is called eagerly or captured, so that both give the same bits.
- A parameter without gradient stays without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from . import gate
from .errors import GraphsafeError, require
from .optimizers import OptimizerControl
from .repairs import private

Kind = Literal["whole", "first", "middle", "last"]  # which micro-batch of an accumulation; whole: the only one


class Loop:
    """One micro-batch at a time. The arguments are TrainStep's.

    Attributes:
        norm: total norm of the last step's gradients before clipping.
        norm_buffer: where a graph leaves that norm.
        static_gradients: where graphs accumulate the gradient of each parameter, with ``set_to_none``. Which of them a
            graph begins with is the caller's to say: those that an eager call of its signature gave a gradient.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        control: OptimizerControl,
        max_grad_norm: float | None,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        set_to_none: bool,
    ) -> None:
        self.loss_fn, self.control, self.scaler = loss_fn, control, scaler
        control.scaler = scaler
        self.max_grad_norm, self.accumulate, self.set_to_none = max_grad_norm, accumulate, set_to_none
        self.norm: torch.Tensor | None = None
        self.norm_buffer: torch.Tensor | None = None
        self.static_gradients: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def name(self) -> str:
        """Of the step, for reports."""
        return str(getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__name__))

    def kind(self, position: int) -> Kind:
        """Which micro-batch comes after ``position`` others of the accumulation."""
        if self.accumulate == 1:
            return "whole"
        if position == self.accumulate - 1:
            return "last"
        return "first" if position == 0 else "middle"

    def run(self, batch: tuple[Any, ...], kind: Kind) -> Any:
        """One micro-batch. Returns what ``loss_fn`` returned, detached."""
        result = self.forward_backward(batch)
        if kind in ("whole", "last"):
            self.finish()
        return result

    def loss_and_backward(self, *batch: Any) -> None:
        """What lint looks into."""
        self.forward_backward(batch)

    def forward_backward(self, batch: tuple[Any, ...]) -> Any:
        result = self.loss_fn(*batch)
        pair = isinstance(result, tuple) and len(result) == 2
        loss = result[0] if pair else result
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise GraphsafeError(
                f"loss_fn returned {_described(result)}; it returns a loss of one element, or a tuple (loss, aux). "
                "Reduce the loss with .mean() or .sum()."
            )
        if not loss.requires_grad:
            raise GraphsafeError("The loss does not require grad: no parameter takes part in it, or grad mode is off.")
        scaled = loss / self.accumulate if self.accumulate > 1 else loss
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        leaves, spec = private.tree_flatten(result)
        return private.tree_unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], spec)

    def finish(self) -> None:
        """Clip, step, zero."""
        control, optimizer, scaler = self.control, self.control.optimizer, self.scaler
        parameters = control.parameters
        captured = gate.capturing() is not None
        if not captured:
            control.prepare_again()
        control.refresh_lr()  # before a capture it is up to date, and enqueues nothing
        norm = None
        if self.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            if captured and self.norm_buffer is not None:
                self.norm_buffer.copy_(norm)
        looks = captured or control.num_looks > 0
        before = control.host_state() if looks else {}
        with control.lr_on_device():
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        if looks:
            control.num_looks -= not captured
            control.check_step(before)
        optimizer.zero_grad(set_to_none=self.set_to_none)
        self.norm = norm

    # state

    def state_dict(self, *, with_gradients: bool) -> dict[str, Any]:
        """Of optimizer and scaler, and the gradients that have accumulated."""
        gradients = [p.grad for p in self.control.parameters]
        return {
            "optimizer": self.control.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "gradients": [None if g is None else g.detach().clone() for g in gradients] if with_gradients else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; a state without gradients clears those that have accumulated.

        Raises:
            GraphsafeError: by ``check_state()``, or the optimizer's part does not fit. Nothing was loaded.
        """
        self.check_state(state)
        optimizer, scaler, gradients = self.control.optimizer, self.scaler, state["gradients"]
        before = optimizer.state, optimizer.param_groups
        try:
            optimizer.load_state_dict(state["optimizer"])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as exc:
            optimizer.state, optimizer.param_groups = before  # some look at it only once they have it
            why = f"{type(exc).__name__}: {exc}"
            raise GraphsafeError(f"The state's optimizer does not fit this one ({why}). Nothing was loaded.") from exc
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(state["scaler"])
        for index, parameter in enumerate(self.control.parameters):
            if gradients is not None:
                gradient = gradients[index]
                parameter.grad = None if gradient is None else gradient.detach().clone().to(parameter.device)
            elif self.set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach().zero_()

    def check_state(self, state: Any) -> None:
        """Raise GraphsafeError where a state, TrainStep's counters included, is not one that may be loaded here."""
        require(
            isinstance(state, dict), f"The state is {type(state).__name__}; it is what TrainStep.state_dict() returned."
        )
        missing = sorted({"optimizer", "scaler", "gradients", "position", "num_steps", "generator"} - state.keys())
        require(not missing, f"The state lacks {missing}; it is what TrainStep.state_dict() returned.")
        position, num_steps, gradients = state["position"], state["num_steps"], state["gradients"]
        require(_is_count(position), f"The state's position is {position!r}; it is a number of micro-batches.")
        require(_is_count(num_steps), f"The state's num_steps is {num_steps!r}; it is a number of steps.")
        fits = position < self.accumulate
        require(fits, f"The state is {position} micro-batches into a step of {self.accumulate}.")
        require(position == 0 or gradients is not None, f"The state is {position} micro-batches in, without gradients.")
        parameters = self.control.parameters
        fits = gradients is None or (isinstance(gradients, list | tuple) and len(gradients) == len(parameters))
        fits = fits and all(map(_may_be_gradient, gradients or (), parameters))
        require(fits, "The state's gradients are those of another model: their number, shapes or dtypes differ.")
        optimizer, scaler = state["optimizer"], state["scaler"]
        fits = isinstance(optimizer, dict) and {"state", "param_groups"} <= optimizer.keys()
        require(
            fits, "The state's optimizer is no dict with state and param_groups, which Optimizer.state_dict() gives."
        )
        enabled = self.scaler is not None and self.scaler.is_enabled()
        alike = enabled == bool(scaler)  # a disabled one has an empty state
        require(alike, "One of the state and this TrainStep has a GradScaler and the other has none: make them alike.")
        if self.scaler is not None and enabled:
            own = self.scaler.state_dict()
            wrong = [key for key in own if not isinstance(scaler, dict) or not _is_number(scaler.get(key))]
            require(not wrong, f"The state's scaler has no numbers {wrong}, which GradScaler.state_dict() gives.")
        if state["generator"] is not None:
            check_rng_state(state["generator"], self.control.device)

    # gradients around a graph

    def with_gradient(self) -> tuple[torch.Tensor, ...]:
        """The parameters that have a gradient now."""
        return tuple(p for p in self.control.parameters if p.grad is not None)

    def make_buffers(self, first: Sequence[torch.Tensor]) -> None:
        """What graphs write to and must not allocate themselves.

        Args:
            first: the parameters that the first micro-batch gives a gradient.
        """
        if self.accumulate > 1 and self.set_to_none:
            for parameter in first:
                if parameter not in self.static_gradients:
                    self.static_gradients[parameter] = torch.zeros_like(parameter)
        if self.norm is not None and self.norm_buffer is None:
            self.norm_buffer = torch.empty_like(self.norm)

    def gradients_ready(self, kind: Kind) -> bool:
        """Bring the gradients to where a graph of that kind has them; False where only an eager call is right."""
        if not self.set_to_none:
            return True  # they stay where they are
        parameters, static = self.control.parameters, self.static_gradients
        if kind in ("whole", "first"):
            return all(p.grad is None for p in parameters)
        present = self.with_gradient()
        if not present or any(p not in static for p in present):
            return False
        with torch.no_grad():
            for parameter in present:
                gradient = static[parameter]
                if parameter.grad is not None and parameter.grad is not gradient:
                    gradient.copy_(parameter.grad)
                    parameter.grad = gradient
        return True

    def begin(self, kind: Kind, first: Sequence[torch.Tensor]) -> None:
        """Part of what is captured: with the first micro-batch the static gradients of ``first`` start at zero."""
        if kind == "first" and self.set_to_none and first:
            torch._foreach_zero_([self.static_gradients[parameter] for parameter in first])
            self.show_gradients(kind, first)

    def show_gradients(self, kind: Kind, first: Sequence[torch.Tensor]) -> None:
        """After a replay: have the parameters' ``.grad`` as they are after the same call of the eager loop."""
        if not self.set_to_none:
            return
        if kind == "first":
            for parameter in first:
                parameter.grad = self.static_gradients[parameter]
        elif kind in ("whole", "last"):
            for parameter in self.control.parameters:
                parameter.grad = None

    def undo(self, modules: Sequence[torch.nn.Module]) -> Callable[[], None]:
        """A function that takes back what a capture has changed that failed after this call.

        On CUDA that is what Python noted; nothing has run. On the CPU the capture is a call that really runs.
        """
        optimizer, scaler, norm = self.control.optimizer, self.scaler, self.norm
        gradients = list(self.gradients(modules).items())
        memory = [(parameter, parameter.data) for parameter, _ in gradients]
        known_state = {key: dict(own) if isinstance(own, dict) else own for key, own in optimizer.state.items()}
        groups = [(group, dict(group)) for group in optimizer.param_groups]
        tables = [(t, dict(t)) for module in modules for t in (module._parameters, module._buffers)]
        stages = None if scaler is None else private.scaler_stages(scaler)
        ran: list[tuple[torch.Tensor, torch.Tensor]] = []  # (tensor, its value)
        if self.control.device.type == "cpu":
            held = [b for module in modules for b in module.buffers(recurse=False)]
            held += [gradient for _, gradient in gradients if gradient is not None]
            ran = [(tensor, tensor.clone()) for tensor in held]

        def take_back() -> None:
            for parameter, data in memory:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for tensor, value in ran:
                    tensor.copy_(value)
            for key in [key for key in optimizer.state if key not in known_state]:
                del optimizer.state[key]
            for key, own in known_state.items():
                if isinstance(own, dict):
                    _restore(optimizer.state[key], own)
                else:
                    optimizer.state[key] = own
            for table, entries in [*groups, *tables]:
                _restore(table, entries)
            if scaler is not None and stages is not None:
                private.restore_stages(scaler, stages)
            self.norm = norm

        return take_back

    def gradients(self, modules: Sequence[torch.nn.Module]) -> dict[torch.Tensor, torch.Tensor | None]:
        """The gradients of all parameters, those outside the optimizer too."""
        others = [p for module in modules for p in module.parameters(recurse=False)]
        return {p: p.grad for p in [*self.control.parameters, *others]}

    def gradients_kept(self, modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        """Parameters whose gradients a step neither makes nor takes away: it adds to them in place."""
        own = self.control.parameters
        known = set(map(id, own))
        others = [p for p in self.gradients(modules) if id(p) not in known and p.requires_grad]
        return others if self.set_to_none else [*own, *others]

    def only(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether exactly these have a gradient now."""
        present = self.with_gradient()
        return len(present) == len(parameters) and all(a is b for a, b in zip(present, parameters, strict=True))

    def stray_gradients(self, before: dict[torch.Tensor, torch.Tensor | None], kind: Kind) -> bool:
        """Whether a capture left a gradient that its replays would make anew, in place of adding to it.

        Args:
            before: ``gradients()`` before the capture.
        """
        zeroed = set(self.control.parameters) if self.set_to_none and kind in ("whole", "last") else set()
        for parameter, gradient in before.items():
            expected = None if parameter in zeroed else gradient
            now = parameter.grad
            if now is not expected and (now is None or now is not self.static_gradients.get(parameter)):
                return True
        return False


def _restore(table: dict[str, Any], entries: dict[str, Any]) -> None:
    """Have a dictionary hold what it held, the same objects."""
    if len(table) != len(entries) or any(table.get(key) is not value for key, value in entries.items()):
        table.clear()
        table.update(entries)


def check_rng_state(state: Any, device: torch.device) -> None:
    """Raise GraphsafeError where a state is not one of a generator on ``device``."""
    why = f"it is {type(state).__name__}"
    if isinstance(state, torch.Tensor):
        try:
            torch.Generator(device).set_state(state.cpu())
            return
        except (RuntimeError, TypeError) as exc:  # its dtype, its size, or what it says
            why = str(exc).partition("\n")[0]
    raise GraphsafeError(
        f"The state's generator is not one's state on {device}, which Generator.get_state() gives: {why}."
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_be_gradient(gradient: Any, parameter: torch.Tensor) -> bool:
    if not isinstance(gradient, torch.Tensor):
        return gradient is None
    dtypes = (parameter.dtype, getattr(parameter, "grad_dtype", None))  # by name from torch 2.10 on
    return gradient.shape == parameter.shape and gradient.dtype in dtypes


def _described(result: Any) -> str:
    """What was returned, for a message."""
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return type(result).__name__
