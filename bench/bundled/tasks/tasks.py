"""All tasks, and how often each comes in training."""

from collections.abc import Mapping
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


@frozen
class Task:
    """How problems of one kind are drawn, and their weight among all: at first, and once
    what is easy is learnt.
    """

    draw: Draw
    weight: float
    later: float


TASKS: Final[Mapping[str, Task]] = {
    "sum": Task(arithmetic.draw_sum, 9, 10),
    "difference": Task(arithmetic.draw_difference, 8, 9),
    "chain": Task(arithmetic.draw_chain, 3, 3),
    "product": Task(arithmetic.draw_product, 7, 8),
    "quotient": Task(arithmetic.draw_quotient, 3, 8),
    "story": Task(arithmetic.draw_story, 3, 3),
    "next": Task(arithmetic.draw_next, 2, 2),
    "compare": Task(arithmetic.draw_compare, 2, 2),
    "sort": Task(lists.draw_sort, 8, 20),
    "reverse": Task(lists.draw_reverse, 6, 14),
    "extreme": Task(lists.draw_extreme, 3, 3),
    "count letters": Task(letters.draw_count, 5, 9),
    "word length": Task(letters.draw_length, 2, 4),
    "spell": Task(letters.draw_spell, 3, 8),
    "reverse word": Task(letters.draw_backwards, 4, 9),
    "units": Task(conversions.draw_units, 4, 6),
    "duration": Task(conversions.draw_duration, 2, 4),
    "temperature": Task(conversions.draw_temperature, 2, 2),
    "date": Task(conversions.draw_date, 4, 4),
    "next date": Task(conversions.draw_next_day, 1, 1),
    "weekday": Task(conversions.draw_weekday, 2, 2),
    "calendar": Task(conversions.draw_calendar, 1, 1),
    "extraction": Task(extraction.draw_extraction, 8, 8),
    "tool call": Task(tools.draw_call, 14, 20),
    "missing tool": Task(tools.draw_missing, 0, 2),  # and in dialogues.py
    "talk": Task(talk.draw_talk, 5, 4),
    "told": Task(talk.draw_told, 1, 1),
    "recall": Task(talk.draw_recall, 2, 2),
    "repeat": Task(talk.draw_repeat, 2, 2),
    "code": Task(code.draw_code, 3, 3),
    "unknown": Task(unknown.draw_unknown, 8, 9),
}
_NAMES: Final = list(TASKS)
_WEIGHTS: Final = [task.weight for task in TASKS.values()]
_LATER: Final = [task.later for task in TASKS.values()]


def any_problem(rng: Random, *, later: bool = False) -> Problem:
    """A problem to be trained on, of any task."""
    (name,) = rng.choices(_NAMES, _LATER if later else _WEIGHTS)
    return drawn(TASKS[name].draw, rng, held_out=False)
