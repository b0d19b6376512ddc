"""The protocol of proposers, which make drafts on the host.

A proposer is an object with five pure functions, and a state that is passed in and
returned, as a policy has (`minfer.records.policy`). It gets the tokens of each sample as
they become known, and returns tokens that may follow. Whatever it returns, outputs are
the same as without.

A draft of the host needs all tokens before it to be known: such a row does not run ahead.
A draft model proposes on the device and needs no call: for it, a plan has only the number
of drafts.

The outputs of other samples are used only within a scope: the root key of a request's KV
blocks (`Request.root`). It differs with the cache salt, so clients that do not share
cached prefixes cannot learn from timing what others got either.
"""

from typing import Any, Protocol

from attrs import frozen

from minfer.blocks.keys import Key
from minfer.records.sequence import SampleId


@frozen
class Proposal:
    """Tokens that may follow."""

    tokens: tuple[int, ...] = ()
    matched: int = 0  # how many tokens before them matched


class Proposer(Protocol):
    """The calls of the engine. Every answer must be a function of the arguments alone.

    The answers here are those of a proposer that never proposes.
    """

    def start(self) -> Any:
        """Return the first state: an immutable value."""
        return None

    def began(self, state: Any, sample_id: SampleId, scope: Key, prompt: int) -> Any:
        """Add a sample, whose first `prompt` tokens must not be published to others.

        A sample that is known already starts again.
        """
        return state

    def grew(self, state: Any, sample_id: SampleId, tokens: tuple[int, ...]) -> Any:
        """Add more tokens of a sample, in order, from its prompt's first on."""
        return state

    def ended(self, state: Any, sample_id: SampleId) -> Any:
        """Remove a sample: no drafts of it will be requested any more."""
        return state

    def propose(self, state: Any, sample_id: SampleId, max_drafts: int) -> Proposal:
        """Return at most `max_drafts` tokens that may follow the known ones."""
        return Proposal()
