"""The page on comparing policies works as it is written: every command and program."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import minfer
from minfer.policies.builtin import SUMMARIES
from tests.effects.test_readmes import ROOT, blocks

PAGE: Final = ROOT / "minfer" / "simulation" / "README.md"
EXAMPLE: Final = ROOT / "tests" / "examples" / "compare_policies.py"


def test_the_program_is_the_example() -> None:
    [program] = blocks(PAGE.read_text("utf-8"), "python")
    assert program == EXAMPLE.read_text("utf-8")


def test_its_table_has_the_policies() -> None:
    page = PAGE.read_text("utf-8")
    for name, summary in SUMMARIES.items():
        assert f"| `{name}` | {summary} |" in page


@pytest.mark.long
def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    """In one shell, one after the other, as a reader would."""
    pytest.importorskip("matplotlib")
    commands = blocks(PAGE.read_text("utf-8"), "sh")
    minfer_command = f'minfer() {{ "{sys.executable}" -m minfer "$@"; }}'
    script = "\n".join(["set -e", minfer_command, *commands])
    environment = {**os.environ, "PYTHONPATH": str(Path(minfer.__file__).parents[1])}
    result = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert "no request ever waited, in any run: no queue formed" in printed
    assert "fcfs and shortest decided alike: the same admissions" in printed
    lines = [line.strip() for line in printed.splitlines()]
    for sample in blocks(PAGE.read_text("utf-8"), ""):
        for line in sample.splitlines():
            begin, *left_out = line.strip().split("...")
            is_there = (own.startswith(begin) for own in lines) if left_out else ()
            assert begin in lines or any(is_there), f"not printed: {line}"
    rows = [line.split()[0] for line in lines if line]
    for policy in ("ShortPromptsFirst", "ShortAgeing", "ShortAgeing:tokens=500"):
        assert policy in rows
    assert {"runs.csv", "runs.svg", "both.html"} <= {p.name for p in tmp_path.iterdir()}
