"""What the host proposes is kept for one step, as long as it can be true."""

from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.journal.codec import dump, load
from minfer.journal.projection import state_digest
from minfer.journal.redact import redacted, redacted_config
from minfer.journal.redact_state import redacted_state
from minfer.records.drafting import Proposed
from minfer.records.messages import Cancel, Finish, Ignored, Preempted, Propose, Submit
from minfer.records.speculation import MOST_DRAFTS
from minfer.records.state import initial
from minfer.simulation.fork import Change, fork
from minfer.speculate.proposing import keep_proposals
from minfer.values.checks import LARGEST_TOKEN, ParameterError
from tests.core.journal.reported import opened
from tests.core.lifecycle.test_pausing import COST
from tests.core.speculate.drafted import (
    BOTH,
    FLAT,
    HOSTED,
    ON_DEVICE,
    ROOMY,
    SOLO,
    Drafted,
    begun,
    nothing,
    right,
    speculating,
    wrong,
)
from tests.core.test_engine import VOCAB, ask


def quiet(config: Any = SOLO, **more: Any) -> Drafted:
    """A sample that decodes, with nothing in flight, and nothing proposed."""
    bench = begun(HOSTED, ask("a", max_tokens=20, **more), guess=nothing, config=config)
    bench.turn()
    return bench


@pytest.mark.parametrize(
    ("known", "tokens", "param"),
    [
        ("7", (1,), "known"),
        (True, (1,), "known"),
        (7, [1], "tokens"),
        (7, (1.0,), "tokens"),
        (7, (-1,), "tokens"),
        (7, (LARGEST_TOKEN + 1,), "tokens"),
        (7, (1,) * (MOST_DRAFTS + 1), "tokens"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_made(
    known: Any, tokens: Any, param: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        Propose("a", 0, known, tokens)
    assert caught.value.param == param
    Propose("a", 0, 7, (LARGEST_TOKEN,) * MOST_DRAFTS)


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (Propose("unknown", 0, 7, (1,)), "sample 0 of 'unknown': it does not run"),
        (Propose("a", 1, 7, (1,)), "sample 1 of 'a': it does not run"),
        (Propose("late", 0, 7, (1,)), "sample 0 of 'late': it does not run"),
        (Propose("a", 0, 7, ()), "sample 0 of 'a': no token is proposed"),
        (Propose("a", 0, 7, (1, VOCAB)), "'a': a token id is not in the vocabulary"),
    ],
)
def test_of_what_nothing_can_become_is_ignored(proposal: Propose, why: str) -> None:
    bench = quiet(evolve(SOLO, max_num_seqs=1))
    bench.give(Submit(ask("late")))
    turn = keep_proposals(bench.config, bench.state, [proposal])
    assert turn.state is bench.state, "nothing has changed"
    (reported,) = turn.reasons
    assert isinstance(reported, Ignored)
    assert reported.event == "propose"
    assert reported.detail.endswith(why)


@pytest.mark.parametrize("how", [None, ON_DEVICE])
def test_where_the_host_drafts_nothing_it_is_ignored(how: Any) -> None:
    bench = quiet()
    config = speculating(how, SOLO)
    turn = keep_proposals(config, bench.state, [Propose("a", 0, 7, (1,))])
    (reported,) = turn.reasons
    assert isinstance(reported, Ignored)
    assert reported.detail.endswith("the host drafts nothing here")
    assert turn.state is bench.state


def test_the_largest_token_there_is_may_be_proposed() -> None:
    bench = quiet()
    turn = keep_proposals(bench.config, bench.state, [Propose("a", 0, 7, (0, 49))])
    assert not turn.reasons
    assert dict(turn.state.drafting.proposals) == {("a", 0): Proposed(7, (0, 49))}


def test_the_last_word_counts_and_others_are_kept() -> None:
    bench = begun(HOSTED, ask("a", n=2), guess=nothing, turns=2)
    proposed = [
        Propose("a", 0, 7, (1,)),
        Propose("a", 1, 7, (2,)),
        Propose("a", 0, 8, (3,)),
    ]
    state = keep_proposals(bench.config, bench.state, proposed[:1]).state
    after = keep_proposals(bench.config, state, proposed[1:]).state
    assert dict(after.drafting.proposals) == {
        ("a", 0): Proposed(8, (3,)),
        ("a", 1): Proposed(7, (2,)),
    }


def test_the_next_step_uses_it_and_no_other_does() -> None:
    bench = quiet()
    bench.guess = right
    bench.turn()
    (drafts,) = (one.tokens for one in bench.plans[-1].drafts)
    assert drafts == bench.right(ask("a", max_tokens=20))[2:6]
    assert not bench.state.drafting.proposals
    bench.guess = nothing
    bench.turn()
    assert not bench.plans[-1].drafts


@pytest.mark.parametrize("off", [-1, 1])
def test_what_was_proposed_behind_other_tokens_is_forgotten(off: int) -> None:
    bench = quiet()
    known = bench.state.running.known[0]
    bench.turn(Propose("a", 0, known + 1 + off, (1, 2)))
    assert not bench.plans[-1].drafts
    assert not bench.state.drafting.proposals, "the step has been planned without it"


def test_while_nothing_is_planned_it_is_kept() -> None:
    bench = quiet()
    known = bench.state.running.known[0] + 1
    bench.give(Propose("a", 0, known, (1, 2)))
    assert bench.state.inflight
    assert dict(bench.state.drafting.proposals) == {("a", 0): Proposed(known, (1, 2))}
    bench.turn()
    (draft,) = bench.plans[-1].drafts
    assert draft.tokens == (1, 2)


@pytest.mark.parametrize("end", [Cancel("a"), Finish("a", 0, 1)])
def test_of_who_has_ended_nothing_is_kept(end: Any) -> None:
    how = evolve(HOSTED, adaptive=True, costs=FLAT)
    bench = begun(how, ask("a", max_tokens=30), ask("bb", max_tokens=30), turns=5)
    bench.give(Propose("a", 0, 99, (1,)), Propose("bb", 0, 99, (1,)))
    assert set(bench.state.drafting.proposals) == {("a", 0), ("bb", 0)}
    assert set(bench.state.drafting.learnt) == {("a", 0), ("bb", 0)}
    overall = bench.state.drafting.overall
    bench.give(end)
    assert set(bench.state.drafting.proposals) == {("bb", 0)}
    assert set(bench.state.drafting.learnt) == {("bb", 0)}
    assert bench.state.drafting.overall == overall
    bench.drain()
    assert not bench.state.drafting.proposals
    assert not bench.state.drafting.learnt


def test_in_the_turn_of_its_last_token_it_is_too_late() -> None:
    bench = begun(HOSTED, ask("a", max_tokens=2))
    while bench.state.requests:
        turn = bench.turn(Propose("a", 0, 8, (1,)))
    assert isinstance(turn.reasons[-1], Ignored)
    assert not bench.state.drafting.proposals


def test_who_gives_way_comes_back_with_its_record() -> None:
    config = evolve(ROOMY, num_blocks=9)
    wishes = [ask("a", 9, 24), ask("bb", 9, 24)]
    how = evolve(HOSTED, adaptive=True, costs=FLAT)
    bench = begun(how, *wishes, config=config)
    while not bench.reasons_of(Preempted):
        bench.turn()
    gone = bench.reasons_of(Preempted)[0].id, 0
    assert gone in bench.state.drafting.learnt
    turn = bench.give(Propose(*gone, 20, (1,)))
    assert [type(one) for one in turn.reasons] == [Ignored], "it waits"
    bench.drain()
    for wish in wishes:
        assert bench.out[wish.id, 0] == bench.right(wish)


# --- what is kept of it -----------------------------------------------------------------


def recorded(how: Any, guess: Any = right) -> Drafted:
    wishes = [ask("a", 9, 20), ask("bb", 5, 30, n=2), ask("ccc", 30, 9)]
    bench = begun(how, *wishes, guess=guess, config=evolve(ROOMY, num_blocks=24), turns=3)
    bench.give(bench.oracle.fail("boom", halfway=True))
    bench.turn(Cancel("ccc"))
    bench.drain()
    assert any(plan.drafts for plan in bench.plans)
    return bench


def mixed(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
    """Half right."""
    return (right if known % 2 else wrong)(whole, known)


@pytest.mark.long
@BOTH
def test_a_journal_keeps_it_and_replays(how: Any) -> None:
    bench = recorded(how, mixed)
    turns = [*opened(bench.config, bench.turns).turns()]
    assert [turn.events for turn in turns] == [turn.events for turn in bench.turns]
    for again, was in zip(turns, bench.turns, strict=True):
        assert again.transition.state == was.transition.state
        assert state_digest(again.transition.state) == state_digest(was.transition.state)


@BOTH
def test_a_redacted_run_decides_the_same(how: Any) -> None:
    bench = recorded(how, mixed)
    config = redacted_config(bench.config)
    state = initial(config)
    for turn in bench.turns:
        redacted_events = redacted(bench.config, turn.before, turn.events, b"secret")
        for event in redacted_events:
            if isinstance(event, Propose):
                assert not any(event.tokens), "no token is told"
        state = step(config, state, redacted_events).state
        hidden = redacted_state(bench.config, turn.transition.state, b"secret")
        assert state.drafting == hidden.drafting
        assert state.running.known == hidden.running.known
        counts = [plan.num_scheduled_tokens for plan in turn.transition.state.inflight]
        assert [plan.num_scheduled_tokens for plan in state.inflight] == counts
        assert state_digest(state) == state_digest(hidden)


def test_a_redacted_proposal_that_is_ignored_still_is() -> None:
    bench = quiet()
    for tokens in ((1, VOCAB), (VOCAB, 1), (), (3, 4)):
        proposed = Propose("a", 0, 8, tokens)
        (reported,) = redacted(bench.config, bench.state, (proposed,), b"secret")
        assert isinstance(reported, Propose)
        assert len(reported.tokens) == len(tokens)
        for event in (proposed, reported):
            turn = keep_proposals(bench.config, bench.state, [event])
            assert bool(turn.reasons) == (tokens != (3, 4))


def test_snapshots_and_digests_know_it() -> None:
    how = evolve(HOSTED, adaptive=True, costs=FLAT)
    bench = begun(how, ask("a", max_tokens=30), turns=5)
    before = bench.state
    after = keep_proposals(bench.config, before, [Propose("a", 0, 9, (1, 2))]).state
    assert load(dump(after)) == after
    assert load(dump(before)) == before
    assert state_digest(after) != state_digest(before)
    forgotten = evolve(before, drafting=before.drafting.without(("a", 0)))
    assert state_digest(forgotten) != state_digest(before)


def test_in_a_fork_the_device_goes_on_drafting() -> None:
    bench = recorded(ON_DEVICE)
    turns = [*fork(opened(bench.config, bench.turns), 6, Change(), COST).turns]
    assert not turns[-1].transition.state.requests
