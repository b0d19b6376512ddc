"""Every law is listed where it is looked for, and has a test in which it bites."""

import ast
import re
from pathlib import Path

import minfer.testing

ROOM = Path(minfer.testing.__file__).parent
HERE = Path(__file__).parent


def laws() -> dict[str, set[str]]:
    """The names of all laws by file, read off the specification's syntax trees."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"require": 1, "InvariantError": 0}.get(node.func.id)
                name = node.args[at] if at is not None and len(node.args) > at else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.setdefault(path.name, set()).add(name.value)
    return found


def test_every_law_has_a_test_in_which_it_bites() -> None:
    tests = "".join(path.read_text("utf-8") for path in HERE.glob("test_*.py"))
    every = set[str]().union(*laws().values())
    assert len(every) > 30
    assert {name for name in every if not re.search(rf'["|]{name}', tests)} == set()


def test_the_docs_list_every_law_beside_its_file() -> None:
    """Of the specification; the kit's own laws are in its section."""
    text = (ROOM / "README.md").read_text("utf-8").partition("## The policy kit")[0]
    rows = re.findall(r"^\| `(\w+\.py)` \| .* \| (.*) \|$", text, re.MULTILINE)
    reported = {file: set(names.split(", ")) for file, names in rows if names != "-"}
    assert reported == laws()
