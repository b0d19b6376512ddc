"""What a recorded run says of drafts: a fold over turns, for runs that go on otherwise.

Theory. Three things are facts. What became of a draft in a step: those that stood, and
the first that did not, say so for their positions. What the host proposed, and behind how
many tokens, or that it proposed nothing there. And whether what it proposed was right,
also where no step judged it: tokens that came later are compared with it, if the journal
has tokens.

A run with another number of drafts has its steps end elsewhere, where nobody was asked.
Then a draft for a position stands if one did that was recorded for it, whatever it was
made behind; for the rest there is the rate of the sample, which begins with that of all.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from attrs import define, field

from minfer.config import EngineConfig
from minfer.messages import Propose
from minfer.runs.drafts import good_steps, judged
from minfer.runs.guesses import ASSUMED, Guesses, Said
from minfer.runs.redact import redacted_config
from minfer.sequence import SampleId
from minfer.speculate.length import judged as judging
from minfer.speculate.settings import HOST
from minfer.state import Turn

_WEIGHT: Final = 2.0  # drafts: of what is true of all, in the rate of a sample


@define
class _Sample:
    """What is known of the drafts of a sample."""

    right: dict[int, bool] = field(factory=dict)  # by position
    proposed: dict[int, int] = field(factory=dict)  # behind so many tokens
    last: Propose | None = None  # its tokens have been right so far
    tried: int = 0  # drafts all before which stood
    stood: int = 0  # of these


class Recorded:
    """The fold: `see` all turns of a run, then ask for its `guesses`."""

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
            sample.tried += judging(one.proposed, one.accepted)
            sample.stood += one.accepted
        if self.by_host:
            self._hosts(turn)

    def guesses(self, rate: float | None = None) -> Guesses:
        """What is recorded, and coins for the rest, by a `rate` for all, if one is given:
        then what is recorded of drafts that stood does not count.
        """
        total = Counter[str]()
        for one in self.samples.values():
            total += Counter(tried=one.tried, stood=one.stood)
        usual = total["stood"] / total["tried"] if total["tried"] else ASSUMED
        share = _share(self.samples.values())
        said = {
            name: Said(
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
        """How many drafts the rates are of."""
        return sum(one.tried for one in self.samples.values())

    def _of(self, name: SampleId) -> _Sample:
        return self.samples.setdefault(name, _Sample())

    def _hosts(self, turn: Turn) -> None:
        """What the host proposed, and whether that was right."""
        run = turn.before.running
        names = dict(zip(run.gens, run.ids, strict=True))
        known = dict(zip(run.gens, run.known, strict=True))
        for done in good_steps(turn.before, turn.events, turn.transition):
            for gen, tokens in zip(done.plan.gens, done.yields, strict=True):
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
    """See whether what the host proposed last was right, by tokens from a position on."""
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
    """How often the host proposed something, of the times that it might; as usual, if it
    never might.
    """
    every = [count > 0 for one in samples for count in one.proposed.values()]
    return sum(every) / len(every) if every else usual
