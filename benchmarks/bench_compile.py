"""What graphsafe costs torch.compile: a call, first calls from many threads, and a compile for a second device.

A call: of the same function compiled twice, in one process; plain torch.compile runs with every repair taken out
again, before each of its rounds. First calls: a fresh process with cold caches for each, whose threads all make the
first call of one compiled module at once, forward and backward; plain torch.compile has a time limit, and a failure or
a hang is reported as such. NUM_ROUNDS=5 repeats them. A second device, where there are two GPUs: seconds of the first
and of the second compile.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphsafe

from .compare import compare, record, spread

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = ["default", "reduce-overhead"] if DEVICE == "cuda" else ["default"]
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []
LIMIT_S = 40.0  # of a process whose first calls take a few seconds, its start included
NUM_ROUNDS = int(os.environ.get("NUM_ROUNDS", "1"))


@pytest.fixture
def clean_dynamo() -> Iterator[None]:
    """Nothing compiled and nothing repaired, before and after."""
    graphsafe.uninstall()
    torch.compiler.reset()
    yield
    graphsafe.uninstall()
    torch.compiler.reset()


def function() -> Callable[[torch.Tensor], torch.Tensor]:
    """The same function with code of its own, so that each compile is one from the start."""
    names: dict[str, Any] = {"torch": torch}
    exec("def function(x):\n    return torch.sin(x) * 2 + 1", names)
    return names["function"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["compile", "install"])
def test_a_call(benchmark: Any, clean_dynamo: None, how: str, mode: str) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plain = torch.compile(function(), mode=mode, dynamic=False)
    plain(x)
    graphsafe.install()
    ours = (graphsafe.compile if how == "compile" else torch.compile)(function(), mode=mode, dynamic=False)
    ours(x)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def after() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.compiler.cudagraph_mark_step_begin()

    name = "graphsafe.compile" if how == "compile" else "torch.compile after install()"
    compare(
        benchmark,
        {name: lambda: ours(x), "torch.compile": lambda: plain(x)},
        config={"device": DEVICE, "mode": mode, "function": "sin(x) * 2 + 1, x float32 (64,)"},
        before={name: graphsafe.install, "torch.compile": graphsafe.uninstall},
        after=after,
        max_calls=256,
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs, "a side compiled while it was timed"


WARM_UP = """
import json, sys
import torch
torch.compile(lambda x: x + 1)(torch.ones(3, device=sys.argv[1]))
print(json.dumps({}))
"""

FIRST_CALLS = """
import json, sys, threading, time
import torch
device, num_threads, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if how == "graphsafe":
    import graphsafe
    graphsafe.install()
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)]
model = torch.nn.Sequential(*layers).to(device)
x = torch.randn(32, 64, device=device)
expected = model(x).square().mean().item()
step = torch.compile(model, dynamic=False)
torch.compile(lambda x: x + 1)(torch.ones(3, device=device))  # imports and starts what the first compile of all needs
together = threading.Barrier(num_threads)
losses, errors = [], []
def body():
    try:
        together.wait()
        loss = step(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
threads = [threading.Thread(target=body, daemon=True) for _ in range(num_threads)]
start = time.perf_counter()
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"s": time.perf_counter() - start, "losses": losses, "errors": errors, "expected": expected}))
"""


def start(code: str, *arguments: str, caches: Path) -> dict[str, Any]:
    """Run code in a process of its own; its last line, or what became of it under ``outcome``."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches)}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"outcome": f"hangs (stopped after {LIMIT_S:.0f} s)"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"outcome": f"fails (exit {done.returncode}: {last[:120]})"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def warm_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches that hold what any first compile leaves there, such as precompiled headers, and nothing of the module."""
    directory = tmp_path_factory.mktemp("caches")
    start(WARM_UP, DEVICE, caches=directory / "used")
    shutil.copytree(directory / "used", directory / "kept")
    return directory


@functools.cache
def first_calls(how: str, num_threads: int, number: int, warm_up: Path) -> dict[str, Any]:
    """Seconds until all threads have made their first call, its losses checked against eager."""
    shutil.rmtree(warm_up / "used")
    shutil.copytree(warm_up / "kept", warm_up / "used")  # the same place each time: headers are bound to their path
    found = start(FIRST_CALLS, DEVICE, str(num_threads), how, caches=warm_up / "used")
    if found.get("errors"):
        found["outcome"] = f"fails in {len(found['errors'])} of {num_threads} threads ({found['errors'][0]})"
    elif "losses" in found:
        expected = torch.tensor(found["expected"]).expand(num_threads)
        torch.testing.assert_close(torch.tensor(found["losses"]), expected, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("num_threads", [1, 2, 4, 8])
def test_first_calls(benchmark: Any, warm_up: Path, num_threads: int) -> None:
    pairs = []
    for number in range(NUM_ROUNDS):
        ours = first_calls("graphsafe", num_threads, number, warm_up)
        assert "outcome" not in ours, f"graphsafe {ours['outcome']}"
        pairs.append((ours, first_calls("torch", num_threads, number, warm_up)))
    sides = ("torch.compile after install()", "torch.compile")
    config = {
        "device": DEVICE,
        "threads": num_threads,
        "module": "Linear(64, 64), GELU, LayerNorm; forward and backward, x (32, 64)",
        "caches": "cold but for another function's, a process each",
    }
    check = "every thread's loss is eager's within 1e-5"
    failures = [plain["outcome"] for _, plain in pairs if "outcome" in plain]
    times = tuple([side["s"] * 1e6 for side in column] for column in zip(*pairs, strict=True)) if not failures else ()
    if times:
        record(benchmark, sides, check, config, times)
    else:
        found = {"ours": sides[0], "other": sides[1], "num_rounds": NUM_ROUNDS, "check": check, "config": config}
        found["ours_us"] = spread([ours["s"] * 1e6 for ours, _ in pairs])
        found["other_outcome"] = f"{failures[0]}; {len(failures)} of {NUM_ROUNDS} processes"
        benchmark.extra_info.update(found)
    if num_threads > 1:
        one = statistics.median(first_calls("graphsafe", 1, number, warm_up)["s"] for number in range(NUM_ROUNDS))
        many = statistics.median(ours["s"] for ours, _ in pairs)
        benchmark.extra_info["ratio_to_one_thread"] = many / one
    benchmark.pedantic(lambda: None, rounds=1)


SECOND_DEVICE = """
import json, time
import torch, graphsafe
layers = [m for _ in range(12) for m in (torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))]
found, losses = [], []
for index in range(2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*layers).to(torch.device("cuda", index))
    step = graphsafe.compile(model, dynamic=False)
    with graphsafe.thread_context(index) as context:
        x = torch.ones(32, 256, device=context.device)
        context.synchronize()
        start = time.perf_counter()
        loss = step(x).square().mean()
        loss.backward()
        context.synchronize()
        found.append(time.perf_counter() - start)
        losses.append(loss.item())
print(json.dumps({"s": found, "losses": losses}))
"""


@pytest.mark.two_gpus
@pytest.mark.cuda
def test_a_compile_for_a_second_device(benchmark: Any, tmp_path: Path) -> None:
    found = start(SECOND_DEVICE, caches=tmp_path)
    assert "outcome" not in found, found["outcome"]
    torch.testing.assert_close(*map(torch.tensor, found["losses"]), rtol=1e-5, atol=1e-6)
    first_s, second_s = found["s"]
    config = {"devices": "cuda:0, then cuda:1", "module": "36 layers of width 256, forward and backward"}
    sides = ("the second device's compile", "the first device's compile")
    record(benchmark, sides, "the losses agree within 1e-5", config, ([second_s * 1e6], [first_s * 1e6]))
    benchmark.pedantic(lambda: None, rounds=1)
