"""The state of speculation in the engine: proposals, and recent acceptance."""

from collections.abc import Iterable
from typing import Final

from attrs import frozen

from minfer.records.acceptance import Acceptance, Learning
from minfer.records.sequence import SampleId
from minfer.values.pmap import Map
from minfer.values.record import evolve


@frozen
class Proposed:
    """Tokens that may follow the first `known` tokens of a sample."""

    known: int
    tokens: tuple[int, ...]


@frozen
class SampleAcceptance:
    """A record of acceptance, as it was after a step."""

    record: Acceptance = Acceptance()
    step: int = -1

    def by(self, learning: Learning, step: int) -> Acceptance:
        """The record before another step, if there were no drafts in those between."""
        return self.record.rested(learning, max(0, step - self.step - 1))


@frozen
class Drafting:
    """The state of speculation. Samples without drafts are in none of the maps."""

    proposals: Map[SampleId, Proposed] = Map()  # not used yet
    learnt: Map[SampleId, SampleAcceptance] = Map()
    overall: SampleAcceptance = SampleAcceptance()  # of all samples together

    def likelihoods(
        self, learning: Learning, names: Iterable[SampleId], step: int
    ) -> list[float]:
        """The probability that the next draft of each sample is accepted in a step."""
        assumed = self.overall.by(learning, step).likelihood(learning, learning.assumed)
        likelihoods = list[float]()
        for acceptance in map(self.learnt.get, names):
            if acceptance is None:
                likelihoods.append(assumed)
            else:
                fade = learning.rested ** max(0, step - acceptance.step - 1)
                likelihoods.append(acceptance.record.likelihood(learning, assumed, fade))
        return likelihoods

    def without(self, name: SampleId) -> "Drafting":
        """The state without an ended sample."""
        proposals, learnt = self.proposals, self.learnt
        if name in proposals:
            proposals = proposals.delete(name)
        if name in learnt:
            learnt = learnt.delete(name)
        if proposals is self.proposals and learnt is self.learnt:
            return self
        return evolve(self, proposals=proposals, learnt=learnt)


NOTHING_DRAFTED: Final = Drafting()
