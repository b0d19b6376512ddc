"""The corpus file: sources, where their definitions begin and end, and what is held out.

Definitions are kept as places in their files: written twice, they would double what has
to be carried to the machine that trains.
"""

import ast
import json
import lzma
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from bench.bundled.sources import TOPICS, Source, Sources

SHORTEST: Final = 80  # characters of a definition
LONGEST: Final = 120  # lines of one
IMPORTS: Final = 200  # lines from the first import on
_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]

Span = tuple[int, int, int, int]  # file, first line, line behind the last, indentation


@frozen
class Corpus:
    """What is learnt from, as texts."""

    files: list[str] = field(repr=False)
    openings: list[str] = field(
        repr=False
    )  # definitions, and files from their imports on
    held_out: list[str] = field(repr=False)
    about: dict[str, Any]  # licences, versions and counts, for the card


def write(sources: Sources, path: Path) -> dict[str, Any]:
    """Write the corpus file; returns what it says about itself."""
    texts = [text for source in sources.trained for text in _documents(source)]
    spans = [(at, *span) for at, text in enumerate(texts) for span in _spans(text)]
    about = {
        "python": platform.python_version(),
        "licences": dict(sources.licences),
        "files": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "definitions": len(spans),
        "like_held_out": sources.left_out,
        "held_out_files": len(sources.held_out),
        "held_out_bytes": sum(len(one.text.encode()) for one in sources.held_out),
    }
    held_out = [one.text for one in sources.held_out]
    whole = {"about": about, "files": texts, "spans": spans, "held_out": held_out}
    path.write_bytes(lzma.compress(json.dumps(whole).encode(), filters=_FILTERS))
    return about


def read(path: Path) -> Corpus:
    """The corpus of a file."""
    whole = json.loads(lzma.decompress(path.read_bytes()))
    lines = [text.splitlines() for text in whole["files"]]
    openings = []
    for at, first, last, indent in whole["spans"]:
        own = (
            line[indent:] if line[:indent].isspace() else line
            for line in lines[at][first:last]
        )
        openings.append("\n".join(own) + "\n")
    return Corpus(whole["files"], openings, whole["held_out"], whole["about"])


def _documents(source: Source) -> Iterator[str]:
    """A file's text; of the language reference, its topics."""
    if source.name != TOPICS or source.package != "python":
        yield source.text
        return
    found = next(
        node.value for node in ast.parse(source.text).body if isinstance(node, ast.Assign)
    )
    yield from ast.literal_eval(found).values()


def _spans(text: str) -> Iterator[tuple[int, int, int]]:
    """Where a file's definitions are, and what follows its first import."""
    with suppress(SyntaxError):
        tree = ast.parse(text)
        lines = text.splitlines()
        imports = [
            node.lineno
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        if imports:
            yield imports[0] - 1, min(len(lines), imports[0] - 1 + IMPORTS), 0
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first, last = node.lineno - 1, node.end_lineno or node.lineno
                long_enough = sum(map(len, lines[first:last])) >= SHORTEST
                if long_enough and last - first <= LONGEST:
                    yield first, last, node.col_offset
