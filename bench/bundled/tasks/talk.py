"""Small talk: greetings, who one is, thanks, and a name that is remembered."""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, syllables, varied
from bench.bundled.tasks.vocabulary import COLORS, NAMES, PHRASES, PLACES, WORDS, phrases

_TURNS: Final = tuple(
    (tuple(one["asked"]), str(one["answer"])) for one in PHRASES["talk"]["turns"]
)
_GREETINGS: Final = ("Hi! ", "Hello! ", "Hi, ", "Hey, ", "Hello. ", "Good morning! ")
_MEET: Final = phrases("talk", "meet")
_LIVE: Final = phrases("talk", "live")
_COLOR: Final = phrases("talk", "color")
_TOLD: Final = (
    (
        _MEET,
        "Nice to meet you, {n}!",
        ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?"),
        "Your name is {n}.",
    ),
    (
        _LIVE,
        "I have never been to {n}.",
        ("Where do I live?", "Where am I from?", "What is my city?"),
        "You live in {n}.",
    ),
    (
        _COLOR,
        "{N} is a nice color.",
        ("What is my favorite color?", "Which color do I like?"),
        "You like {n}.",
    ),
)


def draw_talk(rng: Random) -> Problem:
    """Something that everybody says, and what to say to it."""
    asked, answer = rng.choice(_TURNS)
    question = rng.choice(asked)
    if question.endswith("?") and rng.random() < 0.25:  # the question is what counts
        question = rng.choice(_GREETINGS) + question
    return Problem(task="talk", question=question, answer=answer, truth=answer)


def _told(rng: Random) -> tuple[str, str, str, str, str]:
    forms, answer, again, recalled = rng.choice(_TOLD)
    pool = {_MEET: NAMES, _LIVE: PLACES, _COLOR: COLORS}[forms]
    value = (
        syllables(rng) if pool is not COLORS and rng.random() < 0.3 else rng.choice(pool)
    )
    said = rng.choice(forms).format(n=value)
    reply = answer.format(n=value, N=value.capitalize())
    return said, reply, rng.choice(again), recalled.format(n=value), value


def draw_told(rng: Random) -> Problem:
    """A fact that the user tells."""
    said, reply, _, _, value = _told(rng)
    return Problem(task="told", key=value, question=said, answer=reply, truth=value)


def draw_recall(rng: Random) -> Problem:
    """A fact told earlier in the talk, with something else in between."""
    said, reply, again, recalled, value = _told(rng)
    between = [draw_talk(rng) for _ in range(rng.randrange(3))]
    turns = ((said, reply), *((one.question, one.answer) for one in between))
    return Problem(
        task="recall",
        key=value,
        before=turns,
        question=again,
        answer=recalled,
        thought=f"The user said: {said}",
        truth=value,
    )


def draw_repeat(rng: Random) -> Problem:
    """Words to be said again."""
    words = " ".join(rng.sample(WORDS, rng.randint(1, 6)))
    forms = (
        "Repeat: {w}",
        "Say {w}.",
        'Say "{w}".',
        "Repeat after me: {w}",
        "Echo {w}",
        'Write "{w}".',
        "Please say: {w}",
    )
    return Problem(
        task="repeat",
        key=words,
        question=varied(rng, rng.choice(forms).format(w=words)).rstrip("!"),
        answer=words,
        truth=words,
    )
