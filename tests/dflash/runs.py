"""Tiny training runs in processes of their own, which a test may stop, kill or freeze.

Run as a program (``python -m tests.dflash.runs OUT ...``) it is what torchrun starts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.dflash import train as train_module
from examples.dflash.__main__ import explain
from examples.dflash.config import Config
from examples.dflash.processes import end_process

from .models import tiny_target
from .test_train import configuration, documents

DEADLINE_S = 60.0


def settings(out: Path, **changes: Any) -> Config:
    """Of a run of some seconds with validation and many checkpoints."""
    usual = dict(max_steps=60, log_every=5, save_every=7, num_validation=2, peer_timeout_s=5.0, lr=1e-2)
    config: Config = configuration(out, **{**usual, **changes})
    return dataclasses.replace(config, out=out)


def train_tiny(config: Config, rank: int = 0, size: int = 1, port: int = 0, num_documents: int = 24) -> int:
    """``train`` with a tiny target and documents made in memory; as process ``rank`` of ``size`` on this host."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    target = tiny_target()
    train_module.resolve_target = lambda name: Path("/nowhere")
    train_module.load_targets = lambda path, config, devices: {device: target for device in devices.targets}
    train_module.load_training_documents = lambda *args, **kwargs: documents(num_documents)
    return train_module.train(config)


def _child(log: Path, config: Config, rank: int, size: int, port: int, before: Callable[[int], None] | None) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.3 * DEADLINE_S, exit=False)
    if before is not None:
        before(rank)
    try:
        code = train_tiny(config, rank, size, port)
    except BaseException as exc:
        print(f"error {type(exc).__name__}: {explain(exc) or exc}", file=sys.stderr, flush=True)
        code = 2
    if size > 1 and code == 2:
        ctypes.pythonapi.Py_Exit(code)  # as a program ends: Python is taken down around the threads that are left
    os._exit(code)  # the same, in less time, where none are left


class Run:
    """Processes that train together.

    Args:
        config: of all of them.
        size: how many.
        before: called in each, with its rank, before it trains.
    """

    def __init__(self, config: Config, size: int = 1, before: Callable[[int], None] | None = None) -> None:
        self.config, self.size = config, size
        config.out.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.dflash.runs"])
        port = free_port()
        self.logs = [config.out.parent / f"{config.out.name}-{rank}.log" for rank in range(size)]
        self.processes = [
            context.Process(target=_child, args=(self.logs[rank], config, rank, size, port, before))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout: float = DEADLINE_S) -> list[int]:
        """Exit codes; all processes are killed, and it is an error, if one has not ended in time."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            self.processes[rank].kill()
            self.processes[rank].join()
        assert not late, f"processes {late} have not ended within {timeout} s:\n{self.said()}"
        return [process.exitcode or 0 for process in self.processes]

    def send(self, number: int, rank: int = 0) -> None:
        """Send a signal to one process."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for_step(self, step: int, timeout: float = DEADLINE_S) -> None:
        """Wait until the metrics show so many steps."""
        deadline = time.monotonic() + timeout
        while not any(record.get("step", 0) >= step for record in read_log(self.config)):
            assert time.monotonic() < deadline, self.said()
            assert all(process.is_alive() for process in self.processes), self.said()
            time.sleep(0.01)

    def said(self) -> str:
        """What all of them have printed."""
        return "\n".join(f"-- {rank}:\n{log.read_text()}" for rank, log in enumerate(self.logs) if log.exists())


def read_log(config: Config) -> list[dict[str, Any]]:
    """The lines of a run's metrics; none where there is no file. A torn last line is left out."""
    if not config.metrics_path.is_file():
        return []
    lines = config.metrics_path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def losses(config: Config) -> dict[int, float]:
    """The loss of each reading, by its step."""
    return {record["step"]: record["loss"] for record in read_log(config) if "event" not in record}


def weights(config: Config) -> dict[str, Tensor]:
    """Of the drafter that a run has written."""
    loaded: dict[str, Tensor] = load_file(config.drafter_path)
    return loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(0.8 * DEADLINE_S)
    faulthandler.register(signal.SIGUSR1)
    config = settings(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    end_process(train_tiny(config))
