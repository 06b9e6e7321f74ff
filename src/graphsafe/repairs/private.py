"""The private names of torch that are no repair, each in a function that says what it stands for.

Guarantees:
- Nothing here imports torch._dynamo or initialises CUDA on import.
- A name that this torch lacks is missed only by the function that needs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["DispatchMode", "TreeSpec", "tree_flatten", "tree_unflatten"]


def same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two objects stand for one generator: what reaches a dispatch mode is an object of its own."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]


def state_bytes(state: torch.Tensor) -> bytes:
    """A generator's state as bytes, read without an operator, so that no dispatch mode sees it."""
    return ctypes.string_at(state.data_ptr(), state.numel() * state.element_size())


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on ``device`` use when they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def keeps_graph() -> bool:
    """Whether the backward that this thread is in was asked to keep its graph; True where that cannot be known."""
    ask: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return ask()


def multithreading_enabled() -> bool:
    """Whether this thread's backward may run on autograd's device threads."""
    return bool(torch._C._is_multithreading_enabled())


def autocast_state(device_type: str) -> tuple[object, ...]:
    """What autocast does in this thread, as a hashable value."""
    on = torch.is_autocast_enabled(device_type)
    return (on, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()) if on else (False,)


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Begin a capture on the current stream that other threads' work cannot break by its mere kind."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def clear_cublas_workspaces() -> None:
    """Drop torch's map of cuBLAS workspaces, so that none outlives or is shared by the pool it was allocated in."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


_abandoned: list[torch.cuda.CUDAGraph] = []  # kept for good: torch may still hold a pointer to each
_spoiled: set[tuple[int, ...]] = set()  # ids of pools that must not be captured into again


def pool_is_spoiled(pool: tuple[int, int]) -> bool:
    """Whether a capture into this pool failed in a way that torch cannot forget (torch <= 2.13)."""
    return tuple(pool) in _spoiled


def close_failed_capture(graph: torch.cuda.CUDAGraph, device_index: int, pool: tuple[int, int]) -> None:
    """Take out the allocator's filter and pool use that a failed ``capture_end`` leaves behind (torch <= 2.13).

    The allocator of pinned memory keeps a filter of its own, which points to the graph: so the graph is never freed. It
    also takes the pool's id for one that still captures: so that id must not be captured into again.
    """
    _abandoned.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(device_index, pool)
    except RuntimeError:  # this torch has cleaned up itself
        return
    _spoiled.add(tuple(pool))
    torch._C._cuda_releasePool(device_index, pool)


def reserved_bytes(device_index: int) -> int:
    """Bytes that the allocator has reserved on a CUDA device.

    Not ``memory_snapshot()``, which tells pools apart: with a look at the pool after each capture, beside captures and
    replays of other threads, the process crashed within seconds, and without it never (torch 2.11).
    """
    return int(torch.cuda.memory_reserved(device_index))


def scaler_stages(scaler: torch.amp.GradScaler) -> dict[Any, Any]:
    """Which optimizers the scaler has unscaled or stepped since its last update; to be given to ``restore_stages``."""
    stages: dict[Any, dict[str, Any]] = scaler._per_optimizer_states
    return {key: dict(value) for key, value in stages.items()}


def restore_stages(scaler: torch.amp.GradScaler, saved: dict[Any, Any]) -> None:
    """Undo what a step that was only captured, and failed, noted in the scaler."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update(saved)


def data_pointers_equal(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    """Whether each tensor's memory begins at its address. ``indices`` counts them from 0."""
    if _pointers_equal is not None:
        return bool(_pointers_equal(tensors, addresses, indices))
    return list(map(torch.Tensor.data_ptr, tensors)) == addresses


_pointers_equal: Callable[..., bool] | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def current_raw_stream(device_index: int) -> int:
    """The current CUDA stream of this thread, as the number that ``Stream.cuda_stream`` has."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


@dataclass(frozen=True)
class Modes:
    """How many function modes and dispatch modes a thread is in, and torch's flags that it is in any."""

    num_function: int
    num_dispatch: int
    flags: dict[str, bool]


def open_modes() -> Modes:
    """The modes that this thread is in."""
    names = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
    flags = {name: value for name in names if isinstance(value := getattr(_python_dispatch, name), bool)}
    return Modes(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), flags)


def leave_modes(down_to: Modes, *, with_flags: bool) -> None:
    """Leave this thread's modes, innermost first, until only as many are open.

    Args:
        with_flags: put the flags back as well, after an interrupt as a mode was entered.
    """
    while (depth := torch._C._len_torch_dispatch_stack()) > down_to.num_dispatch:
        mode = torch._C._get_dispatch_stack_at(depth - 1)
        try:
            mode.__exit__(None, None, None)
        except IndexError:  # an interrupt came as it was entered or left: it is still there, and its flags are lost
            if torch._C._len_torch_dispatch_stack() == depth:
                torch._C._pop_torch_dispatch_stack(None)
            with_flags = True
    if with_flags:
        vars(_python_dispatch).update(down_to.flags)
    while torch._C._len_torch_function_stack() > down_to.num_function:
        torch._C._pop_torch_function_stack()


def takes_gradients(node: Any) -> bool:
    """Whether an autograd node is the one that adds to a leaf's ``.grad``; its ``variable`` is the leaf."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Each autograd node of a graph once, those of ``roots`` too; None stands for a tensor without one."""
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(one for one, _ in node.next_functions)


def enters_compiled_code(code: CodeType) -> bool:
    """Whether ``code`` is of the module through whose functions alone a thread comes to look for compiled code."""
    return code.co_filename.replace("\\", "/").endswith("/torch/_dynamo/eval_frame.py")


def have_dynamo_skip(*functions: Callable[..., Any], callees: bool = True) -> None:
    """Have Dynamo compile no frame of ``functions`` where compiled code calls them, nor of what these call.

    Args:
        callees: False lets it look at the frames of what they call.
    """
    frames = torch._C._dynamo.eval_frame
    try:
        others = frames._FrameAction.SKIP if callees else frames._FrameAction.DEFAULT
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, others)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # this torch has another way: it may look at the frames
        return
