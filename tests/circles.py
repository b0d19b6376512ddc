"""Three circles of tests, from the smallest out.

    pytest tests/core    for every save: the core, without torch, in seconds
    pytest               for every commit: all rooms, in minutes
    pytest --all         also what is marked `long`: volume, and nothing that is asked
                         there alone
    pytest --rest        of these, what has not been asked if `pytest` has passed

`-n auto` spreads each over the processors, except where there is a GPU, whose memory they
would fight for.

Every long test has a smaller sibling that is not: the same test with fewer seeds, or with
one case of a kind instead of the whole matrix. So each circle asks all of the questions
of its rooms, and a wider one asks them more often. tests/conftest.py has the option, and
what the mark does.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def long(values: Iterable[Any]) -> list[Any]:
    """Parameters of the widest circle alone; a tuple has a value for each name."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.long) for value in each]


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """A test of many seeds in one go: `seeds` is the first few, or, long, all
    the others.
    """
    return pytest.mark.parametrize(
        "seeds", [range(few), *long([range(few, many)])], ids=["few", "others"]
    )


def examples(few: int) -> settings:
    """Hypothesis' settings for a test of large examples: `few` of them, or, with --all,
    six times as many. Other tests take as many as the profile says.
    """
    share = settings().max_examples / settings.get_profile("suite").max_examples
    return settings(max_examples=round(few * share))
