"""Drafts by lookup: the tokens that followed the same tokens earlier.

Theory. Answers repeat their prompts and themselves (code that is edited, text that is
summed up, lists), and answers to similar prompts. So the last tokens of a sample are
searched for, the longest match first: in its own known tokens, then in the outputs of
other samples within its scope. The longest match wins; of equals, its own.

A match that ends where the sample ends is repeated: after `ababa`, found two tokens back,
come `ba`, and then the drafts themselves, `baba...`, as LZ77 copies its own output.

A sample's own texts are dropped with it. Those of others are in at most `scopes` scopes,
of which the least recently written is dropped first, with `others` tokens each. Requests
that share no cached prefix, as each has its own salt, have a scope each.
"""

from typing import Any

from attrs import field, frozen

from minfer.blocks.keys import Key
from minfer.records.sequence import SampleId
from minfer.speculate.proposer import Proposal, Proposer
from minfer.speculate.texts import NOWHERE, Texts
from minfer.values.checks import number
from minfer.values.pmap import Map
from minfer.values.record import evolve


def _size(default: int, least: int = 1) -> Any:
    return field(default=default, validator=number(least, prefix="lookup: "))


@frozen
class Own:
    """The tokens of a live sample."""

    scope: Key
    texts: Texts  # one, number 0
    unshown: int  # next tokens that must not be published to others
    shown: int = NOWHERE  # the number of its text among the others of its scope
    unsaid: tuple[int, ...] = ()  # output that is not yet published to the others


@frozen
class Shelf:
    """The published outputs of a scope."""

    texts: Texts
    used: int = 0  # when it was last written


@frozen
class Library:
    """All texts that are searched."""

    own: Map[SampleId, Own] = Map()
    others: Map[Key, Shelf] = Map()
    clock: int = 0  # number of writes to `others`


@frozen(kw_only=True)
class Lookup(Proposer):
    """Looks up the last tokens of a sample. Raises ConfigError for invalid sizes."""

    least: int = _size(3)  # tokens that must match
    longest: int = _size(32)  # that are compared
    candidates: int = _size(8)  # places to compare, in own and other texts each
    known: int = _size(2**17)  # tokens of a sample; a longer one gets no more drafts
    others: int = _size(2**16, least=0)  # tokens of a scope; 0: own text alone
    scopes: int = _size(16)
    batch: int = _size(32)  # tokens that are published at once: each time has a cost

    def start(self) -> Library:
        """Return an empty library."""
        return Library()

    def began(self, state: Library, who: SampleId, scope: Key, prompt: int) -> Library:
        """Add a sample, whose first `prompt` tokens must not be published to others."""
        own = Own(scope, Texts(self.least, self.known).begun(), prompt)
        return evolve(state, own=state.own.set(who, own))

    def grew(self, state: Library, who: SampleId, tokens: tuple[int, ...]) -> Library:
        """Add more tokens of a sample."""
        own = state.own.get(who)
        if own is None or not tokens:
            return state
        texts = own.texts.extended(0, tokens)
        if texts is own.texts:  # it is full: its last tokens are not in it any more
            return self.ended(state, who)
        unsaid = own.unsaid + tokens[own.unshown :] if self.others else ()
        unshown = max(0, own.unshown - len(tokens))
        own = Own(own.scope, texts, unshown, own.shown, unsaid)
        if len(unsaid) >= self.batch:
            state, own = self._shown(state, own)
        return evolve(state, own=state.own.set(who, own))

    def ended(self, state: Library, who: SampleId) -> Library:
        """Remove a sample; its published output stays."""
        own = state.own.get(who)
        if own is None:
            return state
        if own.unsaid:
            state, _ = self._shown(state, own)
        return evolve(state, own=state.own.delete(who))

    def propose(self, state: Library, who: SampleId, most: int) -> Proposal:
        """Return the tokens that followed the longest match of the sample's last
        tokens.
        """
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
        """The library with the sample's unpublished output added to its scope."""
        tokens = own.unsaid
        shelf, others = state.others.get(own.scope), state.others
        if shelf is None:
            # Numbers that no shelf has used: an earlier shelf of the scope may have been
            # dropped.
            clock = state.clock
            shelf = Shelf(Texts(self.least, self.others, first=clock, next=clock))
            if len(others) >= self.scopes:
                others = others.delete(min(others, key=lambda key: others[key].used))
        texts, number = shelf.texts, own.shown
        if number not in texts.texts:  # new, or its text was dropped as the oldest
            number, texts = texts.next, texts.begun()
            tokens = tokens[-self.others :]
        shelf = Shelf(texts.extended(number, tokens), state.clock + 1)
        others = others.set(own.scope, shelf)
        state = evolve(state, others=others, clock=state.clock + 1)
        return state, evolve(own, shown=number, unsaid=())


def going_round(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Repeat `tokens` to a length of `most`."""
    return (tokens * (-(-most // len(tokens))))[:most]
