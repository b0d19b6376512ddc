"""Policies of one's own, named before the command or after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minfer

OWN = """
from attrs import frozen
from minfer.records.policy import FirstCome

@frozen
class ShortestPrompt(FirstCome):
    def rank(self, state, request, time):
        return (float(len(request.prompt)),), state
"""
MODULE = ["--policies", "own_policies"]
GENERATE = ["generate", "x", "--dry-run", "--max-tokens", "2"]
POLICY = ["--scheduling-policy", "ShortestPrompt"]


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        [*MODULE, *GENERATE, *POLICY],
        [*GENERATE, *MODULE, *POLICY],
        [*GENERATE, *POLICY, *MODULE],
    ],
)
def test_their_module_is_named_before_the_command_or_after(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "own_policies.py").write_text(OWN, "utf-8")
    completed = subprocess.run(
        [sys.executable, "-m", "minfer", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(minfer.__file__).parents[1])},
    )
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.long
def test_a_module_that_is_not_there_is_reported() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "minfer", "plan", "--policies", "no.such.module"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2
    assert "no.such.module cannot be imported" in completed.stderr
