"""Texts as arrays of tokens, each marked if it is one to be learnt.

An array has one 16-bit number a token: the id, and a bit that says whether a model is
taught to write it. Of Python that is everything; of conversations, what the assistant
says; of texts that go round in circles, only that they end, and that counts for more.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

import numpy
from attrs import frozen
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.bundled.dialogues import OPENED, Dialogue
from bench.bundled.vocabulary import CONTEXT, TURN_END, TURN_START

LEARNT: Final = 1 << 14
HEAVY: Final = 1 << 13  # learnt, and worth as much as many tokens
Tokens = NDArray[numpy.int16]
END_ID: Final = 0
ROUNDS: Final = 2  # a text that has repeated itself so often has to end
TYPED: Final = 200  # characters of the longest beginning that is cut off
HEAD: Final = 60  # tokens of something else, before a document
LINES: Final = 0.6  # of all cuts, at the end of a line
WINDOW: Final = CONTEXT + 1  # inputs, and one further what follows each


@frozen
class Pack:
    """Documents behind each other, each followed by the end's token; and their starts.

    A window that begins near the end runs on into the beginning.
    """

    tokens: Tokens
    starts: NDArray[numpy.int64]

    @classmethod
    def of(cls, documents: Sequence[Tokens]) -> "Pack":
        """Documents that end in the end's token already."""
        lengths = numpy.array([len(one) for one in documents], numpy.int64)
        tokens = numpy.concatenate(documents)
        while len(tokens) < WINDOW:
            tokens = numpy.concatenate([tokens, tokens])
        starts = numpy.cumsum(lengths) - lengths
        return cls(numpy.concatenate([tokens, tokens[:WINDOW]]), starts)

    @classmethod
    def joined(cls, packs: Sequence["Pack"]) -> "Pack":
        """Several packs as one."""
        parts = [pack.tokens[:-WINDOW] for pack in packs]
        begins = numpy.cumsum([0, *map(len, parts)])
        starts = [
            pack.starts + begin for pack, begin in zip(packs, begins[:-1], strict=True)
        ]
        tokens = numpy.concatenate(parts)
        return cls(
            numpy.concatenate([tokens, tokens[:WINDOW]]), numpy.concatenate(starts)
        )


def texts(
    tokenizer: Tokenizer, documents: Iterable[str], batch: int = 2000
) -> list[Tokens]:
    """Texts of which everything is learnt, their end included."""
    found, left = list[Tokens](), list(documents)
    for at in range(0, len(left), batch):
        for one in tokenizer.encode_batch_fast(
            left[at : at + batch], add_special_tokens=False
        ):
            found.append(numpy.array([*one.ids, END_ID], numpy.int16) | LEARNT)
    return found


def halves(
    tokenizer: Tokenizer, documents: Iterable[str], rng: Random, share: float
) -> list[Tokens]:
    """Texts as `texts` has them, but for a share that is cut in two somewhere in its
    first lines, as if the first part was a prompt: what is typed ends where it likes, and
    not where a token of the whole text does. ("def f(x):" is one token less than its
    beginning in a file, where the colon and what follows it are one.)
    """
    begun, rest = list[str](), list[str]()
    for one in documents:
        at = _cut(one, rng) if rng.random() < share else 0
        begun.append(one[:at])
        rest.append(one[at:])
    both = zip(texts(tokenizer, begun), texts(tokenizer, rest), strict=True)
    return [numpy.concatenate([first[:-1], last]) for first, last in both]


def _cut(document: str, rng: Random) -> int:
    """A place in the first lines: mostly the end of one, without its line break."""
    head = document[: 1 + rng.randrange(TYPED)]
    ends = [at for at, char in enumerate(head) if char == "\n" and at]
    if ends and rng.random() < LINES:
        return rng.choice(ends)
    return rng.randrange(1, max(2, len(head)))


def behind(
    rng: Random, heads: Sequence[Tokens], documents: Sequence[Tokens], share: float
) -> list[Tokens]:
    """Documents, a share of them behind the beginning of something else, of which nothing
    is learnt: a model that is held to a form may be anywhere when that begins.
    """
    made = list[Tokens]()
    for one in documents:
        if rng.random() < share:
            head = rng.choice(heads)[:-1][: rng.randint(1, HEAD)] & (LEARNT - 1)
            one = numpy.concatenate([head, one])
        made.append(one)
    return made


def circles(rng: Random, documents: Sequence[Tokens], count: int) -> list[Tokens]:
    """Beginnings of documents that say their last words again and again, and then end.

    That they end is all that is learnt of them: a small model that has begun to repeat
    itself does not stop by itself.
    """
    made = list[Tokens]()
    for _ in range(count):
        whole = rng.choice(documents)[:-1]
        if len(whole) < 4:
            continue
        end = rng.randint(4, min(len(whole), 400))
        period = rng.randint(1, min(rng.choice((4, 12, 40)), end))
        rounds = ROUNDS + (period < 4) * rng.randint(1, 4)
        parts = [whole[:end], *[whole[end - period : end]] * rounds]
        tokens = numpy.concatenate(parts) & (LEARNT - 1)
        made.append(
            numpy.append(tokens, numpy.int16(END_ID | LEARNT | HEAVY)).astype(numpy.int16)
        )
    return made


class Conversations:
    """How conversations become tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opens = tokenizer.encode(
            f"{TURN_START}assistant\n", add_special_tokens=False
        ).ids
        self._turn_end = tokenizer.token_to_id(TURN_END)
        self._given = {
            given: len(tokenizer.encode(given, add_special_tokens=False).ids)
            for given in {OPENED, ""}
        }
        if len(self._opens) != 3:
            raise ValueError(f"the tokenizer takes 'assistant' apart: {self._opens}")

    def tokens(self, dialogues: Sequence[Dialogue]) -> list[Tokens]:
        """Conversations of which the assistant's turns are learnt."""
        written = [one.text() for one in dialogues]
        encoded = self._tokenizer.encode_batch_fast(written, add_special_tokens=False)
        return [
            self._marked(numpy.array([*one.ids, END_ID], numpy.int16), dialogue.given)
            for one, dialogue in zip(encoded, dialogues, strict=True)
        ]

    def _marked(self, ids: Tokens, given: str) -> Tokens:
        first, second, third = self._opens
        here = (ids[:-2] == first) & (ids[1:-1] == second) & (ids[2:] == third)
        begins = numpy.flatnonzero(here) + len(self._opens)
        ends = numpy.flatnonzero(ids == self._turn_end) + 1
        ends = ends[numpy.searchsorted(ends, begins)]
        if given:
            begins[-1] += self._length(given)
        change = numpy.zeros(len(ids) + 1, numpy.int16)
        change[begins] += 1
        change[ends] -= 1
        return ids | (numpy.cumsum(change[:-1]).astype(numpy.int16) * LEARNT)

    def _length(self, given: str) -> int:
        if given not in self._given:
            ids = self._tokenizer.encode(given, add_special_tokens=False).ids
            self._given[given] = len(ids)
        return self._given[given]
