"""The paths in `effects/cluster/README.md` name what there is."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest
from attrs import frozen

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "effects" / "cluster" / "README.md"
PATHS: Final = 5
MOST_FILES: Final = 12
STEP: Final = re.compile(r"(\d+)\. `([\w/]+\.py)` `([\w.]+)`: \S.*")


@frozen
class Step:
    """A step of a path."""

    number: int
    file: str
    name: str  # of a function or class, with the class that it is in

    @property
    def source(self) -> Path:
        return ROOT / ("" if self.file.startswith("minfer/") else "effects") / self.file


def paths() -> dict[str, list[Step]]:
    """The steps below each heading that begins with a number."""
    sections = dict[str, list[Step]]()
    for line in PAGE.read_text("utf-8").splitlines():
        if re.match(r"## \d", line):
            steps = sections[line.removeprefix("## ")] = []
        elif re.match(r"\d+\.", line):
            step = STEP.fullmatch(line)
            assert step, f"not `file.py` `name`: what happens: {line}"
            steps.append(Step(int(step[1]), step[2], step[3]))
    return sections


def defines(source: Path, name: str) -> bool:
    """Whether a file defines a function or class, which may be within a class."""
    body: list[ast.stmt] = ast.parse(source.read_text("utf-8")).body
    for part_name in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        same = [
            node for node in body if isinstance(node, kinds) and node.name == part_name
        ]
        if not same:
            return False
        body = same[0].body
    return True


def test_there_are_five_paths() -> None:
    assert len(paths()) == PATHS


def test_all_files_that_are_named_are_there() -> None:
    for file in re.findall(r"`([\w/]+\.py)`", PAGE.read_text("utf-8")):
        assert Step(0, file, "").source.is_file(), file


@pytest.mark.parametrize("path", paths())
def test_steps_name_what_there_is(path: str) -> None:
    for step in paths()[path]:
        assert step.source.is_file(), step
        assert defines(step.source, step.name), step


@pytest.mark.parametrize("path", paths())
def test_steps_are_numbered_and_need_few_files(path: str) -> None:
    steps = paths()[path]
    assert [step.number for step in steps] == [*range(1, len(steps) + 1)]
    assert len({step.file for step in steps}) <= MOST_FILES
