"""The README's programs run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- not run[^\n]*-->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[bool, str]]:
    """(whether it runs, its code) of every Python block."""
    return [(not skipped, code) for skipped, code in BLOCK.findall((ROOT / "README.md").read_text())]


def test_readme_programs_run_one_after_the_other(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text("\n".join(code for runs, code in blocks() if runs))
    command = [sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert "trainer-3" in result.stdout  # the statistics name every thread


def test_readme_programs_that_do_not_run_are_python_all_the_same() -> None:
    skipped = [code for runs, code in blocks() if not runs]
    assert len(skipped) == 1
    compile(skipped[0], "README.md", "exec")


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []
