"""Drafts by lookup: the tokens that followed the same tokens earlier.

Theory. Answers repeat their prompts and themselves (code that is edited, text that is
summed up, lists), and answers to similar prompts. So the last tokens of a sample are
searched for, the longest match first: in its own known tokens, then in the outputs of
other samples within its scope. The longest match wins; of equals, its own.

A match that ends where the sample ends is repeated: after `ababa`, found two tokens back,
come `ba`, and then the drafts themselves, `baba...`, as LZ77 copies its own output.

A sample's own text is dropped with it. The texts of others are in at most `max_scopes`
scopes, of which the least recently written is dropped first, with `max_scope_tokens`
tokens each. Requests that share no cached prefix, as each has its own salt, have a scope
each.
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


def _size(default: int, minimum: int = 1) -> Any:
    return field(default=default, validator=number(minimum, prefix="lookup: "))


@frozen
class SampleText:
    """The tokens of a live sample."""

    scope: Key
    texts: Texts  # one, number 0
    num_private: int  # next tokens that must not be published
    number: int = NOWHERE  # of its published text in its scope
    unpublished: tuple[int, ...] = ()  # output that is not yet published


@frozen
class ScopeTexts:
    """The published outputs of a scope."""

    texts: Texts
    last_write: int = 0  # by the clock of the library


@frozen
class Library:
    """All texts that are searched."""

    samples: Map[SampleId, SampleText] = Map()
    scopes: Map[Key, ScopeTexts] = Map()
    clock: int = 0  # number of writes to `scopes`


@frozen(kw_only=True)
class Lookup(Proposer):
    """Looks up the last tokens of a sample. Raises ConfigError for invalid sizes."""

    min_match: int = _size(3)  # tokens that must match
    max_match: int = _size(32)  # that are compared
    candidates: int = _size(8)  # places to compare, in own and other texts each
    max_sample_tokens: int = _size(2**17)  # a longer sample gets no more drafts
    max_scope_tokens: int = _size(2**16, minimum=0)  # 0: a sample's own text alone
    max_scopes: int = _size(16)
    batch: int = _size(32)  # tokens that are published at once: each time has a cost

    def start(self) -> Library:
        """Return an empty library."""
        return Library()

    def began(
        self, state: Library, sample_id: SampleId, scope: Key, prompt: int
    ) -> Library:
        """Add a sample, whose first `prompt` tokens must not be published to others."""
        sample = SampleText(
            scope, Texts(self.min_match, self.max_sample_tokens).with_new_text(), prompt
        )
        return evolve(state, samples=state.samples.set(sample_id, sample))

    def grew(
        self, state: Library, sample_id: SampleId, tokens: tuple[int, ...]
    ) -> Library:
        """Add more tokens of a sample."""
        sample = state.samples.get(sample_id)
        if sample is None or not tokens:
            return state
        texts = sample.texts.extended(0, tokens)
        if texts is sample.texts:  # it is full: its last tokens are not in it any more
            return self.ended(state, sample_id)
        unpublished = (
            sample.unpublished + tokens[sample.num_private :]
            if self.max_scope_tokens
            else ()
        )
        num_private = max(0, sample.num_private - len(tokens))
        sample = SampleText(sample.scope, texts, num_private, sample.number, unpublished)
        if len(unpublished) >= self.batch:
            state, sample = self._publish(state, sample)
        return evolve(state, samples=state.samples.set(sample_id, sample))

    def ended(self, state: Library, sample_id: SampleId) -> Library:
        """Remove a sample; its published output stays."""
        sample = state.samples.get(sample_id)
        if sample is None:
            return state
        if sample.unpublished:
            state, _ = self._publish(state, sample)
        return evolve(state, samples=state.samples.delete(sample_id))

    def propose(self, state: Library, sample_id: SampleId, max_drafts: int) -> Proposal:
        """Return the tokens that followed the longest match of the sample's last
        tokens.
        """
        sample = state.samples.get(sample_id)
        if sample is None or max_drafts < 1:
            return Proposal()
        last = sample.texts.last_tokens(0, self.max_match)
        # The first candidate is the end itself.
        match = sample.texts.find(last, self.candidates + 1)
        shared = state.scopes.get(sample.scope)
        other = shared.texts.find(last, self.candidates) if shared else None
        if shared and other and (match is None or other.length > match.length):
            return Proposal(shared.texts.tokens_after(other, max_drafts), other.length)
        if match is None:
            return Proposal()
        tokens = sample.texts.tokens_after(match, max_drafts)
        return Proposal(repeat_to(tokens, max_drafts), match.length)

    def _publish(self, state: Library, sample: SampleText) -> tuple[Library, SampleText]:
        """The library with the sample's unpublished output added to its scope."""
        tokens = sample.unpublished
        shared, scopes = state.scopes.get(sample.scope), state.scopes
        if shared is None:
            # Numbers that are not used yet: earlier texts of the scope may have been
            # dropped.
            clock = state.clock
            shared = ScopeTexts(
                Texts(self.min_match, self.max_scope_tokens, first=clock, next=clock)
            )
            if len(scopes) >= self.max_scopes:
                oldest = min(scopes, key=lambda key: scopes[key].last_write)
                scopes = scopes.delete(oldest)
        texts, number = shared.texts, sample.number
        if number not in texts.texts:  # new, or its text was dropped as the oldest
            number, texts = texts.next, texts.with_new_text()
            tokens = tokens[-self.max_scope_tokens :]
        shared = ScopeTexts(texts.extended(number, tokens), state.clock + 1)
        scopes = scopes.set(sample.scope, shared)
        state = evolve(state, scopes=scopes, clock=state.clock + 1)
        return state, evolve(sample, number=number, unpublished=())


def repeat_to(tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Repeat `tokens` to a length of `length`."""
    return (tokens * (-(-length // len(tokens))))[:length]
