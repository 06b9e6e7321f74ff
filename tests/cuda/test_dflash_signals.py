"""A signal to the whole process group, as a terminal or a job scheduler sends it, while steps are being compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
PROGRAM = """
import sys
from pathlib import Path
import torch
from examples.dflash.pipeline import Topology
from examples.dflash.target import Target
from examples.dflash.train import train_on
from tests.dflash.models import tiny_config, tiny_target
from tests.dflash.test_train import configuration, documents

if __name__ == "__main__":
    device = torch.device("cuda", 0)
    config = configuration(
        Path(sys.argv[1]), targets=("cuda:0",), drafters=("cuda:0",), token_budget=256, num_layers=2, epochs=10**6,
        max_steps=10**5, log_every=100, num_anchors=32,
    )
    target = Target(tiny_target().model.to(device))
    sys.exit(train_on(documents(24), {device: target}, tiny_config(), config, Topology((device,), (device,))))
"""


@pytest.mark.parametrize("after_s", [1.0, 5.0])
def test_a_signal_to_the_process_group_in_a_compile_ends_the_run_with_a_checkpoint(
    tmp_path: Path, after_s: float
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    with (tmp_path / "log").open("w+") as log:
        run = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "out")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 90
            while "training on" not in (tmp_path / "log").read_text():
                assert time.monotonic() < deadline and run.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
            time.sleep(after_s)
            os.killpg(run.pid, signal.SIGTERM)
            assert run.wait(120) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    assert list((tmp_path / "out" / "run" / "checkpoints").glob("step-*")), (tmp_path / "log").read_text()
