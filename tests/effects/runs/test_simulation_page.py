"""The page on comparing policies works as it is written: every command and program."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import minfer
from tests.effects.test_readmes import ROOT, blocks

PAGE: Final = ROOT / "minfer" / "simulation" / "README.md"
EXAMPLE: Final = ROOT / "tests" / "examples" / "compare_policies.py"


def test_the_program_is_the_example() -> None:
    [program] = blocks(PAGE.read_text("utf-8"), "python")
    assert program == EXAMPLE.read_text("utf-8")


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
    _, _, compared = printed.partition("shortest, from fcfs:\n")
    [verdict] = [line for line in compared.splitlines() if "TTFT p50  " in line][:1]
    assert "] lower (lower in " in verdict.replace("  ", " ")
    assert "  noise (lower in " in compared
    assert "ShortPromptsFirst" in printed
    assert {"runs.csv", "runs.svg", "both.html"} <= {p.name for p in tmp_path.iterdir()}
