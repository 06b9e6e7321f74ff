"""torch.compile and CUDA graphs, safe and fast from many threads of one process.

Importing this initialises no CUDA and imports no torch._dynamo.
"""

from . import padding
from .attach import attach
from .buffers import BufferRing, Spec, StaticBuffers
from .capture import Graph, capture
from .compile import compile, install, installed, uninstall
from .context import ThreadContext, current_context, thread_context
from .errors import (
    CaptureError,
    GateTimeout,
    GraphsafeError,
    GraphsafeWarning,
    NoContextError,
    RingClosed,
    ShapeMismatchError,
    UnsupportedTorchError,
    WrongThreadError,
)
from .executor import Executor
from .graphed import GraphedCallable, graphed
from .graphed_modules import make_graphed_callables
from .lint import Finding, lint
from .stats import Stats, stats
from .steps import mark_step_begin, step, steps
from .train_step import TrainStep
from .workers import Worker, WorkerGroup, spawn

__version__ = "0.1.0"

__all__ = [
    "BufferRing",
    "CaptureError",
    "Executor",
    "Finding",
    "GateTimeout",
    "Graph",
    "GraphedCallable",
    "GraphsafeError",
    "GraphsafeWarning",
    "NoContextError",
    "RingClosed",
    "ShapeMismatchError",
    "Spec",
    "StaticBuffers",
    "Stats",
    "ThreadContext",
    "TrainStep",
    "UnsupportedTorchError",
    "Worker",
    "WorkerGroup",
    "WrongThreadError",
    "attach",
    "capture",
    "compile",
    "current_context",
    "graphed",
    "install",
    "installed",
    "lint",
    "make_graphed_callables",
    "mark_step_begin",
    "padding",
    "spawn",
    "stats",
    "step",
    "steps",
    "thread_context",
    "uninstall",
]
