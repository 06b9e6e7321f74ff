"""One record of what graphsafe did in this process.

Guarantees:
- Reads counters that other modules keep; takes no gate and never synchronises a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .compile_gate import compiles
from .context import all_counters
from .gate import Counters
from .graph import Graph

Sizes = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class GraphStats:
    """One graph of a context that is alive.

    Attributes:
        name: the captured function's, or ``file:line`` of a ``capture()`` block.
        num_bytes: that its capture added to its pool; 0 on the CPU.
        replays: count.
        pool_shared: whether the pool was made for other graphs too.
    """

    name: str
    num_bytes: int
    replays: int
    pool_shared: bool


@dataclass(frozen=True)
class ContextStats:
    """Counts of one context, or of all ended contexts of one name on one device.

    Attributes:
        name, device: the context's.
        alive: whether the context still runs; False sums up those that have ended.
        captures, failed_captures, replays, eager_steps, mismatches: counts.
        graph_bytes: reserved by the context's CUDA graph pools.
        wait_s: seconds spent waiting at the device's gate.
        graphs: the graphs that live in it, by name; empty for those that have ended.
    """

    name: str
    device: str
    alive: bool
    captures: int
    failed_captures: int
    replays: int
    eager_steps: int
    mismatches: int
    graph_bytes: int
    wait_s: float
    graphs: tuple[GraphStats, ...] = ()


@dataclass(frozen=True)
class Stats:
    """All contexts of the process, those alive first. ``str()`` makes a table of it.

    Attributes:
        contexts: a record each.
        compiles: how often each function, or part of one after a graph break, was compiled since ``install()``, by
            name, file and line, or for a module by its class. Calls that found an artefact are not counted.
    """

    contexts: tuple[ContextStats, ...]
    compiles: Mapping[str, int] = field(default_factory=dict)

    def total(self, field: str) -> int | float:
        """The sum of one count over all contexts."""
        counts: list[int | float] = [getattr(context, field) for context in self.contexts]
        return sum(counts)

    def __str__(self) -> str:
        header = ("context", "device", "captures", "failed", "replays", "eager", "mismatches", "graph MiB", "wait s")
        rows = [
            (
                c.name if c.alive else f"{c.name} (ended)",
                c.device,
                str(c.captures),
                str(c.failed_captures),
                str(c.replays),
                str(c.eager_steps),
                str(c.mismatches),
                f"{c.graph_bytes / 2**20:.1f}",
                f"{c.wait_s:.2f}",
            )
            for c in self.contexts
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
        ]
        again = {what: times for what, times in self.compiles.items() if times > 1}
        lines += [f"compiled {times} times: {what}" for what, times in sorted(again.items(), key=lambda item: -item[1])]
        return "\n".join(lines)


def stats() -> Stats:
    """What every context of this process did so far, ended ones included."""
    live, ended = all_counters()
    graphs = {id(context): [r for r in context.resources() if isinstance(r, Graph)] for context, _ in live}

    def row(name: str, device: str, alive: bool, counters: Counters, own: list[Graph], sizes: Sizes) -> ContextStats:
        return ContextStats(
            name=name,
            device=device,
            alive=alive,
            captures=counters.captures,
            failed_captures=counters.failed_captures,
            replays=counters.replays,
            eager_steps=counters.eager_steps,
            mismatches=counters.mismatches,
            graph_bytes=sum(sizes.get(pool, 0) for pool in {graph.pool for graph in own} if pool is not None),
            wait_s=counters.wait_s,
            graphs=tuple(sorted((_graph(graph) for graph in own if not graph.closed), key=lambda one: one.name)),
        )

    rows = [row(c.name, str(c.device), True, counters, graphs[id(c)], c.pool_bytes) for c, counters in live]
    rows += [row(name, device, False, counters, [], {}) for (name, device), counters in ended.items()]
    return Stats(tuple(rows), dict(compiles))


def _graph(graph: Graph) -> GraphStats:
    return GraphStats(graph.name, graph.num_bytes, graph.num_replays, graph.pool_shared)
