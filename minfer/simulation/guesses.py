"""Guesses of drafts in runs that compute no tokens: how many the host proposes, and which
are accepted.

Theory. Whether a draft is accepted, if those before it are, is a fact about a sample and
a position, as its tokens are: it must not depend on other samples, on the number of
drafts, or on the time of verification, or two simulations could not be compared. So each
position of each sample has its own coin, with a given rate. No coin is taken from a
stream that others share.

In a recorded run the recorded facts come first (`minfer.simulation.guesses_recorded`):
whether a draft for a position was accepted, and what the host proposed after one. Coins
decide the rest, by the rates of the sample.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final

from attrs import field, frozen

from minfer.planning.plan_drafts import may_draft
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Executed, Propose
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import EngineState
from minfer.values.checks import ConfigError, number

DEFAULT_RATE: Final = 0.6  # acceptance by default
_COIN_RANGE: Final = 2**64
_ACCEPTED: Final = "stands"  # subjects of coins
_PROPOSED: Final = "proposed"


@frozen
class DraftFacts:
    """The recorded facts about the drafts of one sample."""

    rate: float  # accepted drafts over drafts whose predecessors were all accepted
    share: float = 1.0  # share of the possible times at which the host proposed
    # by position: whether a draft was accepted
    accepted: Mapping[int, bool] = field(factory=dict)
    # By number of known tokens: how many drafts the host proposed; 0: none.
    proposed: Mapping[int, int] = field(factory=dict)


@frozen
class Guesses:
    """Coins, and recorded facts. Raises ConfigError for an invalid rate."""

    rate: float = field(default=DEFAULT_RATE, validator=number(0, prefix="acceptance "))
    facts: Mapping[SampleId, DraftFacts] = field(factory=dict)
    recorded_limit: int = 0  # the limit of the host's drafts when they were recorded

    def __attrs_post_init__(self) -> None:
        if self.rate > 1:
            raise ConfigError(f"acceptance rate must be at most 1, not {self.rate}")

    def accepted(self, name: SampleId, position: int, count: int) -> int:
        """The number of accepted drafts, of `count` drafts of which the first is for
        `position`.
        """
        facts = self.facts.get(name)
        accepted: Mapping[int, bool] = {} if facts is None else facts.accepted
        rate = self.rate if facts is None else facts.rate
        for k in range(count):
            is_accepted = accepted.get(position + k)
            if is_accepted is None:
                is_accepted = _coin(_ACCEPTED, name, position + k, rate)
            if not is_accepted:
                return k
        return count

    def proposed(self, name: SampleId, num_known: int, max_drafts: int) -> int:
        """The number of tokens that the host proposes after `num_known` ones."""
        facts = self.facts.get(name)
        if facts is None:
            return max_drafts
        count = facts.proposed.get(num_known)
        if count is None:
            count = max_drafts * _coin(_PROPOSED, name, num_known, facts.share)
        # A number at the recorded limit becomes the present limit.
        is_at_limit = count and count >= self.recorded_limit
        return max_drafts if is_at_limit else min(count, max_drafts)


def proposals(
    config: EngineConfig, state: EngineState, results: Iterable[Event], guesses: Guesses
) -> Iterator[Propose]:
    """The host's proposals after the results of a step, if the host drafts.

    The tokens have no meaning: only their number matters for decisions.
    """
    spec_config = config.speculation
    if spec_config is None or spec_config.drafter != HOST or not state.inflight:
        return
    run, plan = state.running, state.inflight[0]
    if 0 < spec_config.rows < len(run):
        return
    new_tokens = dict[int, tuple[int, ...]]()
    for event in results:
        if isinstance(event, Executed):
            new_tokens |= zip(plan.run_ids, event.yields, strict=True)
    for i, (name, seq) in enumerate(zip(run.ids, run.seqs, strict=True)):
        tokens = new_tokens.get(run.run_ids[i], ())
        num_known = run.known[i] + len(tokens)
        stopped = not seq.request.stop_ids.isdisjoint(tokens)
        is_allowed = may_draft(seq.request, HOST)
        if is_allowed and tokens and not stopped and num_known <= run.last_index[i]:
            count = guesses.proposed(name, num_known, spec_config.drafts)
            if count:
                yield Propose(*name, num_known, (0,) * count)


def _coin(subject: str, name: SampleId, position: int, rate: float) -> bool:
    """A coin: the same for the same arguments, whatever else is computed."""
    text = f"{subject} {position} {name[1]} {name[0]}".encode("utf-8", "surrogatepass")
    bits = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    return bits < rate * _COIN_RANGE
