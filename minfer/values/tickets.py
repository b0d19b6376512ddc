"""Tickets: a persistent set of integers whose least one is found in a few steps, however
sparse.

Theory. The numbers are the leaves of a tree of bits. A word of the lowest level has a bit
for each of 4,096 consecutive numbers; a word of a higher level has one for each of 4,096
words below that are not empty. Adding and dropping mostly change one word, and go up only
where a word was empty or becomes so; the least is found by following the lowest bits
down. Empty words are not kept.
"""

from collections.abc import Iterable
from typing import Any, Final

from minfer.values.pmap import Map

_BITS: Final = 12  # of a number, on each level
_LEVELS: Final = 4  # numbers below 2^48: a million uses a second for nine years
_LOW: Final = (1 << _BITS) - 1

Words = Map[int, int]  # level and place of a word, as one number -> its bits


def add(words: Any, ticket: int) -> None:
    """Add a number that is not there to a draft of words."""
    for level in range(_LEVELS):
        bit, ticket = 1 << (ticket & _LOW), ticket >> _BITS
        place = ticket * _LEVELS + level
        word = words.get(place, 0)
        words[place] = word | bit
        if word:
            return


def drop(words: Any, ticket: int) -> None:
    """Remove a number that is there from a draft of words."""
    for level in range(_LEVELS):
        bit, ticket = 1 << (ticket & _LOW), ticket >> _BITS
        place = ticket * _LEVELS + level
        word = words[place] ^ bit
        if word:
            words[place] = word
            return
        del words[place]


def pop_least(words: Any) -> int:
    """Remove the least number of a draft of words, which is not empty, and return it."""
    ticket = 0
    for level in reversed(range(_LEVELS)):
        word = words[ticket * _LEVELS + level]
        ticket = ticket << _BITS | (word & -word).bit_length() - 1
    drop(words, ticket)
    return ticket


def words_of(tickets: Iterable[int]) -> Words:
    """The words of some numbers."""
    draft = Map[int, int]().mutate()
    for ticket in tickets:
        add(draft, ticket)
    return draft.finish()
