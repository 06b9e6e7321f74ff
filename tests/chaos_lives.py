"""Lives of chaos.py: scripts that use all of graphsafe, and the threads beside them that it does not manage."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import functional

import graphsafe as gs

SIZE, WIDTH, ROWS = 1024, 64, (8, 16, 24, 32, 40)  # more row counts than the graphed functions may have graphs
MAX_KEPT = 6  # graphs of one life
MEBIBYTE = 1 << 20
LOADER_TIMEOUT_S = 60.0


class Deliberate(Exception):
    """What a life raises inside a capture on purpose."""


@dataclass
class Tally:
    """What one slot saw; written by the thread that lives in it, read by anyone."""

    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    alive_at: float = field(default_factory=time.monotonic)

    def check(self, right: bool, what: str) -> None:
        self.checked += 1
        self.alive_at = time.monotonic()
        if not right:
            self.wrong.append(f"{threading.current_thread().name}: {what}")


@dataclass
class Kept:
    """A graph of a life; ``factor`` is None where it draws a dropout mask."""

    graph: Any
    x: torch.Tensor
    y: torch.Tensor
    factor: int | None
    depth: int


def capture_chain(x: torch.Tensor, factor: int, depth: int) -> tuple[Any, torch.Tensor]:
    with gs.capture() as graph:
        y = x
        for _ in range(depth):
            y = y * 2 + factor
    return graph, y


def chain_value(x: int, factor: int, depth: int) -> float:
    return float(x * 2**depth + factor * (2**depth - 1))


def capture_dropout(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    with gs.capture() as graph:
        y = functional.dropout(x, 0.5)
    return graph, y


def fail_a_capture(x: torch.Tensor, how: str) -> None:
    """Returns if the capture failed as it should, else raises."""
    try:
        with gs.capture():
            y = functional.dropout(x, 0.5)
            if how == "item":
                y.sum().item()
            elif how == "nonzero":
                y.nonzero()
            else:
                raise Deliberate
    except Deliberate:
        if how == "raise":
            return
        raise
    except gs.CaptureError as error:
        if how == "raise" or "chaos_lives.py" not in str(error):
            raise
        return
    raise AssertionError(f"a capture with {how} inside did not fail")


class Net(torch.nn.Module):
    """Two linear layers and dropout, from a generator of its own: making it draws nothing from the default one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(*shape, generator=generator) / 8).to(device))

        self.first, self.second, self.bias = parameter(WIDTH, WIDTH), parameter(WIDTH, WIDTH), parameter(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(functional.linear(x, self.first, self.bias))
        return functional.linear(functional.dropout(x, 0.1, self.training), self.second)


class Life:
    """One script, in the context of the calling thread.

    Args:
        expected: what the script's solo run computed; None: this is that run.
    """

    WEIGHTS: ClassVar[dict[str, int]] = {  # how often it does what
        "arithmetic": 6, "dropout": 4, "replay": 8, "fail": 6, "train": 6, "infer": 6, "eager": 4, "big": 2, "drop": 4,
        "collect": 1, "compiled": 1,
    }  # fmt: skip

    def __init__(self, script: int, tally: Tally, without: frozenset[str], expected: list[torch.Tensor] | None) -> None:
        self.rng, self.seed, self.tally, self.expected = random.Random(script), script, tally, expected
        self.calm = expected is None
        self.seen: list[torch.Tensor] = []
        self.position = 0
        self.context = gs.current_context()
        self.device = self.context.device
        self.kept: list[Kept] = []
        self.weights = {name: weight for name, weight in self.WEIGHTS.items() if name not in without}
        self.batches = torch.randn(8, 2, 32, WIDTH, generator=torch.Generator().manual_seed(script)).to(self.device)
        self.trainers = [self.trainer(accumulate) for accumulate in (1, 2)]
        self.inferers = [self.inferer(training) for training in (False, True)]

    def live(self, stop: threading.Event) -> list[torch.Tensor]:
        for _ in range(self.rng.randrange(30, 60)):
            if stop.is_set():
                break
            self.tally.alive_at = time.monotonic()
            getattr(self, self.rng.choices(list(self.weights), list(self.weights.values()))[0])()
        return self.seen

    # checks

    def same(self, tensor: torch.Tensor, what: str) -> None:
        """The solo run computed the same bits."""
        value = tensor.detach().cpu()
        if self.expected is None:
            self.seen.append(value.clone())
            self.tally.alive_at = time.monotonic()
            return
        self.tally.check(torch.equal(value, self.expected[self.position]), f"{what}, unlike the solo run")
        self.position += 1

    def equals(self, tensor: torch.Tensor, value: float, what: str) -> None:
        self.tally.check(bool((tensor == value).all()), f"{what}: {tensor.flatten()[:4].tolist()} and not {value}")

    # what a life does

    def arithmetic(self) -> None:
        factor, depth = self.rng.randrange(1, 50), self.rng.randrange(1, 7)
        x = torch.zeros(SIZE, device=self.device)
        graph, y = capture_chain(x, factor, depth)
        self.keep(Kept(graph, x, y, factor, depth))

    def dropout(self) -> None:
        x = torch.ones(SIZE, device=self.device)
        graph, y = capture_dropout(x)
        self.keep(Kept(graph, x, y, None, 0))

    def keep(self, kept: Kept) -> None:
        self.kept.append(kept)
        self.play(kept)
        if len(self.kept) > MAX_KEPT:
            self.drop()

    def play(self, kept: Kept) -> None:
        for _ in range(self.rng.randrange(4, 16)):
            if kept.factor is None:
                kept.graph.replay()
                self.same(kept.y, "a replayed dropout mask")
            else:
                value = self.rng.randrange(100)
                kept.x.fill_(value)
                kept.graph.replay()
                self.equals(kept.y, chain_value(value, kept.factor, kept.depth), "a replayed chain")

    def replay(self) -> None:
        if self.kept:
            self.play(self.rng.choice(self.kept))

    def fail(self) -> None:
        how = self.rng.choice(["item", "nonzero", "raise"])
        if not self.calm:
            fail_a_capture(torch.ones(SIZE, device=self.device), how)
        self.replay()

    def trainer(self, accumulate: int) -> gs.TrainStep:
        net = Net(self.seed + accumulate, self.device)
        return gs.TrainStep(
            lambda x, y: (net(x) - y).square().mean(),
            torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True),
            model=net,
            mode="eager" if self.calm else "graph",
            accumulate=accumulate,
            max_grad_norm=1.0,
            num_warmup_iters=2,
        )

    def train(self) -> None:
        step = self.rng.choice(self.trainers)
        for _ in range(self.rng.randrange(3, 9)):
            self.same(step(*self.rng.choice(self.batches)), "a training loss")

    def inferer(self, training: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        net = Net(self.seed, self.device).train(training)
        if self.calm or not hasattr(gs, "graphed"):

            def eager(x: torch.Tensor) -> torch.Tensor:
                with self.context.eager(rng=training):
                    return net(x)

            return eager
        outputs = "copy" if training else "alias"
        return gs.graphed(net, num_warmup_iters=1, max_graphs=len(ROWS) - 1, outputs=outputs)  # type: ignore

    def infer(self) -> None:
        call, rows = self.rng.choice(self.inferers), self.rng.choice(ROWS)
        with torch.no_grad():
            for x in self.batches[: self.rng.randrange(2, 6)].flatten(1, 2)[:, :rows]:
                self.same(call(x), f"an inference of {rows} rows")

    def eager(self) -> None:
        with self.context.eager():
            mask = functional.dropout(torch.ones(SIZE, device=self.device), 0.5)
        self.same(mask, "an eager dropout mask")
        value = self.rng.randrange(1000)
        with self.context.eager(rng=False):
            twice = torch.full((SIZE,), float(value), device=self.device) * 2
        self.equals(twice, 2.0 * value, "an eager step")

    def big(self) -> None:
        size, value = self.rng.randrange(1, 64) * MEBIBYTE // (1 if self.device.type == "cuda" else 64), 7.0
        tensors = [torch.full((size,), value + index, device=self.device) for index in range(2)]
        self.equals(tensors[0] + 1, value + 1, "a big tensor")
        self.equals(tensors[1], value + 1, "a big tensor")

    def drop(self) -> None:
        how = self.rng.choice(["reset", "reference", "cycle"])
        if self.kept:
            kept = self.kept.pop(self.rng.randrange(len(self.kept)))
            if how == "reset":
                kept.graph.reset()
            elif how == "cycle" and not self.calm:  # left to the garbage collector, whenever and wherever it runs
                kept.graph = (kept.graph, kept)

    def collect(self) -> None:
        if not self.calm:
            gc.collect()

    def compiled(self) -> None:
        factor = self.rng.randrange(1, 1000)
        names: dict[str, Any] = {}  # a function with code of its own, so that it is compiled anew
        exec(compile(f"def function(x):\n    return x * 2 + {factor}", __file__, "exec"), names)
        x = torch.full((SIZE,), 3.0, device=self.device)
        function = names["function"] if self.calm else gs.compile(names["function"], backend="aot_eager", dynamic=False)
        self.equals(function(x), 6.0 + factor, "a compiled function")


# Threads that graphsafe does not manage. Each is a generator that works a little and yields whether all was right.


def reads(device: torch.device) -> Generator[bool]:
    for index in range(1 << 30):
        yield torch.full((SIZE,), float(index % 100), device=device).sum().item() == SIZE * (index % 100)
        time.sleep(0.001)  # leaves the interpreter to the lives


def pinned_copies(device: torch.device) -> Generator[bool]:
    cuda = device.type == "cuda"
    done = torch.cuda.Event() if cuda else None

    def wait() -> None:
        if done is not None:
            done.record()
            done.synchronize()

    for index in range(1 << 30):
        source = torch.full((SIZE,), float(index % 1000), pin_memory=cuda)
        there = source.to(device, non_blocking=True)
        wait()
        back = torch.empty(SIZE, pin_memory=cuda)
        back.copy_(there * 2, non_blocking=True)
        wait()
        yield torch.equal(back, source * 2)
        time.sleep(0.001)


def caches(device: torch.device) -> Generator[bool]:
    while True:
        torch.cuda.empty_cache()  # does nothing without CUDA
        time.sleep(0.05)
        yield True


def syncs(device: torch.device) -> Generator[bool]:
    while True:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
            torch.cuda.synchronize(device)  # waits for captures, under install()
            torch.cuda.mem_get_info(device)
        time.sleep(0.01)
        yield True


def new_streams(device: torch.device) -> Generator[bool]:
    """Streams of torch's pool, which hands the same 32 out time and again; none may be a stream that captures."""
    while True:
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                x = torch.ones(SIZE, device=device) * 3
            stream.synchronize()
            yield x.sum().item() == 3 * SIZE
        time.sleep(0.02)
        yield True


def seeding(device: torch.device) -> Generator[bool]:
    read = torch.get_rng_state if device.type == "cpu" else lambda: torch.cuda.get_rng_state(device)
    torch.manual_seed(7)
    seeded = read()
    while True:
        torch.manual_seed(7)
        yield torch.equal(read(), seeded)
        time.sleep(0.05)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), float(index))


def loading(device: torch.device) -> Generator[bool]:
    cuda, generator = device.type == "cuda", torch.Generator()  # a loader draws its seed: not from the default one
    loader = torch.utils.data.DataLoader(
        Numbers(),
        8,
        num_workers=2,
        pin_memory=cuda,
        persistent_workers=True,
        generator=generator,
        timeout=LOADER_TIMEOUT_S,
    )
    while True:
        for index, batch in enumerate(loader):
            expected = SIZE * sum(range(8 * index, 8 * index + 8))
            yield batch.is_pinned() == cuda and batch.to(device, non_blocking=True).sum().item() == expected
            time.sleep(0.005)


FOREIGN = (reads, pinned_copies, caches, syncs, new_streams, seeding, loading)
