"""What is kept of speculation, and how likely it makes a draft."""

import pytest
from attrs import evolve

from minfer.journal.codec import dump, load
from minfer.records.acceptance import Acceptance, Learning
from minfer.records.drafting import NOTHING_DRAFTED, Drafting, Proposed, SampleAcceptance
from minfer.records.sequence import SampleId
from minfer.values.pmap import Map

HOW = Learning(assumed=0.5, weight=2.0, rested=0.5)
ONE, OTHER = ("a", 0), ("b", 1)
SOME = Drafting(
    Map({ONE: Proposed(7, (1, 2))}),
    Map(
        {
            ONE: SampleAcceptance(Acceptance(8.0, 6.0), 10),
            OTHER: SampleAcceptance(Acceptance(4.0, 0.0), 10),
        }
    ),
    SampleAcceptance(Acceptance(2.0, 2.0), 10),
)


def test_a_record_fades_once_for_each_step_between() -> None:
    learnt = SampleAcceptance(Acceptance(8.0, 4.0), 10)
    assert learnt.by(HOW, 11) == learnt.record, "the next step"
    assert learnt.by(HOW, 12) == Acceptance(4.0, 2.0)
    assert learnt.by(HOW, 14) == Acceptance(1.0, 0.5)
    assert learnt.by(HOW, 10) == learnt.by(HOW, 3) == learnt.record, "never grows"


def likelihood(drafting: Drafting, name: SampleId, step: int) -> float:
    """Of one sample; beside others it is the same."""
    each = drafting.likelihoods(HOW, [("other", 9), name], step)
    assert drafting.likelihoods(HOW, [name], step) == each[1:]
    return each[1]


def test_nothing_is_known_before_the_first_step() -> None:
    assert SampleAcceptance().by(HOW, 0) == Acceptance()
    assert likelihood(NOTHING_DRAFTED, ONE, 0) == HOW.assumed


def test_who_has_no_record_is_as_all_are() -> None:
    everybody = (2.0 + 0.5 * 2.0) / (2.0 + 2.0)
    assert likelihood(SOME, ("new", 0), 11) == everybody
    assert likelihood(SOME, ("new", 0), 12) == (1.0 + 0.5 * 2.0) / (1.0 + 2.0)


def test_a_record_of_ones_own_begins_with_that_of_all() -> None:
    everybody = (2.0 + 0.5 * 2.0) / (2.0 + 2.0)
    assert likelihood(SOME, ONE, 11) == (6.0 + 2.0 * everybody) / (8.0 + 2.0)
    assert likelihood(SOME, OTHER, 11) == 2.0 * everybody / (4.0 + 2.0)
    much_later = likelihood(SOME, OTHER, 1000)
    assert much_later == pytest.approx(HOW.assumed), "given up, and tried again"


def test_who_has_ended_is_in_no_map() -> None:
    left = SOME.without(ONE)
    assert left == Drafting(Map(), Map({OTHER: SOME.learnt[OTHER]}), SOME.overall)
    assert left.without(OTHER) == Drafting(overall=SOME.overall)
    only = evolve(SOME, learnt=Map())
    assert only.without(ONE).proposals == Map()


def test_who_is_in_no_map_changes_nothing() -> None:
    assert SOME.without(("a", 1)) is SOME
    assert NOTHING_DRAFTED.without(ONE) is NOTHING_DRAFTED


def test_a_snapshot_keeps_it() -> None:
    assert load(dump(SOME)) == SOME
    assert load(dump(NOTHING_DRAFTED)) == NOTHING_DRAFTED
