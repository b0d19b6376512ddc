"""READMEs name what there is: commands, options, files, Python that compiles."""

import re
import shlex
from collections.abc import Iterator
from doctest import DocTestParser
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from minfer.effects.cli.main import parser
from minfer.effects.serving.observability.metric_help import HELP

ROOT: Final = Path(__file__).resolve().parents[2]
FIRST: Final = ROOT / "README.md"
ROOMS: Final = ("minfer", "effects", "kernels", "bench", "tests")
READMES: Final = [
    FIRST,
    *(path for room in ROOMS for path in sorted((ROOT / room).rglob("README.md"))),
]
PAGES: Final = [*READMES, *sorted((ROOT / ".github").glob("*.md"))]
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
PARSER: Final = DocTestParser()
CODE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CARD: Final = ROOT / "effects" / "bundled" / "README.md"  # names a script of the past
PATH: Final = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./]+)`")
MINFER: Final = "minfer "
MAX_FIRST_LINES: Final = 150  # lines of the first one


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def blocks(text: str, kind: str) -> list[str]:
    """Code of a kind in a README; of kind "", what commands print."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for own, code in found if own == kind]


def marked(text: str, which: str) -> str:
    """What .ci/run runs: the code after a mark."""
    pattern = rf"^<!-- {which} command -->\n```sh\n(.*?)\n```$"
    match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert match, f"README.md has no {which} command after its mark"
    return match[1]


@cache
def titles(path: Path) -> frozenset[str]:
    """The headings of a page, as links name them."""
    lines = CODE.sub("", path.read_text("utf-8")).splitlines()
    words = (line.lstrip("# ").lower() for line in lines if line.startswith("#"))
    names = (re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in words)
    return frozenset(names)


def test_the_first_one_is_short() -> None:
    assert len(FIRST.read_text("utf-8").splitlines()) <= MAX_FIRST_LINES


@pytest.mark.parametrize("which", ["first", "second"])
def test_its_two_commands_are_single_lines_that_begin_alike(which: str) -> None:
    command = marked(FIRST.read_text("utf-8"), which)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q ")


def dead_links(path: Path) -> Iterator[str]:
    """Yields the links of a page to files or headings that do not exist."""
    for target in LINK.findall(CODE.sub("", path.read_text("utf-8"))):
        name, _, heading = target.partition("#")
        linked = path.parent / name if name else path
        if target.startswith(("http:", "https:")):
            continue
        if not linked.exists() or (heading and heading not in titles(linked)):
            yield f"{shown(path)}: {target}"


def test_all_links_between_pages_lead_somewhere() -> None:
    assert [link for path in PAGES for link in dead_links(path)] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```\n# Two\n```\n[a](#one) [b](#two) [c](none.md)\n")
    dead = [link.rsplit(" ", 1)[1] for link in dead_links(page)]
    assert dead == ["#two", "none.md"]


@pytest.mark.parametrize("path", READMES, ids=shown)
def test_files_that_are_named_are_there(path: Path) -> None:
    named = [] if path == CARD else PATH.findall(path.read_text("utf-8"))
    for name in named:
        assert (ROOT / name).exists(), f"{shown(path)}: {name}"


@pytest.mark.parametrize("path", READMES, ids=shown)
def test_python_in_it_compiles(path: Path) -> None:
    for number, code in enumerate(blocks(path.read_text("utf-8"), "python")):
        if code.startswith(">>> "):
            code = "".join(example.source for example in PARSER.get_examples(code))
        compile(code, f"{shown(path)}: python block {number}", "exec")


@pytest.mark.parametrize("path", READMES, ids=shown)
def test_commands_in_it_have_the_options_that_they_are_given(path: Path) -> None:
    for block in blocks(path.read_text("utf-8"), "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split("|")[-1]
            words = shlex.split(command, comments=True) if MINFER in line else []
            words = words[:-1] if words[-1:] == ["&"] else words  # in the background
            if words[:1] == ["minfer"] and "--policies" not in words:
                parser().parse_args(words[1:])


def test_each_cause_of_a_wait_is_explained() -> None:
    meaning = HELP["num_requests_waiting_by_reason"].partition("wait for: ")[2]
    causes = re.sub(r" \([^)]*\)", "", meaning).rstrip(".").split(", ")
    page = ROOT / "effects" / "serving" / "observability" / "README.md"
    explained = page.read_text("utf-8").partition("## Why a request waits")[2]
    rows = re.findall(r"^\| `(\w+)` \|", explained.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(causes)
    planning = (ROOT / "minfer" / "planning").glob("*.py")
    text = "".join(path.read_text("utf-8") for path in planning)
    decided = set(re.findall(r'QueueBlocked\(\*\w+\.id, "(\w+)"', text))
    assert len(decided) > 3
    assert decided <= set(rows)
