"""Texts that are searched for a match of the last tokens of a sample.

Theory. As in LZ77 with hash chains (Ziv and Lempel 1977; zlib): each run of `gram_length`
tokens, a gram, has a slot in a table, which holds the latest place after such a gram; and
each place has the place that its slot held before. A search begins at the slot of the
last tokens, follows a bounded chain of places back, and takes the longest match, the
latest of equals (Saxena 2023 for the use; Oliaro et al. 2024 for texts of others). A new
token costs one entry in the table and one link, however long the texts are.

All is bounded. The oldest texts are dropped when there are more than `capacity` tokens.
The table has a fixed number of slots, so places of dropped texts need not be removed:
they are overwritten in time, and until then are ignored. Grams that share a slot share a
chain: as tokens are compared, that may hide a match, and never makes a false one.

It is a value: an older version does not change.
"""

from typing import Final

from attrs import frozen

from minfer.values.log import Log
from minfer.values.pmap import Map
from minfer.values.record import evolve

NOWHERE: Final = -1  # in place of an address
_STRIDE: Final = 2**32  # an address is a text's number, times this, plus a place in it
_SPARE: Final = 2  # slots for each token of the capacity
_RECENT: Final = 256  # tokens of a text that are copied as it grows


@frozen
class Text:
    """One text, and for each place in it from the end of its first gram on, the address
    that was in its slot before.
    """

    tokens: Log[int] = Log()
    links: Log[int] = Log()


@frozen
class Match:
    """A place in a text after the same tokens as those searched for."""

    text: int  # its number
    place: int
    length: int  # matching tokens, as far as compared


@frozen
class Texts:
    """Numbered texts, the oldest of which are dropped as others grow."""

    gram_length: int  # tokens
    capacity: int  # tokens of all texts
    texts: Map[int, Text] = Map()
    heads: Map[int, int] = Map()  # slot -> the latest address
    first: int = 0  # number of the oldest text
    next: int = 0  # of the next text
    size: int = 0  # tokens

    def with_new_text(self) -> "Texts":
        """The texts with one more, empty, whose number was `next`."""
        texts = self.texts.set(self.next, Text())
        return evolve(self, texts=texts, next=self.next + 1)

    def extended(self, text: int, tokens: tuple[int, ...]) -> "Texts":
        """The texts with more tokens at the end of one; unchanged if that is dropped, or
        would need more than the capacity by itself.
        """
        old = self.texts.get(text)
        if old is None or len(old.tokens) + len(tokens) > self.capacity:
            return self
        trimmed = self._with_room(len(tokens))
        if text not in trimmed.texts:
            return trimmed
        heads, links = trimmed.heads.mutate(), list[int]()
        gram_length, start = self.gram_length, len(old.tokens)
        window = old.tokens[max(0, start - gram_length + 1) :] + tokens
        num_before = start - (len(window) - len(tokens))  # tokens before the window
        for end in range(gram_length, len(window) + 1):
            slot = self._slot(window[end - gram_length : end])
            links.append(heads.get(slot, NOWHERE))
            heads[slot] = text * _STRIDE + num_before + end
        grown = Text(
            old.tokens.extended(tokens, _RECENT),
            old.links.extended(tuple(links), _RECENT),
        )
        return evolve(
            trimmed,
            texts=trimmed.texts.set(text, grown),
            heads=heads.finish(),
            size=trimmed.size + len(tokens),
        )

    def find(self, last: tuple[int, ...], candidates: int) -> Match | None:
        """The longest match of the end of `last` that is followed by a token, of at most
        `candidates` places, the latest first.
        """
        if len(last) < self.gram_length:
            return None
        best: Match | None = None
        address = self.heads.get(self._slot(last[-self.gram_length :]), NOWHERE)
        for _ in range(candidates):
            number, place = divmod(address, _STRIDE)
            text = self.texts.get(number)  # None for NOWHERE
            if text is None:
                break
            length = _common_length(text.tokens, place, last, best.length if best else 0)
            if length >= self.gram_length and place < len(text.tokens):
                best = Match(number, place, length)
            address = text.links[place - self.gram_length]
        return best

    def tokens_after(self, match: Match, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens after a match."""
        return self.texts[match.text].tokens[match.place : match.place + max_tokens]

    def last_tokens(self, text: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens at the end of a text."""
        tokens = self.texts[text].tokens
        return tokens[max(0, len(tokens) - count) :]

    def _slot(self, gram: tuple[int, ...]) -> int:
        # Hashes of tuples of integers are the same in every process.
        return hash(gram) % (_SPARE * self.capacity)

    def _with_room(self, count: int) -> "Texts":
        """The texts without the oldest ones, as far as `count` tokens need their room."""
        texts, first, size = self.texts, self.first, self.size
        while size + count > self.capacity:
            size -= len(texts[first].tokens)
            texts, first = texts.delete(first), first + 1
        if first == self.first:
            return self
        return evolve(self, texts=texts, first=first, size=size)


def _common_length(
    tokens: Log[int], place: int, last: tuple[int, ...], best_length: int
) -> int:
    """How many tokens before a place equal those at the end of `last`; 0 if they are not
    more than `best_length`.
    """
    length, max_length = best_length + 1, min(place, len(last))
    if length > max_length or tokens[place - length : place] != last[-length:]:
        return 0
    while length < max_length and tokens[place - length - 1] == last[-length - 1]:
        length += 1
    return length
