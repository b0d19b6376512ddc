"""Circles of tests, from the smallest out.

    pytest tests/core    for every save: the core, without torch, in seconds
    pytest               for every commit: all rooms, in four minutes
    pytest --rest        in .ci/run, when `pytest` has passed: what is marked `long`
    pytest --all         all of these, and what is marked `claimed`: as many
                         prompts, draws or steps as a claim speaks of, for over half an
                         hour

`-n auto` spreads each over the processors, except where there is a GPU, whose memory they
would fight for.

A test is long that takes more than 0.15 seconds of a processor. What is claimed is volume
alone: more seeds, or the whole matrix instead of one case of a kind. So a plain run asks
most questions in few minutes, and `.ci/run` asks all of them; of the bugs that are
planted and of the mutants it tries a sample, another one whenever a file has changed.
tests/conftest.py has the options, and what the marks do.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# No example database and no clock: the same tests on every machine, each time. New
# examples are for
# `--hypothesis-profile fresh`, for the swarm and for the whole plane's seeds.
settings.register_profile(
    "suite", database=None, deadline=None, derandomize=True, max_examples=25
)
settings.register_profile("all", settings.get_profile("suite"), max_examples=150)
settings.register_profile("rest", settings.get_profile("suite"), max_examples=50)
settings.register_profile("fresh", settings.get_profile("all"), derandomize=False)


def long(values: Iterable[Any]) -> list[Any]:
    """Parameters that a plain run leaves out; a tuple has a value for each name."""
    return _marked(pytest.mark.long, values)


def claimed(values: Iterable[Any]) -> list[Any]:
    """Parameters of the widest circle alone; a tuple has a value for each name."""
    return _marked(pytest.mark.claimed, values)


def _marked(mark: pytest.MarkDecorator, values: Iterable[Any]) -> list[Any]:
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=mark) for value in rows]


def seeds(first_count: int, total: int) -> pytest.MarkDecorator:
    """A test of many seeds in one go: `seeds` is the first few, or, claimed, all
    the others.
    """
    return pytest.mark.parametrize(
        "seeds",
        [range(first_count), *claimed([range(first_count, total)])],
        ids=["few", "others"],
    )


def examples(count: int) -> settings:
    """Hypothesis' settings for a test of large examples: `count` of them, or, with --all,
    six times as many. Other tests take as many as the profile says.
    """
    share = settings().max_examples / settings.get_profile("suite").max_examples
    return settings(max_examples=round(count * share))
