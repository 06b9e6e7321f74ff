"""The example's README: its commands parse, its files are there, and every file is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples.dflash.__main__ import COMMANDS, parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "dflash"
README = (EXAMPLE / "README.md").read_text()
CALLS = re.findall(r"`(?:python -m|torchrun [^`]*-m) examples\.dflash ([^`]*)`", README)


def test_readme_has_a_command_for_each_job():
    assert len(set(CALLS)) > 15
    assert {call.split()[0] for call in CALLS} | {"demo"} == set(COMMANDS)


@pytest.mark.parametrize("call", sorted(set(CALLS)))
def test_readme_commands_are_understood(call):
    command, *arguments = shlex.split(call)
    assert parse(command, arguments).preset


def test_readme_names_every_file_and_no_other():
    named = set(re.findall(r"`(\w+\.py)`", README[README.index("## The files") :]))
    there = {path.name for path in EXAMPLE.glob("*.py")} - {"__init__.py"}
    assert named == there


def test_readme_options_are_there():
    fields = {"--" + name.replace("_", "-") for name in parse("train", []).__dict__}
    named = set(re.findall(r"--[a-z][a-z-]+", README)) - {"--help"}
    torchrun = {"--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint"}
    negated = {"--no-resume", "--no-regenerate"}
    assert named - fields - torchrun - negated == set()
