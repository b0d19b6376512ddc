"""Coins fall by their rate, for a sample and a position; what is recorded comes first."""

import pytest
from attrs import evolve

from minfer.records.config import EngineConfig
from minfer.records.messages import Propose, Submit
from minfer.records.request import SamplingParams
from minfer.records.speculation import DEVICE, HOST
from minfer.simulation.guesses import DraftFacts, Guesses, proposals
from minfer.values.checks import ConfigError
from tests.core.simulation.clocked import Run, request
from tests.core.simulation.drafted import drafting


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_coins_fall_by_their_rate(rate: float) -> None:
    guesses = Guesses(rate)
    fell = [guesses.accepted(("a", 0), at, 1) for at in range(4000)]
    assert sum(fell) / 4000 == pytest.approx(rate, abs=0.03)
    assert fell == [guesses.accepted(("a", 0), at, 1) for at in range(4000)]


def test_coins_of_others_are_others() -> None:
    guesses = Guesses(0.5)
    names = [("a", 0), ("a", 1), ("b", 0), ("\udc80", 0)]
    each = [tuple(guesses.accepted(name, at, 1) for at in range(40)) for name in names]
    assert len({*each}) == len(names)


def test_drafts_stand_up_to_the_first_that_does_not() -> None:
    guesses = Guesses(0.6)
    single = [guesses.accepted(("a", 0), at, 1) for at in range(60)]
    for at in range(50):
        run = [*single[at:], 0].index(0)
        assert guesses.accepted(("a", 0), at, 8) == min(run, 8)


def test_what_is_recorded_comes_first() -> None:
    emitted = DraftFacts(
        1.0, 0.0, accepted={3: False, 5: True}, proposed={4: 2, 5: 0, 6: 3}
    )
    guesses = Guesses(0.0, {("a", 0): emitted}, recorded_limit=3)
    assert [guesses.accepted(("a", 0), at, 3) for at in (1, 3, 4)] == [2, 0, 3]
    assert [guesses.proposed(("a", 0), known, 3) for known in (4, 5, 6, 7)] == [
        2,
        0,
        3,
        0,
    ]
    assert guesses.proposed(("a", 0), 4, 1) == 1
    assert guesses.proposed(("a", 0), 6, 8) == 8, "it had as many as it might"
    assert guesses.proposed(("b", 0), 6, 8) == 8


def test_a_rate_is_a_rate() -> None:
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="acceptance rate"):
            Guesses(rate)


def proposed(run: Run) -> list[Propose]:
    done = [event for event in run.turns[-1].events if hasattr(event, "yields")]
    return [*proposals(run.config, run.turns[-1].before, done, Guesses())]


def running(config: EngineConfig) -> Run:
    """ "a" decodes, "b" is read in two parts; "d" has ended."""
    run = Run(evolve(config, max_num_batched_tokens=8))
    run.turn(Submit(request("a", 2, 9)), Submit(request("d", 2, 1)))
    run.turn(Submit(request("b", 12)))
    run.turn()
    return run


def test_the_host_proposes_behind_what_came_for_who_goes_on() -> None:
    run = running(drafting(HOST))
    first = [*proposals(run.config, run.turns[1].before, run.turns[1].events, Guesses())]
    assert first == [Propose("a", 0, 3, (0, 0, 0))]
    assert proposed(run) == [Propose("a", 0, 4, (0, 0, 0))]
    assert proposed(running(drafting(DEVICE))) == []
    few = drafting(HOST)
    assert few.speculation is not None
    few = evolve(few, speculation=evolve(few.speculation, rows=1))
    assert proposed(running(few)) == []


def test_nothing_is_proposed_behind_an_end() -> None:
    every = frozenset(range(50))
    run = Run(drafting(HOST))
    params = SamplingParams()
    run.turn(Submit(request("a", 2, 9, stop_ids=every, sampling=params)))
    run.turn()
    assert proposed(run) == []
