"""Python that models may learn from: the standard library, and packages beside it.

Packages count whose metadata names a permissive licence; each gives at most so many
bytes, drawn by a hash, so that no large one drowns the others. About one file in twenty
of the standard library, chosen by a hash of its path, is held out. Whatever shares a
stretch of lines with one of those is left out, wherever it is.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.message import Message
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final, cast

from attrs import field, frozen

HELD_OUT: Final = 20  # one file of so many
LEAST: Final = 200  # characters of a file
MOST: Final = 150_000
OF_PACKAGE: Final = 1_500_000  # bytes
STRETCH: Final = 3  # lines that are not blank
STRETCH_LEAST: Final = 60  # characters of a stretch that tells files apart
SHARED: Final = 8  # stretches that a file may share with held-out ones
TOPICS: Final = "pydoc_data/topics.py"  # the language reference, as one dictionary
SKIPPED: Final = frozenset(
    [
        "test",
        "tests",
        "idle_test",
        "testing",
        "site-packages",
        "__pycache__",
        "encodings",
        "msilib",
        "lib-dynload",
        "ensurepip",
        "__phello__",
        "_vendor",
        "vendor",
        "_vendored",
        "vendored",
        "extern",
        "lexers",
        "conformance",
    ]
)
SKIPPED_PREFIXES: Final = ("_sysconfigdata", "config-", "test_")
NOT_ASKED: Final = frozenset(
    {"minfer", "types-jsonschema", "trove-classifiers", "tzdata"}
)
PERMISSIVE: Final = re.compile(
    r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|0BSD|Zlib", re.IGNORECASE
)
NOT_PERMISSIVE: Final = re.compile(
    r"GPL|MPL|Mozilla|EUPL|CC-BY|proprietary", re.IGNORECASE
)


@frozen
class Source:
    """A file of Python, and where it is from."""

    package: str
    name: str
    text: str = field(repr=False)


@frozen(kw_only=True)
class Sources:
    """What there is to learn from, and what is held out."""

    trained: list[Source]
    held_out: list[Source]
    licences: Mapping[str, str]  # package -> its licence
    left_out: int  # files that are like a held-out one


def collect(stdlib: Path | None = None) -> Sources:
    """All sources of this Python."""
    own = _of_python(stdlib)
    held_out = _held_out(own)
    kept_away = {id(one) for one in held_out}
    candidates = [one for one in own if id(one) not in kept_away]
    licences = {"python": "PSF-2.0"}
    for package in sorted(distributions(), key=lambda one: str(one.name).lower()):
        licence = permissive(package)
        if licence is not None and package.name.lower() not in NOT_ASKED:
            found = _limited(_of_package(package))
            licences.update({package.name: licence} if found else {})
            candidates += found
    trained, left_out = _unlike(_distinct(candidates), held_out)
    there = {one.package for one in trained}
    return Sources(
        trained=trained,
        held_out=held_out,
        licences={name: licences[name] for name in licences if name in there},
        left_out=left_out,
    )


def held_out_files(stdlib: Path | None = None) -> list[Source]:
    """Files of this Python's standard library that no bundled model was trained on."""
    return _held_out(_of_python(stdlib))


def permissive(package: Distribution) -> str | None:
    """A package's licence, if its metadata names a permissive one and no other."""
    meta = cast("Message", package.metadata)  # which it is, whatever its type says
    classified = [
        line.rpartition(":: ")[2]
        for line in meta.get_all("Classifier") or ()
        if line.startswith("License")
    ]
    stated = (meta.get("License-Expression") or "").strip()
    stated = (
        stated
        or ", ".join(classified)
        or (meta.get("License") or "").strip().split("\n")[0]
    )
    if NOT_PERMISSIVE.search(stated) or not PERMISSIVE.search(stated):
        return None
    return stated[:80]


def _of_python(stdlib: Path | None) -> list[Source]:
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    return [one for one in _files(stdlib, "python") if len(one.text) > LEAST]


def _held_out(own: list[Source]) -> list[Source]:
    return [
        one for one in own if one.name != TOPICS and _digest(one.name) % HELD_OUT == 0
    ]


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _skipped(path: Path) -> bool:
    return any(
        part in SKIPPED or part.startswith(SKIPPED_PREFIXES) for part in path.parts
    )


def _files(folder: Path, package: str) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if not _skipped(relative):
            with suppress(UnicodeDecodeError):
                yield Source(package, relative.as_posix(), path.read_text("utf-8"))


def _of_package(package: Distribution) -> Iterator[Source]:
    for file in sorted(package.files or (), key=str):
        relative = Path(file)
        if relative.suffix != ".py" or ".." in relative.parts or _skipped(relative):
            continue
        with suppress(UnicodeDecodeError, OSError):
            text = Path(str(package.locate_file(file))).read_text("utf-8")
            if LEAST < len(text) < MOST and not _generated(text):
                yield Source(package.name, relative.as_posix(), text)


def _generated(text: str) -> bool:
    """Whether a file is a table, or written by a program."""
    lines = text.splitlines()
    digits = sum(char.isdigit() for char in text)
    head = "\n".join(lines[:5]).lower()
    return digits > len(text) / 8 or max(map(len, lines)) > 400 or "generated" in head


def _limited(files: Iterator[Source]) -> list[Source]:
    """Files up to the bytes of a package, in the order of their hashes."""
    kept, total = [], 0
    for one in sorted(files, key=lambda one: _digest(one.name)):
        size = len(one.text.encode())
        if total + size <= OF_PACKAGE:
            total += size
            kept.append(one)
    return kept


def _distinct(files: list[Source]) -> list[Source]:
    """Each text once."""
    return list({one.text: one for one in reversed(files)}.values())[::-1]


def stretches(text: str) -> set[int]:
    """Hashes of what stands on some lines in a row, comments and indentation aside."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    joined = (
        "\n".join(lines[at : at + STRETCH]) for at in range(len(lines) - STRETCH + 1)
    )
    return {hash(one) for one in joined if len(one) >= STRETCH_LEAST}


def _unlike(files: list[Source], held_out: list[Source]) -> tuple[list[Source], int]:
    """Files that have next to nothing of the held-out ones, and how many have."""
    known = set[int]().union(*(stretches(one.text) for one in held_out))
    kept = [one for one in files if len(stretches(one.text) & known) <= SHARED]
    return kept, len(files) - len(kept)
