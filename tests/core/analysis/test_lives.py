"""Where a sample's time goes is told by kind, turn by turn."""

import attrs
import pytest

from minfer.analysis.drafts import tally_of
from minfer.analysis.explain import explain
from minfer.analysis.lives import Life, Moment, Phase, TimeSpent, phase_of
from minfer.policies.builtin import Priority
from minfer.records.messages import (
    Admitted,
    Cancel,
    Discarded,
    Ended,
    Event,
    Finish,
    Preempted,
    Submit,
)
from tests.core.analysis.test_drafts import of
from tests.core.analysis.test_explain import seconds
from tests.core.simulation.clocked import Run, config, request
from tests.core.simulation.drafted import by_device


def test_behind_others_who_wait_for_rows() -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in "abc"))
    run.drain()
    first, second, third = (run.life(name) for name in "abc")
    assert dict(first.parts) == {
        Phase("prefill"): TimeSpent(turns=1, seconds=1.0, steps=1, tokens=3),
        Phase("decode"): TimeSpent(turns=2, seconds=2.0, steps=2, tokens=2),
    }
    assert (first.ahead, second.ahead, third.ahead) == (0, 0, 1)
    assert second.parts[Phase("line", "rows")] == TimeSpent(turns=3, seconds=3.0)
    assert third.parts[Phase("line", "rows", behind=True)] == TimeSpent(
        turns=3, seconds=3.0
    )
    assert third.parts[Phase("line", "rows")] == TimeSpent(turns=3, seconds=3.0)
    assert (third.first, third.last) == (8.0, Moment(9, 10.0))


def test_a_chunk_of_another_is_the_longest_gap() -> None:
    run = Run(config(max_num_batched_tokens=16))
    run.turn(Submit(request("a", 2, tokens=8)))
    run.turn()
    run.turn(Submit(request("b", 28)))
    run.turn(took=5.0)
    run.turn(took=3.0)
    run.drain()
    gap = run.life("a").gap
    assert gap is not None
    assert (gap.seconds, gap.since, gap.turn.number) == (5.0, 2, 3)
    (fill,) = gap.turn.before.inflight[0].fills
    assert len(fill.tokens) == 15
    other = run.life("b")
    assert other.parts[Phase("prefill")] == TimeSpent(
        turns=2, seconds=8.0, steps=2, tokens=28, others=2
    )


def test_queued_behind_a_step_that_runs() -> None:
    run = Run(config(depth=2))
    run.turn(Submit(request("a", 2, tokens=9)))
    run.turn(Submit(request("b", 2, tokens=1)))
    run.turn(took=7.0)
    run.turn(took=2.0)
    life = run.life("b")
    assert dict(life.parts) == {
        Phase("queued"): TimeSpent(turns=1, seconds=7.0),
        Phase("prefill"): TimeSpent(turns=1, seconds=2.0, steps=1, tokens=2, others=1),
    }


def test_who_arrives_while_no_step_can_be_planned_waits_for_the_step() -> None:
    run = Run(config(depth=1))
    run.turn(Submit(request("a", 2, tokens=9)))
    run.late(Submit(request("b", 2, tokens=1)))
    run.turn(took=2.0)
    run.turn()
    assert run.life("b").parts[Phase("line", "step")] == TimeSpent(turns=1, seconds=2.0)


def displaced() -> Run:
    """ "high" takes the place of "low" after its first tokens."""
    run = Run(config(num_blocks=8, policy=Priority()))
    run.turn(Submit(request("low", 8, tokens=20, priority=1)))
    run.turn()
    run.turn()
    run.turn(Submit(request("high", range(20, 45), tokens=4)))
    run.drain()
    return run


def test_preempted_for_another_and_computed_again() -> None:
    run = displaced()
    low, high = run.life("low"), run.life("high")
    ((when, gave),) = [(n, r) for n, r in low.reasons if isinstance(r, Preempted)]
    assert (gave.by, gave.known, gave.computed) == (("high", 0), 11, 10)
    assert [(n, r) for n, r in high.reasons if isinstance(r, Preempted)] == [(when, gave)]
    assert (low.preempted, high.preempted) == (1, 0)
    back = [r for n, r in low.reasons if isinstance(r, Admitted)][1]
    again = low.parts[Phase("recompute", preempted=1)]
    assert again.tokens == back.known - back.hit  # what was not cached any more, and one
    assert low.parts[Phase("line", "blocks", preempted=1)].seconds == seconds(low, "line")
    assert {where.kind for where in high.parts} == {"prefill", "decode"}


def test_what_a_request_brings_along_is_no_loss() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4, output=(7, 8))))
    run.drain()
    assert {where.kind for where in run.life("a").parts} == {"prefill", "decode"}


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_first_token_before_the_run_has_no_time(cut: int) -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=6, output=(7, 8))))
    run.drain()
    life = explain(run.config, run.turns[cut:], "a").lives[0]
    assert run.life("a").first == 2.0
    assert (life.early, life.first) == ((False, 2.0) if cut < 2 else (True, None))
    assert life.last == run.life("a").last
    first = max(1, cut)  # the turn of its arrival has no part
    assert sum(one.turns for one in life.parts.values()) == life.turn + 1 - first


def test_who_was_preempted_before_the_run_has_had_tokens() -> None:
    run = displaced()
    ((when, _),) = [
        (n, r) for n, r in run.life("low").reasons if isinstance(r, Preempted)
    ]
    (life,) = explain(run.config, run.turns[when + 1 :], "low").lives
    assert (life.early, life.first) == (True, None)
    assert run.life("low").first == 2.0


def test_a_step_that_failed_is_distinguished() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4)))
    run.turn()
    run.turn(took=5.0, fail="out of luck")
    run.drain()
    life = run.life("a")
    assert life.parts[Phase("failed")] == TimeSpent(turns=1, seconds=5.0)
    (discarded,) = [reason for _, reason in life.reasons if isinstance(reason, Discarded)]
    assert discarded.error == "out of luck"
    assert life.end is not None
    assert life.end.length == 4


def test_time_of_a_failed_step_is_taken_back_from_what_it_seemed_to_be() -> None:
    run = Run(config())
    run.turn(Submit(request("a", 6, tokens=4)))
    run.turn()
    run.late()
    run.late()
    run.turn(fail="boom")
    run.drain()
    life = run.life("a")
    assert life.parts[Phase("failed")] == TimeSpent(turns=3, seconds=3.0)
    assert seconds(life, "prefill") == 1.0


def test_what_came_before_the_failed_step_stays_as_it_was() -> None:
    run = Run(config(max_num_seqs=1, depth=2))
    run.turn(Submit(request("a", 3, tokens=2)), Submit(request("b", 3, tokens=2)))
    run.turn()  # all that a may get is planned
    run.late()
    run.late(Cancel("a"))
    assert [name for name, _ in run.state.running.ids] == ["b"]
    run.late()
    run.turn(fail="boom")
    run.drain()
    parts = run.life("b").parts
    assert parts[Phase("line", "rows")] == TimeSpent(turns=3, seconds=3.0)
    assert parts[Phase("failed")] == TimeSpent(turns=2, seconds=2.0)


def test_drafts_are_counted_and_tokens_are_those_that_came() -> None:
    run = by_device()
    life = run.life("a")
    judged = [one for turn in run.turns for one in of(turn) if one.id == "a"]
    assert life.drafts == tally_of(judged)
    assert life.drafts.rows == len(judged) > 2
    decode = life.parts[Phase("decode")]
    assert decode.tokens >= 23  # those that came, and drafts that were in vain
    assert decode.steps <= 23 - sum(life.drafts.accepted) + 1
    assert life.end is not None
    assert life.end.length == 24


def test_who_is_held_back_waits_for_its_share_and_not_behind_who_passes() -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(Submit(request("runs", 6)))
    run.turn(*(Submit(request(name, 6, client=name)) for name in "ab"))
    state = attrs.evolve(run.state, deferred_clients=frozenset("a"))
    life = Life(("a", 0), 0.0, 0, 0.0)
    assert phase_of(run.config, state, life).phase == Phase("line", "share")


@pytest.mark.parametrize("end", [Cancel("a"), Finish("a", 0, 2)])
def test_who_ends_has_no_reasons_of_the_next_one_of_its_id(end: Event) -> None:
    run = Run(config())
    run.turn(Submit(request("a", 5, tokens=9)))
    run.turn()
    run.turn(end, Submit(request("a", 5)))
    run.drain()
    number, last = run.life("a").reasons[-1]
    assert isinstance(last, Ended)
    assert number == run.life("a").turn == 2
