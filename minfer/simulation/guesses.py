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

ASSUMED: Final = 0.6  # acceptance by default
_COIN: Final = 2**64
_STANDS: Final = "stands"  # subjects of coins
_PROPOSED: Final = "proposed"


@frozen
class Acceptances:
    """The recorded facts about the drafts of one sample."""

    rate: float  # accepted drafts over drafts whose predecessors were all accepted
    share: float = 1.0  # share of the possible times at which the host proposed
    # by position: whether a draft was accepted
    right: Mapping[int, bool] = field(factory=dict)
    # By number of known tokens: how many drafts the host proposed; 0: none.
    proposed: Mapping[int, int] = field(factory=dict)


@frozen
class Guesses:
    """Coins, and recorded facts. Raises ConfigError for an invalid rate."""

    rate: float = field(default=ASSUMED, validator=number(0, prefix="acceptance "))
    said: Mapping[SampleId, Acceptances] = field(factory=dict)
    asked: int = 0  # the limit of the host's drafts when they were recorded

    def __attrs_post_init__(self) -> None:
        if self.rate > 1:
            raise ConfigError(f"acceptance rate must be at most 1, not {self.rate}")

    def accepted(self, name: SampleId, position: int, count: int) -> int:
        """How many of `count` drafts are accepted, of which the first is for
        `position`.
        """
        said = self.said.get(name)
        right: Mapping[int, bool] = {} if said is None else said.right
        rate = self.rate if said is None else said.rate
        for k in range(count):
            stands = right.get(position + k)
            if stands is None:
                stands = _falls(_STANDS, name, position + k, rate)
            if not stands:
                return k
        return count

    def proposed(self, name: SampleId, known: int, most: int) -> int:
        """How many tokens the host proposes after `known` ones."""
        said = self.said.get(name)
        if said is None:
            return most
        found = said.proposed.get(known)
        if found is None:
            found = most * _falls(_PROPOSED, name, known, said.share)
        # A number at the limit of then becomes the limit of now.
        return most if found and found >= self.asked else min(found, most)


def proposals(
    config: EngineConfig, state: EngineState, done: Iterable[Event], guesses: Guesses
) -> Iterator[Propose]:
    """The host's proposals after the results of a step, if the host drafts.

    The tokens have no meaning: only their number matters for decisions.
    """
    how = config.speculation
    if how is None or how.drafter != HOST or not state.inflight:
        return
    run, plan = state.running, state.inflight[0]
    if 0 < how.rows < len(run):
        return
    got = dict[int, tuple[int, ...]]()
    for event in done:
        if isinstance(event, Executed):
            got |= zip(plan.run_ids, event.yields, strict=True)
    for i, (name, seq) in enumerate(zip(run.ids, run.seqs, strict=True)):
        new = got.get(run.run_ids[i], ())
        known = run.known[i] + len(new)
        stopped = not seq.request.stop_ids.isdisjoint(new)
        may = may_draft(seq.request, HOST)
        if may and new and not stopped and known <= run.last_index[i]:
            count = guesses.proposed(name, known, how.drafts)
            if count:
                yield Propose(*name, known, (0,) * count)


def _falls(what: str, name: SampleId, position: int, rate: float) -> bool:
    """A coin: the same for the same arguments, whatever else is computed."""
    question = f"{what} {position} {name[1]} {name[0]}".encode("utf-8", "surrogatepass")
    bits = int.from_bytes(blake2b(question, digest_size=8).digest(), "little")
    return bits < rate * _COIN
