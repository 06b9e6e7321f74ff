"""What a training step works on, and whether it still is what it was.

Guarantees:
- ``holds()`` sees a module, parameter, buffer, gradient or optimizer state that was replaced, moved or loaded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Memory:
    """Where a step's tensors hang, and where they lie.

    Attributes:
        references: (mapping, key, what it held).
        parameters: the optimizer's.
        gradients: theirs; empty where they come and go with every step.
        state: the optimizer's mapping itself, which load_state_dict replaces.
        tensors, addresses: the tensors among all these, and their ``data_ptr()``.
    """

    references: list[tuple[Any, Any, Any]]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    state: Any
    tensors: list[torch.Tensor]
    addresses: list[int]

    @classmethod
    def of(
        cls, modules: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer, *, with_gradients: bool
    ) -> Memory:
        """As it is now."""
        state = optimizer.state
        references: list[tuple[Any, Any, Any]] = [
            (table, name, tensor)
            for module in modules
            for table in (module._parameters, module._buffers, module._modules)
            for name, tensor in table.items()
            if tensor is not None
        ]
        references += [(state, parameter, state[parameter]) for parameter in state]
        references += [
            (own, key, value) for own in state.values() for key, value in own.items() if isinstance(value, torch.Tensor)
        ]
        parameters = _parameters(optimizer)
        tensors = [held for _, _, held in references if isinstance(held, torch.Tensor)] + parameters
        gradients = [p.grad for p in parameters] if with_gradients else []
        tensors += [gradient for gradient in gradients if gradient is not None]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(references, parameters, gradients, state, tensors, addresses)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether everything still is where it was."""
        if optimizer.state is not self.state:
            return False
        parameters = _parameters(optimizer)
        if len(parameters) != len(self.parameters):
            return False
        if any(now is not then for now, then in zip(parameters, self.parameters, strict=True)):
            return False
        if any(table.get(key) is not held for table, key, held in self.references):
            return False
        if self.gradients and any(p.grad is not held for p, held in zip(parameters, self.gradients, strict=True)):
            return False
        return list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
