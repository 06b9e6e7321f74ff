"""Runs a benchmark's jobs in a child process, which is ended and replaced where a job hangs or breaks the device.

A benchmark's module has ``run_job(job)``, a generator of results (dicts that JSON holds). ``results(module, jobs)``
hands the child one job after the other and yields each result as it comes. A job that outlasts its limit dumps the
stacks of its threads and ends its process (faulthandler); where even that fails, the process group is killed.

Guarantees:
- ``results`` ends, at most ``GRACE_S`` after ``until``, whatever a job does.
- Each job gives at least one result; one that failed has "error", one for which no time was left has "skipped".
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRACE_S = 15.0  # to dump stacks and exit, after a job's limit
START_S = 90.0  # to start a process and import torch; the first job's limit is longer by as much
MARK = "@@"  # begins a line of the protocol; what libraries print goes to the log
TAIL_BYTES = 4000

Job = dict[str, Any]
Result = dict[str, Any]


class Child:
    """A process that runs jobs of ``module``, and all that those start."""

    def __init__(self, module: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end())
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.supervised", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._extra_s = START_S
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def run(self, job: Job, limit_s: float, until: float) -> Iterator[tuple[Result, bool]]:
        """The job's results, each with whether the process is good for another job."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"job": job, "limit_s": limit_s}) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; the read below says so
            pass
        deadline = min(time.monotonic() + limit_s + self._extra_s, max(until, time.monotonic())) + GRACE_S
        self._extra_s = 0.0
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                yield {"error": f"no end within {limit_s:.0f} s: killed", "log": self.tail()}, False
                return
            if line is None:
                yield {"error": "its process ended (a crash, or the time limit: see log)", "log": self.tail()}, False
                return
            message = json.loads(line)
            if "end" in message:
                return
            yield message["result"], message["good"]

    def tail(self) -> str:
        """The end of what the process wrote to stderr."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - TAIL_BYTES))
        return self._log.read().decode(errors="replace")

    def end(self) -> None:
        """Kill the process and its group, its own processes with it."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self._log.close()


def results(
    module: str,
    jobs: list[Job],
    *,
    job_limit_s: float,
    until: float = float("inf"),
    fresh: bool = False,
    record: Path | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Run the jobs, and yield each with its results.

    Args:
        module: has ``run_job(job)``.
        job_limit_s: seconds for one job.
        until: ``time.monotonic()`` when all must end.
        fresh: a process of its own for each job.
        record: file to which each job and result is appended as a line of JSON.
    """
    for job, result in _results(module, jobs, job_limit_s, until, fresh):
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps({"job": job, "result": result}) + "\n")
        yield job, result


def _results(
    module: str, jobs: list[Job], job_limit_s: float, until: float, fresh: bool
) -> Iterator[tuple[Job, Result]]:
    child: Child | None = None
    try:
        for job in jobs:
            left_s = until - time.monotonic()
            if left_s <= 1:
                yield job, {"skipped": "out of time"}
                continue
            if child is None:
                child = Child(module)
            usable, any_result = True, False
            for result, good in child.run(job, min(job_limit_s, left_s), until):
                any_result, usable = True, good
                yield job, result
            if not any_result:
                yield job, {"error": "the job gave no result"}
            if fresh or not usable:
                child.end()
                child = None
    finally:
        if child is not None:
            child.end()


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def serve(module: str) -> None:
    """The child: one job a line of stdin, until it closes."""

    def say(message: dict[str, Any]) -> None:
        sys.stdout.write(f"\n{MARK}{json.dumps(message)}\n")
        sys.stdout.flush()

    run_job = importlib.import_module(module).run_job
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["limit_s"], exit=True)
        try:
            for result in run_job(request["job"]):
                say({"result": result, "good": True})
        except Exception as error:
            # After an error of the device nothing else works in this process.
            say({"result": {"error": brief(error)}, "good": "CUDA" not in str(error)})
            faulthandler.cancel_dump_traceback_later()
            say({"end": True})
            continue
        faulthandler.cancel_dump_traceback_later()
        say({"end": True})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module", help="name of the module whose run_job() is served")
    serve(parser.parse_args().module)
