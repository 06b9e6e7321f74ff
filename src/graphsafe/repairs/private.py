"""The private names of torch that are no repair, each in a function that says what it stands for.

Guarantees:
- Nothing here imports torch._dynamo or initialises CUDA on import.
- A name that this torch lacks is missed only by the function that needs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
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
    torch._C._cuda_releasePool(device_index, pool)


def pool_bytes(pools: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Bytes that the allocator reserves for each of these graph pools."""
    sizes = dict.fromkeys(pools, 0)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", ()))
        if pool in sizes:
            sizes[pool] += int(segment["total_size"])
    return sizes


def scaler_stages(scaler: torch.amp.GradScaler) -> dict[Any, Any]:
    """Which optimizers the scaler has unscaled or stepped since its last update; to be given to ``restore_stages``."""
    stages: dict[Any, dict[str, Any]] = scaler._per_optimizer_states
    return {key: dict(value) for key, value in stages.items()}


def restore_stages(scaler: torch.amp.GradScaler, saved: dict[Any, Any]) -> None:
    """Undo what a step that was only captured, and failed, noted in the scaler."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update(saved)
