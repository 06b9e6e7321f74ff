"""Makes an optimizer's step capturable, and sees when its settings or its state are no longer the captured ones.

Guarantees:
- ``param_groups["lr"]`` stays the user's Python number: a float32 tensor on the device stands in for it during a step,
  and takes its value over whenever it has changed. (A captured kernel would keep the number for ever.)
- An optimizer of torch.optim whose step reads that tensor on the host is refused by name. Read in torch 2.11 to 2.15:
  a Python scalar argument (``alpha=-lr``) made from a tensor synchronises.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .errors import GraphsafeError, GraphsafeWarning

_ANY_IMPLEMENTATION = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"})
_FOREACH_ONLY = frozenset({"RMSprop", "Adadelta"})
_FUSED_ONLY = frozenset({"SGD", "Adagrad"})
_SCALER = frozenset({"Adam", "AdamW", "SGD"})
_ALLOWED = (
    "These can be captured: Adam, AdamW, NAdam, RAdam, Adamax, ASGD and Rprop; RMSprop and Adadelta unless "
    "foreach=False; SGD with fused=True. TrainStep(mode='eager') takes any."
)


def _why_not(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"]:
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


class OptimizerControl:
    """One optimizer, as a graph needs it.

    Args:
        optimizer: its parameters lie on one device.
        scaled: whether a GradScaler steps it.
    Raises:
        GraphsafeError: no parameters, several devices, or (on CUDA, where ``strict``) a step that cannot be captured.
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
        if strict:
            self._refuse(scaled)
        self._lr: dict[int, torch.Tensor] = {}  # by group; a group whose own learning rate is a tensor has none
        self._lr_value: dict[int, float] = {}
        self.prepare()

    def _refuse(self, scaled: bool) -> None:
        name = type(self.optimizer).__name__
        for group in self.optimizer.param_groups:
            why = _why_not(self.optimizer, group)
            if why is None and scaled and not (name in _SCALER and group.get("fused")):
                why = "under a GradScaler only fused Adam, AdamW and SGD skip a step without asking the host"
            if why is None:
                continue
            text = f"{name} cannot be captured: {why}. {_ALLOWED}"
            if self.device.type == "cuda":
                raise GraphsafeError(text)
            warnings.warn(f"On a GPU this would be refused: {text}", GraphsafeWarning, stacklevel=4)
            return

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

    # learning rate

    @property
    def lr_tensors(self) -> list[torch.Tensor]:
        """The device's learning rates, one a group."""
        return list(self._lr.values())

    def refresh_lr(self) -> None:
        """Bring the device's learning rates up to date with the groups' numbers. Enqueues on the current stream."""
        for index, group in enumerate(self.optimizer.param_groups):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                continue  # the user's own tensor: read in place
            if index not in self._lr:
                self._lr[index] = torch.zeros((), dtype=torch.float32, device=self.device)
            if lr != self._lr_value.get(index):
                self._lr[index].fill_(lr)
                self._lr_value[index] = lr

    @contextmanager
    def lr_on_device(self) -> Iterator[None]:
        """Have the groups' learning rates be tensors for the length of a block, on CUDA."""
        if self.device.type != "cuda":
            yield
            return
        swapped = []
        for index, group in enumerate(self.optimizer.param_groups):
            if not isinstance(group["lr"], torch.Tensor):
                swapped.append((group, group["lr"], self._lr[index]))
                group["lr"] = self._lr[index]
        try:
            yield
        finally:
            for group, number, tensor in swapped:
                if group["lr"] is tensor:  # else a hook of the step has set another
                    group["lr"] = number

    # what a graph has baked in

    def settings(self) -> list[dict[str, Any]]:
        """The groups' hyper-parameters; of the learning rate only which tensor it is, if it is one."""
        return [self._settings_of(group) for group in self.optimizer.param_groups]

    @staticmethod
    def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in group.items() if key != "params"}
        if not isinstance(settings["lr"], torch.Tensor):
            settings["lr"] = "a number"
        return settings

    def check_settings(self, captured: Sequence[dict[str, Any]]) -> None:
        """Raise GraphsafeError where a hyper-parameter is not the captured one."""
        groups = self.optimizer.param_groups
        if len(groups) != len(captured):
            raise GraphsafeError(
                f"The optimizer had {len(captured)} parameter groups when the step was captured and has {len(groups)} "
                "now. Add groups before the first step, or make a new TrainStep."
            )
        for index, (group, before) in enumerate(zip(groups, captured, strict=True)):
            current = self._settings_of(group)
            for key, value in before.items():
                now = current.get(key)
                tensors = isinstance(now, torch.Tensor) or isinstance(value, torch.Tensor)
                if now is not value and (tensors or now != value):
                    raise GraphsafeError(
                        f"{key!r} of parameter group {index} was {value!r} when the step was captured and is {now!r} "
                        "now; a replay would go on with the old value. Only the learning rate may change (OneCycleLR: "
                        "cycle_momentum=False): make a new TrainStep, or use mode='eager'."
                    )
