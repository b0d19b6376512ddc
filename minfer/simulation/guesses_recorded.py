"""Recorded facts about drafts: a fold over turns, for forks of a run.

Theory. There are three kinds of facts. The acceptance of a step's drafts: accepted ones,
and the first rejected one, are facts of their positions. The host's proposals: how many,
and after how many known tokens, or that it made none there. And whether its proposals
were right, even if no step verified them: later tokens are compared with them, if the
journal has tokens.

In a run with another number of drafts, steps end at other positions, without recorded
proposals. Then a draft for a position is accepted if one recorded for it was, after
whatever tokens; for the rest there is the rate of the sample, with the rate of all as its
prior.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from attrs import define, field

from minfer.analysis.drafts import good_steps, judged
from minfer.journal.redact import redacted_config
from minfer.records.acceptance import counted_drafts
from minfer.records.config import EngineConfig
from minfer.records.messages import Propose
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import Turn
from minfer.simulation.guesses import ASSUMED, Acceptances, Guesses

_WEIGHT: Final = 2.0  # drafts: weight of the rate of all in the rate of a sample


@define
class _Sample:
    """The facts about the drafts of a sample."""

    right: dict[int, bool] = field(factory=dict)  # by position
    proposed: dict[int, int] = field(factory=dict)  # after so many tokens
    last: Propose | None = None  # its tokens have been right so far
    tried: int = 0  # drafts whose predecessors were all accepted
    stood: int = 0  # accepted ones of these


class Recorded:
    """The fold: `see` all turns of a run, then get its `guesses`."""

    def __init__(self, config: EngineConfig) -> None:
        how = config.speculation
        self.by_host = how is not None and how.drafter == HOST
        self.asked = 0 if how is None else how.drafts
        self.spoken = config != redacted_config(config)  # it has token ids
        self.samples: dict[SampleId, _Sample] = {}

    def see(self, turn: Turn) -> None:
        """Fold a turn."""
        for one in judged(turn.before, turn.events, turn.transition):
            sample = self._of((one.id, one.sample))
            sample.right |= {one.known + k: True for k in range(one.accepted)}
            if one.accepted < one.proposed:
                sample.right[one.known + one.accepted] = False
            sample.tried += counted_drafts(one.proposed, one.accepted)
            sample.stood += one.accepted
        if self.by_host:
            self._hosts(turn)

    def guesses(self, rate: float | None = None) -> Guesses:
        """The recorded facts, and coins for the rest, by a `rate` for all, if one is
        given: then recorded acceptance does not count.
        """
        total = Counter[str]()
        for one in self.samples.values():
            total += Counter(tried=one.tried, stood=one.stood)
        usual = total["stood"] / total["tried"] if total["tried"] else ASSUMED
        share = _share(self.samples.values())
        said = {
            name: Acceptances(
                (one.stood + _WEIGHT * usual) / (one.tried + _WEIGHT)
                if rate is None
                else rate,
                _share([one], share),
                one.right if rate is None else {},
                one.proposed,
            )
            for name, one in self.samples.items()
        }
        return Guesses(usual if rate is None else rate, said, self.asked)

    @property
    def judged(self) -> int:
        """How many drafts the rates are based on."""
        return sum(one.tried for one in self.samples.values())

    def _of(self, name: SampleId) -> _Sample:
        return self.samples.setdefault(name, _Sample())

    def _hosts(self, turn: Turn) -> None:
        """Record the host's proposals, and whether they were right."""
        run = turn.before.running
        names = dict(zip(run.run_ids, run.ids, strict=True))
        known = dict(zip(run.run_ids, run.known, strict=True))
        for done in good_steps(turn.before, turn.events, turn.transition):
            for gen, tokens in zip(done.plan.run_ids, done.yields, strict=True):
                if gen in names and tokens:
                    sample = self._of(names[gen])
                    if self.spoken:
                        _compare(sample, known[gen], tokens)
                    known[gen] += len(tokens)
                    sample.proposed.setdefault(known[gen], 0)
        for event in turn.events:
            if isinstance(event, Propose):
                sample = self._of((event.id, event.sample))
                sample.proposed[event.known] = len(event.tokens)
                sample.last = event


def _compare(sample: _Sample, position: int, tokens: Iterable[int]) -> None:
    """Compare the host's last proposal with tokens from a position on."""
    for at, token in enumerate(tokens, position):
        last = sample.last
        if last is None:
            return
        place = at - last.known
        if not 0 <= place < len(last.tokens):
            sample.last = None if place >= 0 else last
            continue
        right = last.tokens[place] == token
        sample.right.setdefault(at, right)
        if not right:
            sample.last = None


def _share(samples: Iterable[_Sample], usual: float = 1.0) -> float:
    """How often the host proposed, of the possible times; `usual` if there were none."""
    every = [count > 0 for one in samples for count in one.proposed.values()]
    return sum(every) / len(every) if every else usual
