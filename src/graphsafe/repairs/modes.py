"""The modes of torch that this thread has entered and not left: no repair, the way out of all of them.

Guarantees:
- Nothing of another thread changes, and no mode that is left behind is asked more than to leave.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 10  # for modes that put another one back as they leave


class _PerThread(threading.local):
    """What keeps inference mode off inside one that was never left; it lives as long as the thread."""

    def __init__(self) -> None:
        self.guards: list[Any] = []


_per_thread = _PerThread()


def leave_all() -> list[str]:
    """Leave every mode of this thread, whoever entered it; grad mode is on and autocast off, with torch's own dtypes.

    Returns:
        the names of those that only a block that was never left can have entered: inference mode, modes of functions
        and operators, hooks on saved tensors.
    """
    left: list[str] = []
    with contextlib.suppress(AssertionError):  # another mode lies below it; it is left with the others
        torch.set_default_device(None)
    left += _leave_stack(torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at, _drop_dispatch_mode)
    left += _leave_stack(torch._C._len_torch_function_stack, torch._C._get_function_stack_at, _drop_function_mode)
    _leave_default_device()
    if _leave_saved_tensor_hooks():
        left.append("saved_tensors_hooks")
    if torch.is_inference_mode_enabled():
        guard = torch.inference_mode(False)
        guard.__enter__()
        _per_thread.guards.append(guard)
        left.append("inference_mode")
    torch.set_grad_enabled(True)
    _leave_autocast()
    return left


def _leave_default_device() -> None:
    torch.set_default_device(None)
    context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if getattr(context, "device_context", "none") is None:
        del context.device_context  # older torch's get_default_device() fails where it has been set to None


def _leave_stack(size: Callable[[], int], at: Callable[[int], Any], drop: Callable[[], object]) -> list[str]:
    left: list[str] = []
    for _ in range(size() + _ROUNDS):
        before = size()
        if before == 0:
            break
        mode = at(before - 1)
        left.append(type(mode).__name__)
        with contextlib.suppress(
            Exception
        ):  # it was entered in another way, or fails to clean up: it goes all the same
            mode.__exit__(None, None, None)
        if size() >= before:
            drop()
    return left


def _drop_dispatch_mode() -> None:
    torch._C._pop_torch_dispatch_stack(None)


def _drop_function_mode() -> None:
    torch._C._pop_torch_function_stack()


def _leave_saved_tensor_hooks() -> bool:
    top: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found = False
    while top is not None and top(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found = True
    return found


def _leave_autocast() -> None:
    for device_type, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):  # torch's own defaults
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(True)
    # At another depth than 0 the end of the next block would not let go of its casts of weights.
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    while depth != 0:
        depth = torch.autocast_decrement_nesting() if depth > 0 else torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
