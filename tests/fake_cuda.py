"""A CUDA device that is not there: what a capture calls of torch.cuda, acted out on the CPU.

It keeps the current stream and device of each thread, who captures on which stream, which generator state the default
one has, and whether each capture was broken. It runs nothing.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphsafe as gs
from graphsafe import gate
from graphsafe.repairs import private

DEVICE = torch.device("cuda", 0)
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nCompile with ..."
INVALIDATED = "CUDA error: operation failed due to a previous error during capture\nCompile with ..."


def cuda_error(text: str) -> RuntimeError:
    """An error as torch raises it for one of CUDA's."""
    return getattr(torch, "AcceleratorError", RuntimeError)(text)


class State:
    """Of a generator."""

    def __init__(self) -> None:
        self.seed, self.offset = 1, 0
        self.made_in_inference: list[bool] = []


class FakeGenerator:
    """As torch.Generator, of the device."""

    def __init__(self, device: Any = None) -> None:
        self.state = State()

    def manual_seed(self, seed: int) -> None:
        self.state.seed, self.state.offset = seed, 0

    def initial_seed(self) -> int:
        return self.state.seed

    def get_offset(self) -> int:
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        self.state.offset = offset

    def graphsafe_get_state(self) -> FakeGenerator:
        found = FakeGenerator()
        found.state = self.state
        return found

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.state = other.state


class FakeStream:
    """As torch.cuda.Stream."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, DEVICE

    def synchronize(self) -> None: ...


class FakeGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.replays, self.num_resets = cuda, 0, 0
        self.generator: FakeGenerator | None = None

    def register_generator_state(self, generator: FakeGenerator) -> None:
        generator.state.made_in_inference.append(torch.is_inference_mode_enabled())
        self.generator = generator

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local" and self.generator is not None
        self.generator.state.made_in_inference.append(torch.is_inference_mode_enabled())
        if self.cuda.fail_begin:
            raise self.cuda.fail_begin.pop()
        stream = self.cuda.current_stream()
        assert stream not in self.cuda.capturing
        self.cuda.capturing[stream] = self
        self.cuda.pools.append(pool)

    def capture_end(self) -> None:
        stream = self.cuda.current_stream()
        assert self.cuda.capturing.pop(stream) is self
        if self in self.cuda.broken:
            raise cuda_error(INVALIDATED)

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        self.num_resets += 1


class FakeCuda:
    """The device."""

    def __init__(self) -> None:
        self.streams = threading.local()
        self.capturing: dict[FakeStream, FakeGraph] = {}
        self.broken: list[FakeGraph] = []
        self.pools: list[Any] = []
        self.fail_begin: list[RuntimeError] = []
        self.default_stream = FakeStream("default")
        self.default_generator = FakeGenerator()
        self.graphs: list[FakeGraph] = []
        self.reserved_bytes = 0
        self._pools = iter(range(1, 1_000_000))

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self.streams, "current", self.default_stream)

    def set_stream(self, stream: FakeStream) -> None:
        self.streams.current = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def make_graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self._pools))

    def is_capturing(self) -> bool:
        return self.current_stream() in self.capturing

    def break_captures(self) -> None:
        """What a device-wide synchronize does: it breaks every capture, and raises."""
        self.broken.extend(self.capturing.values())
        if self.capturing:
            raise cuda_error(NOT_PERMITTED)

    def operation(self, text: str = INVALIDATED) -> None:
        """An operation of the block: fails once the capture is broken."""
        if self.capturing.get(self.current_stream()) in self.broken:
            raise cuda_error(text)

    def host_read(self) -> None:
        """An operation that CUDA forbids inside a capture."""
        self.broken.append(self.capturing[self.current_stream()])
        raise cuda_error(NOT_PERMITTED)

    def state(self) -> dict[str, Any]:
        """What a capture must leave as it was."""
        return {
            "stream": self.current_stream(),
            "capturing": dict(self.capturing),
            "generator": self.default_generator.state,
            "holders": [len(one._holders) + len(one._waiters) for one in gate.all_gates()],
            "held": list(gate.held()),
        }


def patch(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Act the device out until the test ends."""
    cuda = FakeCuda()
    for name, value in {
        "current_stream": cuda.current_stream,
        "set_stream": cuda.set_stream,
        "stream": cuda.stream,
        "default_stream": lambda device=None: cuda.default_stream,
        "CUDAGraph": cuda.make_graph,
        "graph_pool_handle": cuda.new_pool,
        "is_current_stream_capturing": cuda.is_capturing,
        "current_blas_handle": lambda: 0,
        "memory_reserved": lambda device=None: cuda.reserved_bytes,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    real, real_default = torch.Generator, private.default_generator

    def make(device: Any = "cpu") -> Any:
        return FakeGenerator(device) if torch.device(device).type == "cuda" else real(device)

    def default(device: torch.device) -> Any:
        return cuda.default_generator if device.type == "cuda" else real_default(device)

    monkeypatch.setattr(torch, "Generator", make)
    monkeypatch.setattr(private, "default_generator", default)
    monkeypatch.setattr(private, "clear_cublas_workspaces", lambda: None)
    monkeypatch.setattr(private, "close_failed_capture", lambda graph, index, pool: None)
    return cuda


@contextmanager
def context_on(cuda: FakeCuda) -> Any:
    """A context of this thread on the device that is not there."""
    with gs.thread_context("cpu", seed=3) as context:
        context.device = DEVICE
        context.stream = FakeStream("own")  # type: ignore[assignment]
        context.generator = FakeGenerator()  # type: ignore[assignment]
        context.gate = gate.gate_for(DEVICE)
        cuda.set_stream(context.stream)  # type: ignore[arg-type]
        try:
            yield context
        finally:
            context.drain()
            for resource in context.resources():
                resource.close()
            context.device = torch.device("cpu")
            context.stream = None
