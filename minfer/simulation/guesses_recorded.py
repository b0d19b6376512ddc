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

from collections.abc import Iterable
from typing import Final

from attrs import define, field

from minfer.analysis.drafts import sample_drafts, valid_steps
from minfer.journal.redact import redacted_config
from minfer.records.acceptance import counted_drafts
from minfer.records.config import EngineConfig
from minfer.records.messages import Propose
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import Turn
from minfer.simulation.guesses import DEFAULT_RATE, DraftFacts, Guesses

_PRIOR_DRAFTS: Final = 2.0  # drafts: weight of the rate of all in the rate of a sample


@define
class _SampleFacts:
    """The facts about the drafts of a sample."""

    accepted: dict[int, bool] = field(factory=dict)  # by position
    proposed: dict[int, int] = field(factory=dict)  # by number of known tokens
    last: Propose | None = None  # its tokens have been right so far
    num_tried: int = 0  # drafts whose predecessors were all accepted
    num_accepted: int = 0  # accepted ones of these


class RecordedDrafts:
    """The fold: `add_turn` for each turn of a run, then get its `guesses`."""

    def __init__(self, config: EngineConfig) -> None:
        spec_config = config.speculation
        self.by_host = spec_config is not None and spec_config.drafter == HOST
        self.max_drafts = 0 if spec_config is None else spec_config.drafts
        self.has_token_ids = config != redacted_config(config)
        self.samples: dict[SampleId, _SampleFacts] = {}

    def add_turn(self, turn: Turn) -> None:
        """Fold a turn."""
        for drafts in sample_drafts(turn.before, turn.events, turn.transition):
            sample = self._of((drafts.id, drafts.sample))
            sample.accepted |= {drafts.known + k: True for k in range(drafts.accepted)}
            if drafts.accepted < drafts.proposed:
                sample.accepted[drafts.known + drafts.accepted] = False
            sample.num_tried += counted_drafts(drafts.proposed, drafts.accepted)
            sample.num_accepted += drafts.accepted
        if self.by_host:
            self._add_proposals(turn)

    def guesses(self, rate: float | None = None) -> Guesses:
        """The recorded facts, and coins for the rest, by a `rate` for all, if one is
        given: then recorded acceptance does not count.
        """
        num_tried = self.num_tried
        num_accepted = sum(sample.num_accepted for sample in self.samples.values())
        overall_rate = num_accepted / num_tried if num_tried else DEFAULT_RATE
        share = _share(self.samples.values())
        facts = {
            name: DraftFacts(
                (sample.num_accepted + _PRIOR_DRAFTS * overall_rate)
                / (sample.num_tried + _PRIOR_DRAFTS)
                if rate is None
                else rate,
                _share([sample], share),
                sample.accepted if rate is None else {},
                sample.proposed,
            )
            for name, sample in self.samples.items()
        }
        return Guesses(overall_rate if rate is None else rate, facts, self.max_drafts)

    @property
    def num_tried(self) -> int:
        """The number of drafts that the rates are based on."""
        return sum(sample.num_tried for sample in self.samples.values())

    def _of(self, name: SampleId) -> _SampleFacts:
        return self.samples.setdefault(name, _SampleFacts())

    def _add_proposals(self, turn: Turn) -> None:
        """Record the host's proposals, and whether they were right."""
        run = turn.before.running
        names = dict(zip(run.run_ids, run.ids, strict=True))
        num_known = dict(zip(run.run_ids, run.known, strict=True))
        for step in valid_steps(turn.before, turn.events, turn.transition):
            for run_id, tokens in zip(step.plan.run_ids, step.yields, strict=True):
                if run_id in names and tokens:
                    sample = self._of(names[run_id])
                    if self.has_token_ids:
                        _compare(sample, num_known[run_id], tokens)
                    num_known[run_id] += len(tokens)
                    sample.proposed.setdefault(num_known[run_id], 0)
        for event in turn.events:
            if isinstance(event, Propose):
                sample = self._of((event.id, event.sample))
                sample.proposed[event.known] = len(event.tokens)
                sample.last = event


def _compare(sample: _SampleFacts, first_position: int, tokens: Iterable[int]) -> None:
    """Compare the host's last proposal with tokens from a position on."""
    for position, token in enumerate(tokens, first_position):
        last = sample.last
        if last is None:
            return
        index = position - last.known
        if not 0 <= index < len(last.tokens):
            sample.last = None if index >= 0 else last
            continue
        is_accepted = last.tokens[index] == token
        sample.accepted.setdefault(position, is_accepted)
        if not is_accepted:
            sample.last = None


def _share(samples: Iterable[_SampleFacts], usual: float = 1.0) -> float:
    """How often the host proposed, of the possible times; `usual` if there were none."""
    proposed = [count > 0 for sample in samples for count in sample.proposed.values()]
    return sum(proposed) / len(proposed) if proposed else usual
