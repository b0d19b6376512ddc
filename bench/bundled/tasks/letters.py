"""Words letter by letter: spelled, counted, turned around.

A model sees words in pieces of several letters. It spells a word first; what it then
counts or copies is one token a letter.
"""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, syllables, varied
from bench.bundled.tasks.vocabulary import EVERYDAY, WORDS, phrases

_COUNT: Final = phrases("letters", "count")
_LENGTH: Final = phrases("letters", "length")
_SPELL: Final = phrases("letters", "spell")
_BACK: Final = phrases("letters", "back")


def _word(rng: Random) -> str:
    dice = rng.random()
    if dice < 0.15:
        return rng.choice(EVERYDAY)
    word = rng.choice(WORDS) if dice < 0.8 else syllables(rng).lower()
    return word if rng.random() < 0.9 else word.capitalize()


def _letter(rng: Random, word: str) -> str:
    """One to be counted: often one that is there twice, sometimes none."""
    if rng.random() < 0.2:
        return rng.choice("abcdefghilmnoprstu")
    several = [letter for letter in word if word.count(letter) > 1]
    return rng.choice(several if several and rng.random() < 0.5 else word)


def draw_count(rng: Random) -> Problem:
    """How often a letter is in a word."""
    word = _word(rng).lower()
    letter = _letter(rng, word)
    count = word.count(letter)
    times = "once" if count == 1 else "twice" if count == 2 else f"{count} times"
    form = rng.choice(_COUNT).replace("r's", "{c}'s")
    found = f"the letter {letter} appears {times}" if count else f"there is no {letter}"
    return Problem(
        task="count letters",
        key=word,
        question=varied(rng, form.format(c=letter, w=word)),
        answer=f"{'-'.join(word)}: {found}, so {count}.",
        thought=f"I spell it: {'-'.join(word)}.",
        truth=str(count),
    )


def draw_length(rng: Random) -> Problem:
    """How many letters a word has."""
    word = _word(rng)
    return Problem(
        task="word length",
        key=word,
        question=varied(rng, rng.choice(_LENGTH).format(w=word)),
        answer=f"{'-'.join(word)}: {len(word)} letters.",
        thought=f"I spell it: {'-'.join(word)}.",
        truth=f"{len(word)} letters",
    )


def draw_spell(rng: Random) -> Problem:
    """A word, letter by letter."""
    word = _word(rng)
    return Problem(
        task="spell",
        key=word,
        question=varied(rng, rng.choice(_SPELL).format(w=word)),
        answer="-".join(word),
        truth="-".join(word),
    )


def draw_backwards(rng: Random) -> Problem:
    """A word from its last letter to its first."""
    word = _word(rng)
    while len(word) > 9:
        word = _word(rng)
    spelt, back = "-".join(word), word[::-1]
    return Problem(
        task="reverse word",
        key=word,
        question=varied(rng, rng.choice(_BACK).format(w=word)),
        answer=f"{spelt}, from the end {'-'.join(back)}: {back}",
        thought=f"I spell it: {spelt}. From the end: {'-'.join(back)}.",
        truth=back,
    )
