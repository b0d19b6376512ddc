"""What drafts are worth where nothing computes: how many the host has, and which stand.

Theory. Whether a draft stands, if those before it do, is a fact about a sample and a
position, as its tokens are: it must not depend on who else runs, on how many drafts there
are, or on when they are judged, or two simulations could not be compared. So it is a coin
of its own for each position of each sample, which falls by a rate. Nothing is drawn from
a stream that others draw from.

Where a run was recorded, its facts come first (`minfer.runs.guesses_recorded`): what
became of a draft for a position, and what the host proposed behind one. Coins fall for
the rest, by what was true of the sample.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final

from attrs import field, frozen

from minfer.checks import ConfigError, number
from minfer.config import EngineConfig
from minfer.messages import Event, Executed, Propose
from minfer.sequence import SampleId
from minfer.speculate.plan_drafts import may_draft
from minfer.speculate.settings import HOST
from minfer.state import EngineState

ASSUMED: Final = 0.6  # acceptance, where nobody says
_COIN: Final = 2**64
_STANDS: Final = "stands"  # what coins are about
_PROPOSED: Final = "proposed"


@frozen
class Said:
    """What a recorded run says of the drafts of one sample."""

    rate: float  # of drafts that stood, of those all before which did
    share: float = 1.0  # of the times that the host could propose, how often it did
    right: Mapping[int, bool] = field(factory=dict)  # by position: whether a draft stood
    # By how many tokens were known: how many the host proposed; none: it had nothing.
    proposed: Mapping[int, int] = field(factory=dict)


@frozen
class Guesses:
    """Coins, and what is known better. Raises ConfigError for a rate that is none."""

    rate: float = field(default=ASSUMED, validator=number(0, of="acceptance "))
    said: Mapping[SampleId, Said] = field(factory=dict)
    asked: int = 0  # drafts that the host had at most, when that was recorded

    def __attrs_post_init__(self) -> None:
        if self.rate > 1:
            raise ConfigError(f"acceptance rate must be at most 1, not {self.rate}")

    def accepted(self, name: SampleId, position: int, count: int) -> int:
        """How many of so many drafts stand, of which the first is for `position`."""
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
        """How many tokens the host proposes behind so many that are known."""
        said = self.said.get(name)
        if said is None:
            return most
        found = said.proposed.get(known)
        if found is None:
            found = most * _falls(_PROPOSED, name, known, said.share)
        # As many as there might be then are as many as there may be now.
        return most if found and found >= self.asked else min(found, most)


def proposals(
    config: EngineConfig, state: EngineState, done: Iterable[Event], guesses: Guesses
) -> Iterator[Propose]:
    """What the host proposes behind the results of a step, if it is the one who drafts.

    Tokens mean nothing here: how many there are is all that is decided by.
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
            got |= zip(plan.gens, event.yields, strict=True)
    for i, (name, seq) in enumerate(zip(run.ids, run.seqs, strict=True)):
        new = got.get(run.gens[i], ())
        known = run.known[i] + len(new)
        stopped = not seq.request.stop_ids.isdisjoint(new)
        may = may_draft(seq.request, HOST)
        if may and new and not stopped and known <= run.last[i]:
            count = guesses.proposed(name, known, how.drafts)
            if count:
                yield Propose(*name, known, (0,) * count)


def _falls(what: str, name: SampleId, position: int, rate: float) -> bool:
    """A coin: the same for the same question, whatever else is asked."""
    question = f"{what} {position} {name[1]} {name[0]}".encode("utf-8", "surrogatepass")
    bits = int.from_bytes(blake2b(question, digest_size=8).digest(), "little")
    return bits < rate * _COIN
