"""What a tiny model cannot know: it says so, in a few words."""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, syllables, varied
from bench.bundled.tasks.vocabulary import (
    JOBS,
    NAMES,
    PLACES,
    SUBJECTS,
    THINGS,
    WORDS,
    phrases,
)

ANSWERS: Final = phrases("unknown", "answers")
_FORMS: Final = phrases("unknown", "forms")
_OPENERS: Final = phrases("unknown", "openers")


def draw_unknown(rng: Random) -> Problem:
    """A question about the world, or one that means nothing."""
    words = rng.sample(WORDS, 3)
    topics, places = rng.sample(SUBJECTS, 2), rng.sample(PLACES, 2)
    form = rng.choice(_FORMS)
    parts = {
        "w": words[0],
        "w2": words[1],
        "w3": words[2],
        "t": topics[0],
        "t2": topics[1],
        "n": rng.choice(NAMES),
        "s": syllables(rng),
        "g": syllables(rng).lower(),
        "g2": syllables(rng).lower(),
        "j": rng.choice(JOBS),
        "p": places[0] if rng.random() < 0.8 else syllables(rng),
        "p2": places[1],
        "x": rng.choice(THINGS),
        "y": rng.randint(1500, 2030),
        "a": rng.randint(2, 99),
        "b": rng.randint(2, 99),
        "c": rng.randint(0, 99),
        "d": rng.randint(0, 9),
        "big": rng.randint(2000, 99999),
        "big2": rng.randint(1000, 99999),
    }
    question = rng.choice(_OPENERS) + form.format(**parts)
    return Problem(
        task="unknown",
        key=form,  # some ways to ask are never seen in training
        question=varied(rng, question),
        answer=ANSWERS[0] if rng.random() < 0.8 else ANSWERS[1],
        thought="I have not learnt this.",
        truth="don't know",
    )
