"""Who proposes drafts on the host: the protocol.

A proposer is an object with five pure functions, and a state that it is handed and hands
back, as a policy has (`minfer.policy`). It is told what the tokens of a sample are, as
they become known, and asked what may follow. Whatever it says, outputs are as without.

A draft that is said by the host needs all tokens before it known: such a row runs ahead
zero. A draft model proposes on the device, where it needs not be asked: of it, a plan
says only how many drafts there are.

What others wrote is heeded only within a scope: the key from which the KV blocks of a
request's prompt are named (`Request.root`). It differs wherever the cache salt does, so
whoever may not share a cached prefix cannot tell by speed what others were told either.
"""

from typing import Any, Protocol

from attrs import frozen

from minfer.keys import Key
from minfer.sequence import SampleId


@frozen
class Proposal:
    """Tokens that may follow."""

    tokens: tuple[int, ...] = ()
    matched: int = 0  # tokens before them that were the same where they were found


class Proposer(Protocol):
    """What is told and asked. Every answer must be a function of the arguments alone.

    The answers here are those of one that never proposes.
    """

    def start(self) -> Any:
        """Return the first state: an immutable value."""
        return None

    def began(self, state: Any, who: SampleId, scope: Key, prompt: int) -> Any:
        """Learn of a sample, the first `prompt` of whose tokens others must not be shown.

        A sample that is known already begins anew.
        """
        return state

    def grew(self, state: Any, who: SampleId, tokens: tuple[int, ...]) -> Any:
        """Learn of more tokens of a sample, in order, from its prompt's first on."""
        return state

    def ended(self, state: Any, who: SampleId) -> Any:
        """Learn that a sample will not be asked about any more."""
        return state

    def propose(self, state: Any, who: SampleId, most: int) -> Proposal:
        """Say what may follow what is known of a sample: at most so many tokens."""
        return Proposal()
