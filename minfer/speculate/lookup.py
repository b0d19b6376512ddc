"""Drafts that are looked up: what followed the same tokens earlier.

Theory. Answers repeat their prompts and themselves (code that is edited, text that is
summed up, lists), and those of others who were asked alike. So the last tokens of a
sample are looked for, the more of them the better: first in what it knows itself, then in
the outputs of others within its scope. The longest match wins, its own if equal.

A match that ends where the sample ends goes round: behind `ababa`, found two tokens back,
come `ba`, and then what was just drafted, `baba...`; as LZ77 copies what it has yet to
write.

A sample's own texts go with it. There are at most `scopes` of others', of which the one
that nobody has written into for the longest goes first, and in each `others` tokens.
Requests that share no cached prefix, as each has a salt of its own, have a scope each.
"""

from typing import Any

from attrs import field, frozen

from minfer.checks import number
from minfer.keys import Key
from minfer.pmap import Map
from minfer.record import evolve
from minfer.sequence import SampleId
from minfer.speculate.proposer import Proposal, Proposer
from minfer.speculate.texts import NOWHERE, Texts


def _size(default: int, least: int = 1) -> Any:
    return field(default=default, validator=number(least, of="lookup: "))


@frozen
class Own:
    """What is kept of a sample."""

    scope: Key
    texts: Texts  # one, number 0
    unshown: int  # tokens to come that others must not be shown
    shown: int = NOWHERE  # the number of its text among the others of its scope
    unsaid: tuple[int, ...] = ()  # output that the others have not been shown yet


@frozen
class Shelf:
    """The outputs of a scope."""

    texts: Texts
    used: int = 0  # when somebody last wrote into it


@frozen
class Library:
    """All that is searched."""

    own: Map[SampleId, Own] = Map()
    others: Map[Key, Shelf] = Map()
    clock: int = 0  # times that anything was written into `others`


@frozen(kw_only=True)
class Lookup(Proposer):
    """Looks for the last tokens of a sample. Raises ConfigError for sizes that cannot
    be.
    """

    least: int = _size(3)  # tokens that must be the same
    longest: int = _size(32)  # that are compared
    candidates: int = _size(8)  # places that are looked at, in each of the two
    known: int = _size(2**17)  # tokens of a sample; of a longer one nothing more is seen
    others: int = _size(2**16, least=0)  # tokens of a scope; 0: own text alone
    scopes: int = _size(16)
    batch: int = _size(32)  # tokens that others are shown at once: each time has its cost

    def start(self) -> Library:
        """Nothing is known."""
        return Library()

    def began(self, state: Library, who: SampleId, scope: Key, prompt: int) -> Library:
        """Learn of a sample, the first `prompt` of whose tokens others must not be
        shown.
        """
        own = Own(scope, Texts(self.least, self.known).begun(), prompt)
        return evolve(state, own=state.own.set(who, own))

    def grew(self, state: Library, who: SampleId, tokens: tuple[int, ...]) -> Library:
        """Learn of more tokens of a sample."""
        own = state.own.get(who)
        if own is None or not tokens:
            return state
        texts = own.texts.extended(0, tokens)
        if texts is own.texts:  # it is full: what it ends with is not known any more
            return self.ended(state, who)
        unsaid = own.unsaid + tokens[own.unshown :] if self.others else ()
        unshown = max(0, own.unshown - len(tokens))
        own = Own(own.scope, texts, unshown, own.shown, unsaid)
        if len(unsaid) >= self.batch:
            state, own = self._shown(state, own)
        return evolve(state, own=state.own.set(who, own))

    def ended(self, state: Library, who: SampleId) -> Library:
        """Forget what a sample knew; what it was shown to have written stays."""
        own = state.own.get(who)
        if own is None:
            return state
        if own.unsaid:
            state, _ = self._shown(state, own)
        return evolve(state, own=state.own.delete(who))

    def propose(self, state: Library, who: SampleId, most: int) -> Proposal:
        """Say what followed the last tokens of a sample where most of them were."""
        own = state.own.get(who)
        if own is None or most < 1:
            return Proposal()
        last = own.texts.last(0, self.longest)
        mine = own.texts.found(last, self.candidates + 1)  # the first is the end itself
        shelf = state.others.get(own.scope)
        theirs = shelf.texts.found(last, self.candidates) if shelf else None
        if shelf and theirs and (mine is None or theirs.length > mine.length):
            return Proposal(shelf.texts.following(theirs, most), theirs.length)
        if mine is None:
            return Proposal()
        return Proposal(going_round(own.texts.following(mine, most), most), mine.length)

    def _shown(self, state: Library, own: Own) -> tuple[Library, Own]:
        """With what a sample has not said yet, where others of the scope see it."""
        tokens = own.unsaid
        shelf, others = state.others.get(own.scope), state.others
        if shelf is None:
            # Numbers that no shelf has given: one that the scope had may have gone.
            clock = state.clock
            shelf = Shelf(Texts(self.least, self.others, first=clock, next=clock))
            if len(others) >= self.scopes:
                others = others.delete(min(others, key=lambda key: others[key].used))
        texts, number = shelf.texts, own.shown
        if number not in texts.texts:  # it is new here, or its text went as the oldest
            number, texts = texts.next, texts.begun()
            tokens = tokens[-self.others :]
        shelf = Shelf(texts.extended(number, tokens), state.clock + 1)
        others = others.set(own.scope, shelf)
        state = evolve(state, others=others, clock=state.clock + 1)
        return state, evolve(own, shown=number, unsaid=())


def going_round(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
    """So many tokens: these, over and over."""
    return (tokens * (-(-most // len(tokens))))[:most]
