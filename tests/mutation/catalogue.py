"""Which mutants there are: those of the files that decide something, and of them a
choice.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from attrs import frozen

from tests.mutation.operators import Spot, changed, spots

CORE: Final = Path(__file__).resolve().parents[2] / "minfer"
FOLDERS: Final = (  # of the files that decide, beside those at the top
    "values",
    "blocks",
    "sampling",
    "records",
    "lifecycle",
    "tiers",
    "planning",
    "policies",
    "speculate",
    "routing",
)
MUTANTS_PER_KIND: Final = 1  # mutants of one kind in one function
KINDS: Final = {
    "comparison": "comparison",
    "offset": "sum",
    "term": "sum",
    "slice": "sum",
    "swap": "argument",
    "bound": "argument",
    "condition": "condition",
    "negation": "condition",
    "constant": "condition",
    "update": "effect",
    "statement": "effect",
}

# Files of the core whose mutants are not made, and why not.
LEFT_OUT: Final = {
    "__init__.py": "names and when they are imported, in each folder",
    "__main__.py": "starts the command line",
    "extras.py": "one text",
    "policy.py": "names of another file",
    "records/state_keeping.py": "settings alone",
    "routing/state.py": "records alone",
    "sampling_params.py": "names of other files",
    "speculate/proposer.py": "a protocol",
    "values/pmap.py": "one import",
    "values/record.py": "a faster attrs.evolve",
    "values/texts.py": "words for people",
    "values/thresholds.py": "constants",
    "version.py": "one constant",
}


@frozen
class Mutant:
    """A module of the core with one spot changed."""

    file: str
    spot: Spot
    number: int  # among those of the same text in the same function

    @property
    def key(self) -> str:
        """Its name, which does not change when the file is formatted or other functions
        change.
        """
        spot = self.spot
        name = (
            f"{self.file} | {spot.function} | {spot.rule} | {spot.before} -> {spot.after}"
        )
        return f"{name} | {self.number}" if self.number else name

    @property
    def place(self) -> int:
        """Where it comes among its like: a hash of its name."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "big")


def files() -> list[str]:
    """The files of the core that decide something."""
    paths = [path for folder in ("", *FOLDERS) for path in (CORE / folder).glob("*.py")]
    names = (path.relative_to(CORE).as_posix() for path in paths)
    return sorted(
        name
        for name in names
        if name not in LEFT_OUT and not name.endswith("__init__.py")
    )


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file of the core."""
    return ast.parse((CORE / file).read_text("utf-8"))


def source_of(file: str) -> str:
    """A digest of what a file of the core says, however it is formatted."""
    return hashlib.sha256(ast.dump(tree_of(file)).encode()).hexdigest()[:16]


@cache
def all_of(file: str) -> tuple[Mutant, ...]:
    """Every mutant that the rules make of a file."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    mutants = []
    for spot in spots(tree_of(file)):
        name = (spot.function, spot.rule, spot.before, spot.after)
        mutants.append(Mutant(file, spot, counts[name]))
        counts[name] += 1
    return (*mutants,)


def chosen(names: Iterable[str], per_kind: int = MUTANTS_PER_KIND) -> list[Mutant]:
    """Of each kind in each function of the files, at most `per_kind` mutants; in order of
    the files.
    """
    out = []
    for file in names:
        mutants = all_of(file)
        counts: Counter[tuple[str, str]] = Counter()
        keep = set()
        for mutant in sorted(mutants, key=lambda candidate: candidate.place):
            kind = (mutant.spot.function, KINDS[mutant.spot.rule])
            if counts[kind] < per_kind:
                counts[kind] += 1
                keep.add(mutant.key)
        out += [mutant for mutant in mutants if mutant.key in keep]
    return out


def named(key: str) -> Mutant:
    """The mutant of that name. Raises LookupError."""
    file = key.partition(" | ")[0]
    for mutant in all_of(file) if (CORE / file).exists() else ():
        if mutant.key == key:
            return mutant
    raise LookupError(f"no such mutant: {key}")


def tree(mutant: Mutant) -> ast.Module:
    """The mutant's file as it is with the change in it."""
    return changed(tree_of(mutant.file), mutant.spot)
