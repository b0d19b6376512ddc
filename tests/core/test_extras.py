"""What to type for a library that is missing is the same everywhere, and works."""

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

from minfer.extras import how_to_install

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("minfer", "effects", "kernels", "bench")
REQUESTED: Final = re.compile(r"""how_to_install\(["']([\w-]+)""")
ELSEWHERE: Final = re.compile(r"pip install '?minfer")  # than from a clone


def test_what_to_type() -> None:
    message = how_to_install("bench")
    assert message == "pip install '.[bench]' in a clone of minfer"


def test_every_extra_that_is_requested_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [path.read_text("utf-8") for room in ROOMS for path in files(room)]
    requested = {name for text in texts for name in REQUESTED.findall(text)}
    single = {"bench", "gguf", "otel", "responses", "testing", "tokenizers"}
    assert requested == {*single, "nixl", "ray"}
    assert requested <= project["optional-dependencies"].keys()


@pytest.mark.long
def test_nothing_says_to_install_minfer_by_name() -> None:
    paths = [path for room in (*ROOMS, "tests") for path in files(room)]
    texts = {path: path.read_text("utf-8") for path in [*paths, ROOT / "README.md"]}
    assert [path for path, text in texts.items() if ELSEWHERE.search(text)] == []


def files(room: str) -> list[Path]:
    found = [*(ROOT / room).glob("**/*.py"), *(ROOT / room).glob("**/*.md")]
    return [path for path in found if path != Path(__file__).resolve()]
