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
    """How problems of one kind are drawn, and their weight among all."""

    draw: Draw
    weight: float


TASKS: Final[Mapping[str, Task]] = {
    "sum": Task(arithmetic.draw_sum, 9),
    "difference": Task(arithmetic.draw_difference, 8),
    "chain": Task(arithmetic.draw_chain, 3),
    "product": Task(arithmetic.draw_product, 7),
    "quotient": Task(arithmetic.draw_quotient, 3),
    "story": Task(arithmetic.draw_story, 3),
    "next": Task(arithmetic.draw_next, 2),
    "compare": Task(arithmetic.draw_compare, 2),
    "sort": Task(lists.draw_sort, 8),
    "reverse": Task(lists.draw_reverse, 6),
    "extreme": Task(lists.draw_extreme, 3),
    "count letters": Task(letters.draw_count, 5),
    "word length": Task(letters.draw_length, 2),
    "spell": Task(letters.draw_spell, 3),
    "reverse word": Task(letters.draw_backwards, 4),
    "units": Task(conversions.draw_units, 4),
    "duration": Task(conversions.draw_duration, 2),
    "temperature": Task(conversions.draw_temperature, 2),
    "date": Task(conversions.draw_date, 4),
    "next date": Task(conversions.draw_next_day, 1),
    "weekday": Task(conversions.draw_weekday, 2),
    "calendar": Task(conversions.draw_calendar, 1),
    "extraction": Task(extraction.draw_extraction, 8),
    "tool call": Task(tools.draw_call, 14),
    "talk": Task(talk.draw_talk, 5),
    "told": Task(talk.draw_told, 1),
    "recall": Task(talk.draw_recall, 2),
    "repeat": Task(talk.draw_repeat, 2),
    "code": Task(code.draw_code, 3),
    "unknown": Task(unknown.draw_unknown, 8),
}
_NAMES: Final = list(TASKS)
_WEIGHTS: Final = [task.weight for task in TASKS.values()]


def any_problem(rng: Random) -> Problem:
    """A problem to be trained on, of any task."""
    (name,) = rng.choices(_NAMES, _WEIGHTS)
    return drawn(TASKS[name].draw, rng, held_out=False)
