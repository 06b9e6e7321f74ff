"""The command line: ``python -m examples.dflash COMMAND [--preset NAME] [--option value ...]``.

Exit status: 0 done; 1 it ran and the outcome is not good enough; 2 what was asked for cannot run; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import tyro

from .config import Config, InputError, preset
from .devices import check_devices
from .processes import PeerLost, end_process

_DEMO = "demo"
_DEFAULT_PRESET = "smollm2"


def _plan(config: Config) -> int:
    from .plan import plan

    return plan(config)


def _fetch_target(config: Config) -> int:
    from .fetch import resolve_target

    print(f"{config.target}: {resolve_target(config.target)}")
    return 0


def _regenerate(config: Config) -> int:
    from .generate import main as regenerate

    check_devices(config.targets, "--targets")
    print(f"The answers are in {regenerate(config)}.")
    return 0


def _train(config: Config) -> int:
    from .train import train

    check_devices(config.targets, "--targets")
    check_devices(config.drafters, "--drafters")
    return train(config)


def _smoke(config: Config) -> int:
    from .smoke import smoke

    check_devices(config.targets, "--targets")
    check_devices(config.drafters, "--drafters")
    return smoke(config)


def _evaluate(config: Config) -> int:
    from .evaluate import main as evaluate

    check_devices(config.targets[:1], "--targets")
    return 0 if evaluate(config).passed else 1


def _export(config: Config) -> int:
    from .export import export

    export(config)
    return 0


def _report(config: Config) -> int:
    from .report import report

    return report(config)


def _demo(config: Config) -> int:
    """All commands that lead to a drafter, and where the seconds went."""
    spent: dict[str, float] = {}
    status = 0
    stages = (("fetch-target", _fetch_target), ("regenerate", _regenerate), ("train", _train), ("evaluate", _evaluate))
    for name, stage in stages:
        print(f"\n== {name}", flush=True)
        began = time.perf_counter()
        status = stage(config)
        spent[name] = time.perf_counter() - began
        if status != 0:
            break
    total = sum(spent.values())
    print(
        "\nTime: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items()) + f"; in all {total:.0f} s"
    )
    if status == 0:
        print(f"DEMO PASSED: acceptance length at least {config.min_acceptance:.2f} on held-out prompts, and lossless.")
    else:
        print(f"DEMO FAILED in {name}, with exit status {status}.")
    return status


COMMANDS: dict[str, tuple[Callable[[Config], int], str]] = {
    "plan": (_plan, "Print topology, shapes, and estimates of memory and time. Runs nothing, loads no model."),
    "fetch-target": (_fetch_target, "Fetch the target model into the cache."),
    "regenerate": (_regenerate, "Let the target answer the prompts: what the drafter learns."),
    "train": (_train, "Train a drafter on the answers."),
    "smoke": (_smoke, "A few steps at full shape: does it fit, and is peak memory flat?"),
    "evaluate": (_evaluate, "Decode held-out prompts with the drafter, and check that nothing is lost."),
    "export": (_export, "Write the drafter in the format that servers load, and check what was written."),
    "report": (_report, "Draw and sum up a run: loss, acceptance, throughput, where the time went, memory."),
    _DEMO: (_demo, "All of it, small enough for two CPU cores."),
}


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m examples.dflash COMMAND [--preset NAME] [--option value ...]",
            "",
            "Trains DFlash drafters for speculative decoding.",
            "",
            *lines,
            "",
            "COMMAND --help lists the options and the preset's values.",
        ]
    )


def parse(command: str, arguments: Sequence[str]) -> Config:
    """The preset's configuration with the options changed. Unknown options end the process with status 2."""
    chosen = _DEMO if command == _DEMO else _DEFAULT_PRESET
    for index, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            chosen = argument.split("=", 1)[1]
        elif argument == "--preset" and index + 1 < len(arguments):
            chosen = arguments[index + 1]
    return tyro.cli(
        Config,
        args=list(arguments),
        default=preset(chosen),
        prog=f"python -m examples.dflash {command}",
        description=COMMANDS[command][1],
    )


def main(arguments: Sequence[str]) -> int:
    """Run one command; the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    command = arguments[0]
    if command not in COMMANDS:
        print(f"There is no command {command!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        config = parse(command, arguments[1:])
        _check_processes(command)
        _quiet_transformers()
        return COMMANDS[command][0](config)
    except KeyboardInterrupt:
        print("\nInterrupted. What was finished is kept.", file=sys.stderr)
        return 130
    except Exception as exc:
        text = explain(exc)
        if text is None:
            raise
        print(f"\n{text}", file=sys.stderr)
        return 2


def _check_processes(command: str) -> None:
    if command != "train" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"{command} runs in one process, but WORLD_SIZE is {os.environ['WORLD_SIZE']}: only train takes several."
        )


def explain(exc: BaseException) -> str | None:
    """The message for the user, where the error is about what they asked for and a traceback would only hide it."""
    leaves = list(_leaves(exc))
    for leaf in leaves:
        if isinstance(leaf, torch.OutOfMemoryError):
            return (
                f"Out of memory: {leaf}\nLower --decode-batch for regenerate and evaluate; for train lower "
                f"--token-budget, --num-anchors or --loss-chunk, or add --gradient-checkpointing. The command plan "
                f"estimates what fits."
            )
    texts = [_of_the_user(leaf) for leaf in leaves]
    return "\n".join(dict.fromkeys(filter(None, texts))) if texts and all(texts) else None


def _of_the_user(error: BaseException) -> str | None:
    if isinstance(error, InputError | PeerLost):
        return str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is there already and no directory. Name another place (--out for what is written)."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Free it, or name another place (--out for what is written)."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}. Make room, or name another place (--out for what is written)."
    return None


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def _quiet_transformers() -> None:
    """Our own lines say what goes on; bars of every loaded file would drown them."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
