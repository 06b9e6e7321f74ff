"""Runs of the example's ``train`` in processes of their own, for benchmarks: options, data, and what the metrics say.

Guarantees:
- ``run`` ends at its limit: a run that has not ended leaves the stacks of its threads in its log and is killed, and so
  is all that it has started.
- Of a run that failed, what it has measured until then is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.dflash.config import Config
from examples.dflash.metrics import read_records
from examples.dflash.plan import read_shape

WAYS = ("eager", "compile", "graph")
GIBIBYTE = 2**30
TOLERANCES = {"float32": 2e-3, "bfloat16": 2e-2}  # of a reading's loss, relative
ROOT = Path(__file__).parents[1]
STACKS_S = 10.0  # for a process to write the stacks of its threads and end


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all benchmarks of the pipeline have."""
    parser.add_argument("--target", help="the preset's architecture with random weights, unless given")
    parser.add_argument("--data", type=Path, help="random tokens, unless given")
    parser.add_argument("--token-budget", type=int)
    parser.add_argument("--num-anchors", type=int)
    parser.add_argument("--dtype", choices=tuple(TOLERANCES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--warmup", type=int, default=40, help="steps that do not count")
    parser.add_argument("--log-every", type=int, default=10)


def train_options(arguments: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """What all ways are given."""
    options = ["--preset", arguments.preset, "--max-steps", str(arguments.steps), "--epochs", "1000000"]
    options += ["--log-every", str(arguments.log_every), "--num-held-out", "0", "--num-validation", "0"]
    options += ["--save-every", "None", "--no-regenerate", "--no-resume"]
    for name in ("target", "token_budget", "num_anchors", "dtype"):
        if getattr(arguments, name) is not None:
            options += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
    return [*options, *others]


def prepare(
    arguments: argparse.Namespace, others: Sequence[str], directory: Path
) -> tuple[list[str], Config, list[str]]:
    """Options of all runs, the configuration that they make, and the option that names the data, made where missing."""
    from examples.dflash.__main__ import parse as parse_config

    if arguments.target is None:
        named = parse_config("train", ["--preset", arguments.preset]).target
        arguments.target = named if named.startswith("random:") else f"random:{named}"
    options = train_options(arguments, others)
    config = parse_config("train", options)
    directory.mkdir(parents=True, exist_ok=True)
    data = arguments.data
    if data is None:
        data = directory / "random.jsonl"
        write_data(data, config, max(64, 16 * config.token_budget // 1024))
    return options, config, ["--data", str(data)]


def write_data(path: Path, config: Config, num_documents: int) -> None:
    """Documents of random tokens, from a quarter of a row to half of it but at most 1,024, half of each supervised."""
    shape, _ = read_shape(config)
    draw = random.Random(0)
    longest = min(1024, config.token_budget // 2)
    with path.open("w") as file:
        for _ in range(num_documents):
            length = draw.randint(max(config.block_size + 2, longest // 2), max(config.block_size + 2, longest))
            tokens = [draw.randrange(3, shape.vocab_size - 1) for _ in range(length)]
            if config.mask_token_id is not None:
                tokens = [3 if token == config.mask_token_id else token for token in tokens]
            mask = [int(place >= length // 2) for place in range(length)]
            file.write(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")


def run(
    way: str, options: Sequence[str], out: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Train one way.

    Args:
        out: of the run; what it prints is in ``OUT.log`` and ``OUT.err`` beside it.
        environment: variables to add.
    Returns:
        ``began`` (time of day), ``wall_s``, ``status`` (None: stopped at the limit), ``records``; of a run that has
        failed, ``error`` too.
    """
    command = [sys.executable, "-m", "examples.dflash", "train", *options, "--step", way, "--out", str(out)]
    out.parent.mkdir(parents=True, exist_ok=True)
    began, stopwatch_s = time.time(), time.monotonic()
    status, said = run_limited(command, out.parent / out.name, seconds, environment)
    result: dict[str, Any] = {"began": began, "wall_s": time.monotonic() - stopwatch_s, "status": status}
    metrics = out / "metrics.jsonl"
    records = read_records(metrics) if metrics.is_file() else []
    result["records"] = [record for record in records if record["time"] >= began]  # not those of a run before
    if status is None:
        result["error"] = f"not done after {seconds:.0f} s"
    elif status != 0:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        result["error"] = " ".join(lines[-2:])[:400] or f"exit status {status}"
    return result


def run_limited(
    command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command from the repository's root, what it prints in ``LOG.log`` and ``LOG.err``.

    Returns:
        its exit status, None where it was killed at the limit; and what it has printed, the errors if there are any.
    """
    paths = [log.with_name(f"{log.name}.{end}") for end in ("log", "err")]
    python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": python_path, "PYTHONFAULTHANDLER": "1", **(environment or {})}
    with paths[0].open("w") as out, paths[1].open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=variables, start_new_session=True)
        try:
            _no_core(process.pid)
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
            _kill_all(process)
        except BaseException:
            _kill_all(process)
            raise
    printed, errors = (path.read_text(errors="replace") for path in paths)
    return status, errors if errors.strip() else printed


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it has started, such as compilers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _no_core(pid: int) -> None:
    """An abort shall write stacks, not the gigabytes of a core. On Linux alone; elsewhere the limit stays."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import resource

        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def readings(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records that are no events."""
    return [record for record in records if "event" not in record]


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median and quartiles of the speeds of some readings, the slowest and the fastest."""
    ordered = sorted(values)
    return {
        "tokens_per_s": statistics.median(ordered),
        "quartiles": [ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]],
        "slowest": ordered[0],
        "fastest": ordered[-1],
        "num_readings": len(ordered),
    }


def mean_share(warm: Iterable[Mapping[str, Any]], prefix: str, kind: str) -> float:
    """Of the threads whose name begins so, on average over readings and threads; 0 where none has a figure."""
    shares = [
        thread[kind]
        for record in warm
        for name, thread in record["threads"].items()
        if name.startswith(prefix) and kind in thread
    ]
    return float(statistics.mean(shares)) if shares else 0.0


def losses(records: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    """The loss of each reading, by its step."""
    return {record["step"]: record["loss"] for record in readings(records)}


def losses_apart(results: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The largest relative difference of any two ways' losses at one step, infinite where one is no number.

    None where fewer than two ways were measured.
    """
    series = [result["losses"] for result in results.values() if "losses" in result]
    if len(series) < 2:
        return None
    apart = [0.0]
    for step in set.intersection(*(set(one) for one in series)):
        at_step = [one[step] for one in series]
        known = all(loss is not None and math.isfinite(loss) for loss in at_step)
        apart.append(max(at_step) / min(at_step) - 1 if known else math.inf)
    return max(apart)


def agreement(results: Mapping[str, Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """How far the losses of all ways are apart, and whether they agree."""
    apart = losses_apart(results)
    return {
        "losses_apart": apart if apart is None or math.isfinite(apart) else "not a number",
        "losses_agree": apart is None or apart <= TOLERANCES[dtype],
    }


@contextlib.contextmanager
def place_for_runs(out: Path | None) -> Iterator[Path]:
    """A directory for the block: the one that is named, which stays, or a temporary one."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
