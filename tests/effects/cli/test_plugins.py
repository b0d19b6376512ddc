"""Policies of one's own, named before the command or after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minfer
from minfer.effects.cli import plugins

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


def test_a_class_with_methods_of_a_policy_and_no_base_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class {0}:\n    def {1}(self, state, request, time): ...\n"
    (tmp_path / "no_base.py").write_text(
        text.format("Duck", "rank") + text.format("Helper", "ranks"), "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    known = dict[str, type]()
    monkeypatch.setattr(plugins, "INCOMPLETE", known)
    assert plugins.register_policies("no_base") == "no_base"
    assert [*known] == ["Duck"]
