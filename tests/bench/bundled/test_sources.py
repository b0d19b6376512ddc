"""What may be learnt from."""

from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from bench.bundled import corpus
from bench.bundled.prepare import CORPUS
from bench.bundled.sources import Source, Sources, _unlike, permissive, stretches

BODY = "\n".join(
    f"    the_{i}th_value = compute_the_value_of_number({i})" for i in range(30)
)


class Package(Distribution):
    def __init__(self, **fields: str) -> None:
        self._fields = Message()
        for name, value in fields.items():
            self._fields[name.replace("_", "-")] = value

    @property
    def metadata(self) -> Any:
        return self._fields

    def read_text(self, filename: str) -> None: ...

    def locate_file(self, path: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License_Expression": "MIT"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, "BSD License"),
        ({"License": "Apache 2.0"}, "Apache 2.0"),
        ({"License_Expression": "MPL-2.0 AND MIT"}, None),
        ({"License": "GPL, some of it MIT"}, None),
        ({"License": "see the file"}, None),
        ({}, None),
    ],
)
def test_licences(fields: dict[str, str], expected: str | None) -> None:
    assert permissive(Package(**fields)) == expected


def test_what_is_like_a_held_out_file_is_left_out() -> None:
    held = Source("python", "held.py", f"def f():\n{BODY}\n")
    copy = Source("other", "copy.py", f"# a copy\nclass A:\n  def f():\n{BODY}\n")
    own = Source(
        "other",
        "own.py",
        "\n".join(f"print({i}, 'something else, and long enough')" for i in range(40)),
    )
    kept, left_out = _unlike([copy, own], [held])
    assert (kept, left_out) == ([own], 1)
    assert stretches(held.text) & stretches(copy.text)


def test_a_corpus_comes_back_as_it_was(tmp_path: Path) -> None:
    text = (
        "import os\n\n\nclass A:\n    def long_enough(self):\n"
        + BODY.replace("    ", "        ")
        + "\n"
    )
    held = Source("python", "b.py", "x = 1\n")
    sources = Sources(
        trained=[Source("python", "a.py", text)],
        held_out=[held],
        licences={"python": "PSF-2.0"},
        left_out=0,
    )
    corpus.write(sources, tmp_path / CORPUS)
    found = corpus.read(tmp_path / CORPUS)
    assert found.files == [text]
    assert found.held_out == [held.text]
    assert [opening.split("\n")[0] for opening in found.openings] == [
        "import os",
        "class A:",
        "def long_enough(self):",
    ]
    assert found.openings[2].split("\n")[1] == BODY.split("\n")[0]
    assert found.about["held_out_bytes"] == 6
