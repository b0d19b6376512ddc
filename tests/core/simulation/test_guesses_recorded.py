"""What became of drafts, and what the host proposed, is read off a run."""

import pytest

from minfer.analysis.drafts import sample_drafts
from minfer.journal.redact import redacted, redacted_config
from minfer.records.state import Turn
from minfer.simulation.guesses import DEFAULT_RATE, Guesses
from minfer.simulation.guesses_recorded import RecordedDrafts
from tests.core.journal.made import run as made
from tests.core.simulation.clocked import Run
from tests.core.simulation.drafted import by_device, by_host, drafting


def of(run: Run) -> RecordedDrafts:
    found = RecordedDrafts(run.config)
    for turn in run.turns:
        found.add_turn(turn)
    return found


@pytest.mark.parametrize("run", [by_device(), by_device(depth=2), by_host()])
def test_every_draft_that_was_judged_falls_as_it_did(run: Run) -> None:
    found = of(run)
    guesses, count = found.guesses(), 0
    for turn in run.turns:
        for one in sample_drafts(turn.before, turn.events, turn.transition):
            name = one.id, one.sample
            assert guesses.accepted(name, one.known, one.proposed) == one.accepted
            # Behind drafts that all stood comes the target's own token.
            if one.accepted == one.proposed and not found.by_host:
                assert one.known + one.accepted not in guesses.facts[name].accepted
            count += 1
    assert count > 5


def test_what_the_host_proposed_is_compared_with_what_came() -> None:
    """Of "a", whose every third token it had wrong, at any place."""
    guesses = of(by_host()).guesses()
    right = guesses.facts["a", 0].accepted
    assert {at % 3 == 0 for at, one in right.items() if not one} == {True}
    assert {at % 3 == 0 for at, one in right.items() if one} == {False}
    assert [guesses.proposed(("c", 0), known, 3) for known in range(5, 20)] == [0] * 15
    assert guesses.facts["a", 0].proposed[6] == 3
    assert guesses.proposed(("a", 0), 6, 2) == 2
    assert guesses.proposed(("a", 0), 6, 5) == 5


def test_the_rate_of_a_sample_begins_with_that_of_all() -> None:
    found = of(by_device())
    guesses = found.guesses()
    some = found.samples["a", 0]
    assert 0.5 < guesses.rate < 1
    assert guesses.facts["a", 0].rate == (some.num_accepted + 2 * guesses.rate) / (
        some.num_tried + 2
    )
    assert found.num_tried == sum(one.num_tried for one in found.samples.values())


def test_a_rate_that_is_given_is_that_of_all() -> None:
    guesses = of(by_device()).guesses(0.0)
    assert guesses.accepted(("a", 0), 6, 3) == 0
    assert (guesses.rate, guesses.facts["a", 0].accepted) == (0.0, {})


def test_a_run_without_drafts_says_nothing() -> None:
    assert RecordedDrafts(drafting()).guesses() == Guesses(DEFAULT_RATE, recorded_limit=3)


def test_without_token_ids_what_was_judged_is_known() -> None:
    run = by_host()
    config = redacted_config(run.config)
    reported = [redacted(run.config, t.before, t.events, b"secret") for t in run.turns]
    turns: list[Turn] = made(config, *reported)
    whole, blind = of(run), RecordedDrafts(config)
    for turn in turns:
        blind.add_turn(turn)
    mine, seen = blind.samples["a", 0], whole.samples["a", 0]
    assert mine.accepted.items() <= seen.accepted.items()
    assert mine.accepted
    assert mine.proposed == seen.proposed
