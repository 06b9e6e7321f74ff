"""What torch keeps once for the process and a thread needs for itself: dispatch modes (A18), graph metadata (A19)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

import graphsafe
from graphsafe.repairs import dispatch_modes
from tests.helpers import DEADLINE_S, join_threads, plain_torch


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_torch():
        yield


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiles() -> int:
    """How often a fresh function is compiled at its first call, here."""
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        calls.append(1)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    return len(calls)


def overlapping_modes(during: Any) -> None:
    """Two threads' modes overlap, the first one left first; ``during()`` is called here meanwhile."""
    entered = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]

    def body(index: int) -> None:
        with Plain():
            entered[index].set()
            assert leave[index].wait(DEADLINE_S)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(2)]
    for index, thread in enumerate(threads):
        thread.start()
        assert entered[index].wait(DEADLINE_S)  # 1. the first is in its mode, then the second in its own
    during()  # 2. this thread is in none
    for index, thread in enumerate(threads):
        leave[index].set()  # 3. the first leaves, then the second puts back what it found
        join_threads([thread])


def test_a_function_is_compiled_while_other_threads_are_in_modes_and_afterwards() -> None:
    graphsafe.install()
    counts: list[int] = []
    overlapping_modes(lambda: counts.append(compiles()))
    counts.append(compiles())
    assert counts == [1, 1]
    with Plain():
        if dispatch_modes.probe(sys.modules["torch._dynamo.convert_frame"]):
            assert compiles() == 0  # its own mode still counts, as on plain torch
    assert compiles() == 1


def test_plain_torch_compiles_nothing_beside_another_threads_mode_where_it_asks_the_process() -> None:
    compiles()
    asks_the_process = dispatch_modes.probe(sys.modules["torch._dynamo.convert_frame"])
    flags = {name: value for name, value in vars(torch.utils._python_dispatch).items() if name.startswith("_is_in_")}
    counts: list[int] = []
    overlapping_modes(lambda: counts.append(compiles()))
    counts.append(compiles())
    vars(torch.utils._python_dispatch).update(flags)
    assert counts == ([0, 0] if asks_the_process else [1, 1])


def test_running_a_graph_leaves_the_metadata_alone_that_another_thread_keeps() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    for node in graph.graph.nodes:
        node.meta["mark"] = "the other graph's"
    seen: dict[str, list[object]] = {}

    class Look(torch.fx.Interpreter):
        def call_function(self, *args: Any) -> Any:
            seen[who].append(traceback.get_current_meta().get("mark"))
            return super().call_function(*args)

    for who in ("plain", "graphsafe"):
        seen[who] = []
        if who == "graphsafe":
            graphsafe.install()
        with traceback.preserve_node_meta():  # this thread traces, and another one runs a graph
            thread = threading.Thread(target=lambda: Look(graph).run(torch.ones(2)))
            thread.start()
            join_threads([thread])
            Look(graph).run(torch.ones(2))  # a graph that is run in the block itself hands its metadata on
    assert seen == {"plain": ["the other graph's"] * 2, "graphsafe": [None, "the other graph's"]}


def test_undo_gives_every_module_torchs_own_functions_back() -> None:
    before = traceback.preserve_node_meta, traceback.set_current_meta
    graphsafe.install()
    assert traceback.preserve_node_meta is not before[0]
    graphsafe.uninstall()
    assert (traceback.preserve_node_meta, traceback.set_current_meta) == before
    for name, module in list(sys.modules.items()):
        if name.startswith("torch."):
            assert getattr(vars(module).get("preserve_node_meta"), "__wrapped__", None) is not before[0], name
