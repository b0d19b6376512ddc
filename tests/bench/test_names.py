import ast
from pathlib import Path

import pytest

from bench import names

SOURCE = """
one = [each for each in range(3)]

class Part:
    at = 1

    def take(self, found, *more, **how):
        with open(found) as file, open(file) as (left, right):
            total: int = 0
        try:
            total += (many := 1)
        except OSError as why:
            _ = lambda it: it
        for i, [what] in found:
            class Inner:
                own = i
        match found:
            case [Part(at=kept), *rest] | {"a": kept, **rest}:
                return {key: None for key in rest}

    async def begin(cls): ...
"""


def test_every_way_to_bind_a_local_name_is_counted() -> None:
    bound = sorted(name for name in names.local_names(ast.parse(SOURCE)) if name)
    expected = "_ each file found how i it kept kept key left many more rest rest right"
    assert bound == [*expected.split(), "total", "total", "what", "why"]


def test_the_share_of_generic_names(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE, "utf-8")
    generic = {"each", "found", "how", "it", "kept", "many", "more", "what", "why"}
    assert generic <= names.GENERIC
    assert names.binding_figures("it", [path]) == {
        "local names in it": 19,
        "generic names in it": 10,
        "% generic in it": 52.6,
    }


def test_class_names_of_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text in {
        "minfer/a.py": "class A:\n    class B: ...\nclass C: ...",
        "minfer/effects/b.py": "class C: ...",  # behind the link
        "effects/b.py": "def f():\n    class B: ...\nclass A: ...",
        "tests/c.py": "class C: ...",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    monkeypatch.setattr(names, "RIGHT_TWICE", {"A": "as a test of the table"})
    assert names.repeated_classes(tmp_path) == {"B": ["effects/b.py", "minfer/a.py"]}
