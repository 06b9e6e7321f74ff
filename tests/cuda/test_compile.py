"""Threads that compile and train flex_attention at once: the hang of A2, and its end.

Each program runs in a process of its own with a time limit, so that a hang shows the stacks and fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 400  # four cold compiles of flex_attention's forward and backward, one after the other

PROGRAM = """
import faulthandler, sys, threading
faulthandler.dump_traceback_later({limit}, exit=True)
import torch
from torch.nn.attention.flex_attention import flex_attention
import graphsafe

NUM_THREADS, STEPS, DEVICE = 4, 3, torch.device("cuda", 0)

def score(s, b, h, q, k):
    return torch.where(q >= k, s, -float("inf"))

def attend(q, k, v):
    return flex_attention(q, k, v, score_mod=score)

def own(index):
    scale = 1.0 + index  # another graph in each thread: nothing is shared by the compiler's caches
    def attend_scaled(q, k, v):
        return flex_attention(q * scale, k, v, score_mod=score)
    return attend_scaled, graphsafe.compile(attend_scaled)

def gradients(fn, index):
    result = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * index + step)
        q, k, v = (torch.randn(1, 2, 128, 32, generator=generator).to(DEVICE).requires_grad_() for _ in range(3))
        fn(q, k, v).square().sum().backward()
        result.append([t.grad.cpu() for t in (q, k, v)])
    return result

mode = sys.argv[1]
if mode.startswith("plain"):
    graphsafe.install()
shared = torch.compile(attend) if mode.startswith("plain") else graphsafe.compile(attend)
functions = [(attend, shared) if mode.endswith("shared") else own(index) for index in range(NUM_THREADS)]
results, errors, barrier = [None] * NUM_THREADS, [], threading.Barrier(NUM_THREADS)

def body(index):
    barrier.wait(60)
    results[index] = gradients(functions[index][1], index)

def guarded(index):
    try:
        body(index)
    except BaseException as error:
        errors.append(error)
        raise

if mode.startswith("plain"):
    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join({limit})
else:
    workers = [graphsafe.spawn(body, i, device=DEVICE, name=f"worker-{{i}}") for i in range(NUM_THREADS)]
    for worker in workers:
        worker.result(timeout={limit})
assert not errors, errors
for index, (reference, _) in enumerate(functions):
    for step, expected in enumerate(gradients(reference, index)):  # eager, in this one thread
        for name, got, want in zip("qkv", results[index][step], expected, strict=True):
            where = f"thread {{index}}, step {{step}}, {{name}}: "
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=lambda text, where=where: where + text)
print("done", graphsafe.installed())
"""


@pytest.mark.parametrize("mode", ["plain-own", "plain-shared", "contexts-own", "contexts-shared"])
def test_four_threads_train_flex_attention_at_once_with_right_gradients(mode: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),  # a warm cache would hide the hang
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(limit=TIME_LIMIT_S - 20), mode],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.startswith("done")
    assert "'A2': 'repaired'" in done.stdout
