"""Makes an optimizer's step capturable, and sees when its settings or its state are no longer the captured ones.

Guarantees:
- ``param_groups["lr"]`` stays the user's Python number: a float32 tensor on the device stands in for it during a step,
  and takes its value over whenever it has changed. (A captured kernel would keep the number for ever.)
- An optimizer of torch.optim whose step reads that tensor on the host is refused by name. (Read in torch 2.11 to 2.15:
  a Python scalar argument (``alpha=-lr``) made from a tensor synchronises.) A subclass with torch's own step is judged
  as its base.
- What a step keeps on the host (a Python step count, a setting that it moves on, state that it binds anew) stays in a
  graph as it was at the capture: the capture of such a step is refused with the name of what changed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from operator import is_
from typing import Any

import torch

from . import gate
from .errors import CaptureError, GraphsafeError, GraphsafeWarning, require

_ANY_IMPLEMENTATION = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"})
_FOREACH_ONLY = frozenset({"RMSprop", "Adadelta"})
_FUSED_ONLY = frozenset({"SGD", "Adagrad"})
_SCALER = frozenset({"Adam", "AdamW", "SGD"})
_ALLOWED = (
    "These can be captured: Adam, AdamW, NAdam, RAdam, Adamax, ASGD and Rprop; RMSprop and Adadelta unless "
    "foreach=False; SGD with fused=True. TrainStep(mode='eager') takes any whose step needs no closure."
)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[:2] == ["torch", "optim"]


def _torch_class(optimizer: torch.optim.Optimizer) -> type | None:
    """The class of torch.optim whose step the optimizer runs, if it is one."""
    kind = type(optimizer)
    base = next(parent for parent in kind.__mro__ if _is_torchs(parent))  # Optimizer itself, at the last
    return base if inspect.unwrap(kind.step) is inspect.unwrap(base.step) else None  # type: ignore[attr-defined]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step evaluates the loss itself, as that of LBFGS does."""
    try:
        parameters = list(inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.values())[1:]
    except (TypeError, ValueError):  # it has no signature to look at
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind in plain and parameter.default is parameter.empty for parameter in parameters)


def _why_not(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    kind = _torch_class(optimizer)
    if kind is None:
        return None  # not torch's: its capture tells
    name = kind.__name__
    if name in _ANY_IMPLEMENTATION:
        return None
    if name in _FOREACH_ONLY:
        return "with foreach=False it reads the learning rate on the host" if group.get("foreach") is False else None
    if name in _FUSED_ONLY:
        if name == "Adagrad":
            return "it keeps its step count on the host"
        return None if group.get("fused") else "unless fused=True it reads the learning rate on the host"
    return "its step reads the device on the host"


def why_not(optimizer: torch.optim.Optimizer, *, scaled: bool) -> tuple[str, str] | None:
    """Why an optimizer's step cannot be captured, and those that can; None where it can, or only its capture tells.

    Args:
        scaled: whether a GradScaler steps it.
    """
    base = _torch_class(optimizer)
    for group in optimizer.param_groups:
        why = _why_not(optimizer, group)
        if why is None and scaled and not (base and base.__name__ in _SCALER and group.get("fused")):
            why = "under a GradScaler only fused Adam, AdamW and SGD skip a step without asking the host"
        if why is not None:
            return why, _ALLOWED
    return None


class OptimizerControl:
    """One optimizer, as a graph needs it.

    Args:
        optimizer: its parameters lie on one device.
        scaled: whether a GradScaler steps it.
    Raises:
        GraphsafeError: no parameters, several devices, a step that needs a closure, or (on CUDA, where ``strict``)
            one that cannot be captured.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, scaled: bool, strict: bool) -> None:
        self.optimizer = optimizer
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise GraphsafeError(
                f"The optimizer's parameters lie on: {found}. A training step runs on one device: give TrainStep an "
                "optimizer whose parameters are all there."
            )
        self.device: torch.device = devices.pop()
        require(
            not _needs_closure(optimizer),
            f"{type(optimizer).__name__}'s step needs a closure that evaluates the loss again, and a TrainStep "
            f"evaluates it once a step. Write that loop yourself, or use another optimizer. {_ALLOWED}",
        )
        if strict:
            self._refuse(scaled)
        self.scaler: torch.amp.GradScaler | None = None  # that steps it
        looks = strict and self.device.type == "cpu" and _torch_class(optimizer) is None
        self.num_looks = 2 if looks else 0  # eager steps that are checked as a capture would be
        self._lr: dict[int, torch.Tensor] = {}  # by group; a group whose own learning rate is a tensor has none
        self._lr_value: dict[int, float] = {}
        self.prepare()

    def _refuse(self, scaled: bool) -> None:
        reason = why_not(self.optimizer, scaled=scaled)
        if reason is None:
            return
        text = f"{type(self.optimizer).__name__} cannot be captured: {reason[0]}. {reason[1]}"
        if self.device.type == "cuda":
            raise GraphsafeError(text)
        warnings.warn(f"On a GPU this would be refused: {text}", GraphsafeWarning, stacklevel=4)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def prepare(self) -> None:
        """Switch ``capturable`` on where the device supports it, and bring step counts to the device."""
        if self.device.type != "cuda":
            return
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if not (group.get("capturable") or group.get("fused")):
                continue
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                step = state.get("step")
                if isinstance(step, torch.Tensor) and step.device != parameter.device:
                    state["step"] = step.to(device=parameter.device, dtype=torch.float32)

    def prepare_again(self) -> None:
        """``prepare`` where the optimizer's own ``load_state_dict`` has switched ``capturable`` off. Any eager step."""
        if self.device.type == "cuda" and any(
            group.get("capturable") is False for group in self.optimizer.param_groups
        ):
            self.prepare()

    # learning rate

    @property
    def lr_tensors(self) -> list[torch.Tensor]:
        """The device's learning rates, one a group."""
        return list(self._lr.values())

    def refresh_lr(self) -> None:
        """Bring the device's learning rates up to date with the groups' numbers. Enqueues on the current stream."""
        for index, group in enumerate(self.optimizer.param_groups):
            lr = group.get("lr")
            if not isinstance(lr, Real):
                continue  # the user's own tensor, read in place; or none
            if index not in self._lr:
                self._lr[index] = torch.zeros((), dtype=torch.float32, device=self.device)
            if lr != self._lr_value.get(index):
                self._lr[index].fill_(float(lr))
                self._lr_value[index] = float(lr)

    @contextmanager
    def lr_on_device(self) -> Iterator[None]:
        """Have the groups' learning rates be tensors for the length of a block, on CUDA.

        Raises:
            CaptureError: a hook of the step, such as a scheduler's step, changed one inside a capture.
        """
        groups = self.optimizer.param_groups
        numbers = {index: groups[index]["lr"] for index in self._lr if isinstance(groups[index].get("lr"), Real)}
        versions = {index: self._lr[index]._version for index in numbers}
        if self.device.type == "cuda":
            for index in numbers:
                groups[index]["lr"] = self._lr[index]
        try:
            yield
        finally:
            for index, number in numbers.items():
                if groups[index]["lr"] is self._lr[index]:  # else a hook of the step has set another
                    groups[index]["lr"] = number
            written = [index for index in numbers if self._lr[index]._version != versions[index]]
            for index in written:
                del self._lr_value[index]  # what it holds is not known
        if gate.capturing() is None:
            for index in written:  # torch's schedulers write into a learning rate that is a tensor
                groups[index]["lr"] = self._lr[index].item()
        elif written or any(groups[index]["lr"] is not number for index, number in numbers.items()):
            raise CaptureError(
                "A hook of the optimizer's step changed the learning rate inside a capture; every replay would set the "
                "same value again.",
                cure="Call the scheduler after the TrainStep, not in a hook of the optimizer's step.",
            )

    # what a graph has baked in

    def host_state(self) -> dict[tuple[str, str], tuple[object, object]]:
        """What a step may change on the host alone: numbers, and which tensors its state and parameters are.

        Returns:
            by owner and key: the tensor, if it is one, and a value that changes with it.
        """
        optimizer, on_cuda = self.optimizer, self.device.type == "cuda"
        found: dict[tuple[str, str], tuple[object, object]] = {}

        def note(owner: str, entries: Iterable[tuple[Any, Any]]) -> None:
            found[owner, ""] = (None, None)
            for key, value in entries:
                if isinstance(value, torch.Tensor):
                    found[owner, repr(key)] = (
                        value,
                        value._version if on_cuda and value.device.type == "cpu" else None,
                    )
                elif isinstance(value, Real | str):
                    found[owner, repr(key)] = (None, value)

        note("the optimizer", [item for item in vars(optimizer).items() if not item[0].startswith("_")])
        for index, group in enumerate(optimizer.param_groups):
            note(f"parameter group {index}", [item for item in group.items() if item[0] not in ("params", "lr")])
        for number, (parameter, own) in enumerate(optimizer.state.items()):
            of = f"entry {number}" if isinstance(parameter, torch.Tensor) else f"entry {parameter!r}"
            note(f"{of} of its state", own.items() if isinstance(own, dict) else [("value", own)])
        note("the parameters' addresses", [(n, p.data_ptr()) for n, p in enumerate(self.parameters)])
        return found

    def check_step(self, before: dict[tuple[str, str], tuple[object, object]]) -> None:
        """Look at what a step has changed since ``host_state()``: a replay would not.

        Raises:
            CaptureError: something has changed, inside a capture. (On the CPU, outside one: a GraphsafeWarning.)
        """
        captured = gate.capturing() is not None
        changed = []
        for name, (tensor, value) in self.host_state().items():
            known = before.get(name)
            if known is None:  # a parameter's first state is the caller's to see; and out of a capture it is no fault
                if captured and (name[0], "") in before:
                    changed.append(name)
            elif known[0] is not tensor or not (known[1] is value or known[1] == value):
                changed.append(name)
        if not changed:
            return
        owner, key = changed[0]
        what = (
            f"{type(self.optimizer).__name__} cannot be captured: its step changes {key} of {owner} on the host, or "
            "binds it anew, and a replay would go on with what it was at the capture."
        )
        cure = f"Keep it in a tensor on the device and write into that in place. {_ALLOWED}"
        if captured:
            raise CaptureError(what, cure=cure)
        self.num_looks = 0
        warnings.warn(f"On a GPU this would be refused: {what} {cure}", GraphsafeWarning, stacklevel=5)

    def settings(self) -> list[dict[str, Any]]:
        """The groups' hyper-parameters, without a learning rate that is a number; then those of the step."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        for group in groups:
            del group["params"]
            if isinstance(group.get("lr"), Real):
                del group["lr"]
        return [*groups, self._other_settings()]

    def _other_settings(self) -> dict[str, Any]:
        """Which hooks the step runs, and the GradScaler's numbers."""
        optimizer, scaler = self.optimizer, self.scaler
        hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", ()) for when in ("pre", "post"))
        settings: dict[str, Any] = {"step hooks": [number for table in hooks for number in table]}
        if scaler is not None:
            settings["growth_factor"] = scaler.get_growth_factor()
            settings["backoff_factor"] = scaler.get_backoff_factor()
            settings["growth_interval"] = scaler.get_growth_interval()
        return settings

    def check_settings(self, captured: Sequence[dict[str, Any]]) -> None:
        """Raise GraphsafeError where a hyper-parameter is not the captured one."""
        groups = self.optimizer.param_groups
        if len(groups) != len(captured) - 1:
            raise GraphsafeError(
                f"The optimizer had {len(captured) - 1} parameter groups when the step was captured and has "
                f"{len(groups)} now. Add groups before the first step, or make a new TrainStep."
            )
        for index, group in enumerate(groups):
            before = captured[index]
            if not all(map(is_, map(group.get, before), before.values())):
                self._compare(f"parameter group {index}", group, before)
            if "lr" not in before and isinstance(group.get("lr"), torch.Tensor):
                self._compare(f"parameter group {index}", group, {"lr": "a number"})
        if captured[-1] != (now := self._other_settings()):
            self._compare("the step", now, captured[-1])

    @staticmethod
    def _compare(where: str, current: dict[str, Any], before: dict[str, Any]) -> None:
        for key, value in before.items():
            now = current.get(key)
            tensors = isinstance(now, torch.Tensor) or isinstance(value, torch.Tensor)
            if now is not value and (tensors or now != value):
                raise GraphsafeError(
                    f"{key!r} of {where} was {value!r} when the step was captured and is {now!r} now; a replay would "
                    "go on with the old value. Only the learning rate may change (OneCycleLR: cycle_momentum=False): "
                    "make a new TrainStep, or use mode='eager'."
                )
