"""The command line: ``python -m graphsafe doctor``.

Exit status: 0, all is well; 1, something needs attention; 2, the command line is wrong or names no model; 74, the
output cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from . import __version__
from .doctor import diagnose
from .model_config import ModelConfigError

_NOT_WRITTEN = 74  # EX_IOERR of sysexits.h
_INTERRUPTED, _BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m graphsafe", description="torch.compile and CUDA graphs, safe from many threads of one process."
    )
    parser.add_argument("--version", action="version", version=f"graphsafe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="say what this installation has, lacks and had repaired",
        description="Print versions, torch's faults with threads and what became of them, CUDA devices and links.",
        epilog="Exit status: 0, all is well; 1, something needs attention; 2, wrong usage or no such model; 74, the "
        "output cannot be written.",
    )
    doctor.add_argument(
        "--model",
        metavar="DIR_OR_NAME",
        help="say which optional packages this model's fast path lacks: a directory, a config.json, a .gguf file, or a "
        "name on the hub",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        try:
            return _run(_parser(), arguments)
        finally:
            _write("")
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except _NotWritten as error:
        _drop_output()
        print(f"python -m graphsafe: error: the output cannot be written: {error}", file=sys.stderr)
        return _NOT_WRITTEN


class _NotWritten(Exception):
    """Standard output takes no text; the message says why."""


def _write(text: str) -> None:
    try:
        if sys.stdout is not None:
            print(_encodable(text, sys.stdout), end="", flush=True)
        elif text:
            raise _NotWritten("standard output is closed")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _NotWritten(error.strerror or str(error)) from error


def _drop_output() -> None:
    """Or Python complains as it flushes at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        report = diagnose(options.model)
    except ModelConfigError as error:
        print(_encodable(f"{parser.prog} doctor: error: {error}", sys.stderr), file=sys.stderr)
        return 2
    text = json.dumps(report.as_json(), indent=2) if options.json else str(report)
    _write(f"{text}\n")
    return 1 if report.attention else 0


def _encodable(text: str, file: TextIO | None) -> str:
    """``text`` with escapes for what the file's encoding lacks, and for what no encoding has."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


if __name__ == "__main__":
    sys.exit(main())
