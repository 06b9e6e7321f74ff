"""Chaos: everything that graphsafe does, at once, in threads of one device, and every number checked.

    python -m tests.chaos --seconds 360 --device cuda:0

Managed threads live for some seconds, end, and are started anew. A life is a script: a seed that decides what it does
and in which order. Each script first runs alone and calmly: no failed captures, no garbage, eager in place of graphed
and TrainStep's graphs. What it computed then is what every later life of that script must compute, bit for bit. Beside
the lives run threads that graphsafe does not manage.

Prints a table line now and then and a JSON line at the end. Exit code 0: all right; 1: a wrong number, an unexpected
error, too little done, or memory not given back; 2: a thread hangs, with the stacks of all.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

import graphsafe as gs

from .chaos_lives import FOREIGN, MEBIBYTE, Life, Tally

FULL_S = 360.0
TARGETS = {"captures": 2000, "replays": 20_000, "failed_captures": 500}  # in FULL_S seconds
HANG_S = 60.0
SEGMENT_BYTES = 2 * MEBIBYTE  # what the allocator reserves for small tensors at a time
# Each graph has a generator state, with a seed and an offset on the device, of 512 bytes each in the allocator's least
# block. Torch keeps pointers to a capture that CUDA broke, so graphsafe never frees that graph, nor its state. They lie
# on the streams of contexts, of which there are as many as contexts were alive at once: each keeps one segment, however
# many captures fail.
FAILED_CAPTURE_BYTES = 1024


@dataclass
class Settings:
    device: str = "cuda:0"
    seconds: float = FULL_S
    threads: int = 8
    scripts: int = 12
    interval_s: float = 10.0
    hang_s: float = HANG_S
    without: frozenset[str] = frozenset()  # names of a life's actions and of FOREIGN


class Storm:
    """The whole run; ``run()`` returns the report."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        self.tallies = [Tally() for _ in range(settings.threads)]
        self.foreign_tally = {one.__name__: Tally() for one in FOREIGN if one.__name__ not in settings.without}
        self.workers: dict[int, gs.Worker[Any]] = {}
        self.threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.num_started = 0
        self.ended = threading.Event()
        self.solo: list[list[torch.Tensor]] = []
        self.counts_before: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        watchdog = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        watchdog.start()
        try:
            return self.storm()
        finally:
            self.ended.set()
            watchdog.join()

    def storm(self) -> dict[str, Any]:
        settings = self.settings
        gs.install()
        for script in range(settings.scripts):
            self.workers = {0: gs.spawn(self.life, 0, script, threading.Event(), device=self.device, seed=script)}
            self.solo.append(self.workers[0].result())
        before = self.memory_at_rest()
        self.counts_before = self.counts()
        foreign: dict[Callable[..., Any], Generator[bool]] = {
            one: one(self.device) for one in FOREIGN if one.__name__ in self.foreign_tally
        }
        for one, works in foreign.items():  # loading forks here, before there are threads
            self.foreign_tally[one.__name__].check(next(works), one.__name__)
        start = time.monotonic()
        self.show_header()
        stop = threading.Event()
        self.threads = [
            threading.Thread(target=self.stand, args=(*item, stop), name=item[0].__name__) for item in foreign.items()
        ]
        for thread in self.threads:
            thread.start()
        try:
            self.lead(start)
        except BaseExceptionGroup as errors:
            for error in errors.exceptions:
                traceback.print_exception(error)
                self.errors.append(f"{type(error).__name__}: {error}")
        stop.set()
        for thread in self.threads:
            thread.join()  # the watchdog ends the process where one hangs
        elapsed_s = time.monotonic() - start
        self.workers = {}
        counts = self.counts()
        self.show(elapsed_s, counts)
        return self.report(elapsed_s, counts, before, self.memory_at_rest())

    def life(self, slot: int, script: int, stop: threading.Event) -> list[torch.Tensor]:
        expected = self.solo[script] if script < len(self.solo) else None
        return Life(script, self.tallies[slot], self.settings.without, expected).live(stop)

    def lead(self, start: float) -> None:
        """Start lives until the time is up or one has failed."""
        rng, shown = random.Random(0), start
        with gs.WorkerGroup(timeout=2 * self.settings.hang_s) as group:
            while (
                (now := time.monotonic()) - start < self.settings.seconds
                and not group.stop.is_set()
                and not self.errors
            ):
                for slot, tally in enumerate(self.tallies):
                    if slot not in self.workers or self.workers[slot].done():
                        script = rng.randrange(self.settings.scripts)
                        tally.alive_at = now
                        self.workers[slot] = group.spawn(
                            self.life_of_the_storm,
                            slot,
                            script,
                            group.stop,
                            device=self.device,
                            seed=script,
                            name=f"life-{slot}",
                        )
                        self.num_started += 1
                if now - shown >= self.settings.interval_s:
                    shown = now
                    self.show(now - start, self.counts())
                time.sleep(0.05)
            group.stop.set()

    def life_of_the_storm(self, slot: int, script: int, stop: threading.Event) -> None:
        self.life(slot, script, stop)

    def stand(self, one: Callable[..., Any], works: Generator[bool], stop: threading.Event) -> None:
        """The body of a thread that graphsafe does not manage."""
        tally = self.foreign_tally[one.__name__]
        try:
            while not stop.is_set():
                tally.check(next(works), "a number is wrong")
        except Exception as error:
            traceback.print_exception(error)
            self.errors.append(f"{one.__name__}: {type(error).__name__}: {error}")
        finally:
            works.close()

    def watch(self) -> None:
        """Dump all stacks and end the process when a life makes no progress."""
        hang_s = self.settings.hang_s
        while not self.ended.wait(min(1.0, hang_s / 4)):
            faulthandler.dump_traceback_later(2 * hang_s + 30, exit=True)  # where no Python runs any more
            now = time.monotonic()
            late = [
                w
                for slot, w in list(self.workers.items())
                if not w.done() and now - self.tallies[slot].alive_at > hang_s
            ]
            late += [t for t in self.threads if t.is_alive() and now - self.foreign_tally[t.name].alive_at > hang_s]
            if late:
                print(f"no progress for {hang_s} s: {late}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                sys.stdout.flush()
                os._exit(2)
        faulthandler.cancel_dump_traceback_later()

    # what is counted and shown

    def counts(self) -> dict[str, float]:
        stats = gs.stats()
        found = {name: stats.total(name) for name in ("captures", "failed_captures", "replays", "eager_steps")}
        return {name: count - self.counts_before.get(name, 0) for name, count in found.items()}

    def memory(self) -> tuple[int, int]:
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def memory_at_rest(self) -> tuple[int, int]:
        """Bytes allocated and reserved once nothing runs and everything that can be freed is freed."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
            torch.cuda.empty_cache()
        return self.memory()

    def tally_all(self) -> tuple[int, list[str]]:
        tallies = [*self.tallies, *self.foreign_tally.values()]
        return sum(tally.checked for tally in tallies), [what for tally in tallies for what in tally.wrong]

    def show_header(self) -> None:
        print("   time s  captures   failed   replays    eager   checked  wrong  threads  allocated MiB  reserved MiB")

    def show(self, elapsed_s: float, counts: dict[str, float]) -> None:
        checked, wrong = self.tally_all()
        allocated, reserved = (size / MEBIBYTE for size in self.memory())
        print(
            f"{elapsed_s:9.1f} {counts['captures']:9.0f} {counts['failed_captures']:8.0f} {counts['replays']:9.0f} "
            f"{counts['eager_steps']:8.0f} {checked:9d} {len(wrong):6d} {self.num_started:8d} {allocated:14.1f} "
            f"{reserved:13.1f}",
            flush=True,
        )

    def report(
        self, elapsed_s: float, counts: dict[str, float], before: tuple[int, int], after: tuple[int, int]
    ) -> dict[str, Any]:
        checked, wrong = self.tally_all()
        problems = [f"{len(wrong)} wrong: {wrong[:5]}"] if wrong else []
        problems += self.errors
        targets = {name: int(count * self.settings.seconds / FULL_S) for name, count in TARGETS.items()}
        problems += [
            f"{counts[name]:.0f} {name}, fewer than {least}" for name, least in targets.items() if counts[name] < least
        ]
        leaked = after[0] - before[0]
        if leaked > FAILED_CAPTURE_BYTES * counts["failed_captures"]:
            problems.append(f"{leaked} bytes stay allocated after {counts['failed_captures']:.0f} failed captures")
        if after[1] - before[1] > (self.settings.threads + 2) * SEGMENT_BYTES + max(0, leaked):
            problems.append(f"{after[1] - before[1]} bytes stay reserved")
        return {
            "ok": not problems,
            "problems": problems,
            "device": str(self.device),
            "torch": torch.__version__,
            "seconds": round(elapsed_s, 1),
            **{name: int(count) for name, count in counts.items()},
            "targets": targets,
            "checked": checked,
            "wrong": len(wrong),
            "threads_started": self.num_started,
            "foreign_checked": {name: tally.checked for name, tally in self.foreign_tally.items()},
            "allocated_bytes": [before[0], after[0]],
            "reserved_bytes": [before[1], after[1]],
            "without": sorted(self.settings.without),
        }


def main(arguments: list[str] | None = None) -> int:
    default = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="how long the storm lasts")
    parser.add_argument("--threads", type=int, default=default.threads)
    parser.add_argument("--scripts", type=int, default=default.scripts, help="lives that differ")
    parser.add_argument("--interval-s", type=float, default=default.interval_s, help="between two lines of the table")
    parser.add_argument("--hang-s", type=float, default=default.hang_s, help="without progress before all is dumped")
    names = sorted([*Life.WEIGHTS, *(one.__name__ for one in FOREIGN)])
    parser.add_argument("--without", nargs="*", default=[], choices=names, help="what to leave out")
    given = vars(parser.parse_args(arguments))
    settings = Settings(**{**given, "without": frozenset(given["without"])})
    if settings.device == "cpu":
        torch.set_num_threads(1)
    warnings.simplefilter("ignore", gs.GraphsafeWarning)  # of the shapes beyond max_graphs
    report = Storm(settings).run()
    for problem in report["problems"]:
        print(problem, file=sys.stderr)
    print(json.dumps(report), flush=True)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
