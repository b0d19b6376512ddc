"""Several words looked for at once, in a text that comes letter by letter (Aho-Corasick).

Theory. After each letter, what matters of a text is its longest end that begins a word:
the state. The next letter lengthens that end, or the next shorter end that begins a word
is tried, to which each state has a link. A link shortens what a letter had to lengthen,
so a text costs two looks a letter at most, however many words there are.

States are numbered along the words, in their order: the state after a state is its
successor by the word's next letter, and a table has only the places where words part.
So words cost their letters, once, and four bytes for each: no more, whatever is read, and
nothing is computed of them in advance. Links are found when a text first comes by.

    words "abc", "abd", "bd"    0 -a- 1 -b- 2 -c- 3     partings: (2, d): 4, (0, b): 5
                                |           | d- 4      links: of 2 ("ab"), 5 ("b");
                                | b- 5 -d- 6              of 4 ("abd"), 6 ("bd")

A word that begins with another one can never end first, and is left out.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from attrs import frozen

ROOT: Final = 0  # the state of a text of which no end begins a word
_UNKNOWN: Final = -1
_LEAF: Final = (
    "\0"  # takes a letter's place where a word ends; nothing goes on from there
)


@frozen
class Place:
    """Where reading a text has led."""

    state: int
    read: int  # letters: all, or up to the end of the first word that was found


class Automaton:
    """Words as states, which any number of texts may go through, from any thread."""

    def __init__(self, words: Iterable[str]) -> None:
        """Raises ValueError where there is no word, or an empty one."""
        kept: list[str] = []
        for word in sorted(words):
            if not kept or not word.startswith(kept[-1]):
                kept.append(word)
        if not kept or not kept[0]:
            raise ValueError("words to look for must not be empty")
        self.ends = {len(kept[0]): kept[0]}  # the longest word that ends in a state
        self._partings: dict[tuple[int, str], int] = {}
        # From here on states belong to one word; and how far they are ahead of their
        # length.
        self._firsts, self._ahead = [ROOT], [0]
        self._letters = self._number(kept)
        self._links = array("i", [_UNKNOWN]) * len(self._letters)
        self._links[ROOT] = ROOT
        self._begins = frozenset(word[0] for word in kept)

    def passes(self, text: str) -> bool:
        """Whether a text has no letter that a word begins with: from the root, it leads
        back there.
        """
        return self._begins.isdisjoint(text)

    def read(self, state: int, text: str) -> Place:
        """Go on from a state, to the end of the text or of the first word in it."""
        letters, partings, links = self._letters, self._partings, self._links
        for at, letter in enumerate(text, 1):
            # `_after`, written out: this is what each letter of an answer costs.
            while True:
                if letters[state] == letter:
                    new = state + 1
                    break
                new = partings.get((state, letter), ROOT)
                if new != ROOT or state == ROOT:
                    break
                state = links[state]
            if links[new] == _UNKNOWN:
                self._link(new, state, letter)
            state = new
            if state in self.ends:
                return Place(state, at)
        return Place(state, len(text))

    def beyond(self, state: int) -> int:
        """From where to go on behind a word that was found and does not count."""
        while state != ROOT and self._letters[state] == _LEAF:
            state = self._links[state]
        return state

    def length(self, state: int) -> int:
        """Letters of the end of a text that a state stands for."""
        return state - self._ahead[bisect_right(self._firsts, state) - 1]

    def _number(self, words: list[str]) -> str:
        """Give all states numbers; returns the letters that lead on from each."""
        before, path = words[0], range(len(words[0]) + 1)
        parts, new = [before + _LEAF], len(before) + 1
        states = [*path]  # of the word before, by length
        for word in words[1:]:
            shared = _common(before, word)
            self._partings[states[shared], word[shared]] = new
            self._firsts.append(new)
            self._ahead.append(new - shared - 1)
            states[shared + 1 :] = range(new, new + len(word) - shared)
            parts.append(word[shared + 1 :] + _LEAF)
            new += len(word) - shared
            self.ends[new - 1] = before = word
        return "".join(parts)

    def _after(self, state: int, letter: str) -> int:
        """The state that is longer by a letter; the root, if no word goes on so."""
        if self._letters[state] == letter:
            return state + 1
        return self._partings.get((state, letter), ROOT)

    def _link(self, state: int, before: int, letter: str) -> None:
        """Find the link of a state, one letter behind `before`, and those it depends on.

        A state is only left that has a link, and that no word ends in: so no leaf is.
        Threads may find the same at once; each state is written after what it leads to.
        """
        found: list[tuple[int, int]] = []
        while self._links[state] == _UNKNOWN:
            shorter = ROOT
            if before != ROOT:
                before = self._links[before]
                shorter = self._after(before, letter)
                while shorter == ROOT != before:
                    before = self._links[before]
                    shorter = self._after(before, letter)
            found.append((state, shorter))
            state = shorter
        for state, shorter in reversed(found):
            if shorter in self.ends:
                self.ends.setdefault(state, self.ends[shorter])
            self._links[state] = shorter


def _common(a: str, b: str) -> int:
    """How many letters two words begin with in common."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])
