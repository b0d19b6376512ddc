"""A problem: a question whose answer is known, and whether it may be trained on.

Whether a problem is held out is a matter of its key alone, not of its wording: a sum that
is held out is so in every phrasing, in both orders of its terms.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final
from zlib import crc32

from attrs import field, frozen

HELD_OUT: Final = 20  # one problem of so many is never trained on


@frozen
class Call:
    """A call of a tool, and what came back."""

    name: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any] | str


@frozen(kw_only=True)
class Problem:
    """A question, its answer, and what tells whether another answer is right as well."""

    task: str
    question: str
    answer: str
    truth: str  # what a right answer has: see `checks`
    key: str = ""  # decides whether it is held out; none: a thing to be learnt by heart
    thought: str = ""  # a short reasoning that leads to the answer
    before: Sequence[tuple[str, str]] = ()  # turns of the same talk that it refers to
    tools: Sequence[Mapping[str, Any]] = ()  # what is offered
    calls: Sequence[Call] = field(default=())  # what is called before the answer

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on."""
        return (
            bool(self.key) and crc32(f"{self.task} {self.key}".encode()) % HELD_OUT == 0
        )


Draw = Callable[[Random], Problem]


def drawn(draw: Draw, rng: Random, *, held_out: bool) -> Problem:
    """A problem that is held out, or one that is not.

    Raises ValueError if the task seems to have none.
    """
    for _ in range(10_000):
        problem = draw(rng)
        if problem.held_out == held_out:
            return problem
    raise ValueError(f"{problem.task}: no problem found with held_out={held_out}")


def varied(rng: Random, question: str) -> str:
    """A question as people type: with or without capital, full stop, or politeness."""
    dice = rng.random()
    if dice < 0.06:
        question = f"please {question[0].lower()}{question[1:]}"
    elif dice < 0.12:
        question = f"{question.rstrip('.?')}, please."
    elif dice < 0.18:
        question = f"Can you tell me: {question}"
    if rng.random() < 0.15 and not question.startswith(("I ", "I'")):
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip(".?!")
    elif rng.random() < 0.05:
        question = re.sub(r"[.?]$", "!", question)
    return question


def syllables(rng: Random, low: int = 2, high: int = 3) -> str:
    """A name that nobody has: tasks shall copy names, and not only those of a list."""
    onsets, vowels, codas = "bdfgklmnprstvz", "aeiou", ["", "", "n", "r", "l", "s", "m"]
    parts = (
        rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas)
        for _ in range(rng.randint(low, high))
    )
    return "".join(parts).capitalize()
