"""All tasks, and how often each comes in training."""

from collections.abc import Mapping
from enum import IntEnum
from random import Random
from typing import Final

from attrs import frozen

from bench.bundled.tasks import (
    arithmetic,
    code,
    conversions,
    extraction,
    letters,
    lists,
    talk,
    tools,
    unknown,
)
from bench.bundled.tasks.problem import Draw, Problem, drawn


class Stage(IntEnum):
    """When in training: at first, once what is easy is learnt, and in the last piece,
    which is for what is still wrong.
    """

    FIRST = 0
    LATER = 1
    LAST = 2


@frozen
class Task:
    """How problems of one kind are drawn, and their weight among all at each stage."""

    draw: Draw
    weights: tuple[float, float, float]


TASKS: Final[Mapping[str, Task]] = {
    "sum": Task(arithmetic.draw_sum, (9, 10, 5)),
    "difference": Task(arithmetic.draw_difference, (8, 9, 6)),
    "chain": Task(arithmetic.draw_chain, (3, 3, 4)),
    "product": Task(arithmetic.draw_product, (7, 8, 4)),
    "quotient": Task(arithmetic.draw_quotient, (3, 8, 8)),
    "story": Task(arithmetic.draw_story, (3, 3, 4)),
    "sequence": Task(arithmetic.draw_sequence, (2, 3, 6)),
    "next": Task(arithmetic.draw_next, (2, 2, 1)),
    "compare": Task(arithmetic.draw_compare, (2, 2, 4)),
    "sort": Task(lists.draw_sort, (8, 20, 40)),
    "reverse": Task(lists.draw_reverse, (6, 14, 10)),
    "extreme": Task(lists.draw_extreme, (3, 3, 2)),
    "count letters": Task(letters.draw_count, (5, 9, 4)),
    "word length": Task(letters.draw_length, (2, 4, 2)),
    "spell": Task(letters.draw_spell, (3, 8, 4)),
    "reverse word": Task(letters.draw_backwards, (4, 9, 12)),
    "units": Task(conversions.draw_units, (4, 6, 6)),
    "duration": Task(conversions.draw_duration, (2, 4, 9)),
    "temperature": Task(conversions.draw_temperature, (2, 2, 4)),
    "date": Task(conversions.draw_date, (4, 4, 2)),
    "next date": Task(conversions.draw_next_day, (1, 2, 5)),
    "weekday": Task(conversions.draw_weekday, (2, 2, 2)),
    "calendar": Task(conversions.draw_calendar, (1, 1, 3)),
    "extraction": Task(extraction.draw_extraction, (8, 8, 4)),
    "tool call": Task(tools.draw_call, (14, 20, 14)),
    "missing tool": Task(tools.draw_missing, (0, 2, 1)),  # and in dialogues.py
    "talk": Task(talk.draw_talk, (5, 4, 4)),
    "told": Task(talk.draw_told, (1, 1, 1)),
    "recall": Task(talk.draw_recall, (2, 2, 1)),
    "repeat": Task(talk.draw_repeat, (2, 2, 1)),
    "code": Task(code.draw_code, (3, 3, 14)),
    "unknown": Task(unknown.draw_unknown, (8, 9, 14)),
}
_NAMES: Final = list(TASKS)
_WEIGHTS: Final = {
    stage: [task.weights[stage] for task in TASKS.values()] for stage in Stage
}


def any_problem(rng: Random, stage: Stage = Stage.FIRST) -> Problem:
    """A problem to be trained on, of any task."""
    (name,) = rng.choices(_NAMES, _WEIGHTS[stage])
    return drawn(TASKS[name].draw, rng, held_out=False)
