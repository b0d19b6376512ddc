"""Names, places, things and words of which questions are made, and how they are put."""

import tomllib
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).parent


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / f"{name}.toml").read_text("utf-8"))


PHRASES: Final = _read("phrases")
TOOLS: Final = _read("tools")
_LISTS: Final = _read("names")
# The commonest words of docstrings in the standard library, and some of daily life.
WORDS: Final = tuple((_HERE / "words.txt").read_text("utf-8").split())


def phrases(task: str, name: str) -> tuple[str, ...]:
    """The ways in which something is said."""
    return tuple(PHRASES[task][name])


def _listed(name: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in _LISTS[name].split(","))


NAMES: Final = _listed("names")
PLACES: Final = _listed("places")
THINGS: Final = _listed("things")
JOBS: Final = _listed("jobs")
COLORS: Final = _listed("colors")
SUBJECTS: Final = _listed("subjects")
MONTHS: Final = _listed("months")
WEEKDAYS: Final = _listed("weekdays")
EVERYDAY: Final = _listed("everyday")
