"""Replay names the turn and the field in which an engine decides otherwise."""

import itertools

import attrs
import pytest
from attrs import evolve

from minfer.engine import step
from minfer.journal import replay as replays
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.journal.format import MAGIC, START_DIGEST, Head, JournalError
from minfer.journal.replay import DivergenceError, Journal, open_segments
from minfer.journal.writing import encode_journal, head_record
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Event, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition, Turn
from tests.core.journal.made import opened, record_ends, run
from tests.core.recorded import recorded


@pytest.mark.long
def test_the_first_divergent_turn_and_field_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler that lets the last, not the first, give way is found where it first
    does.
    """
    runs = (recorded(seed, 120) for seed in range(40))
    config, turns = next(run for run in runs if any(map(_admits_late, run[1])))
    journal = opened(encode_journal(config, turns))

    def other(
        config: EngineConfig, state: EngineState, events: tuple[Event, ...]
    ) -> Transition:
        turn = step(config, state, events)
        if state.next_step < 30:
            return turn
        return attrs.evolve(turn, state=attrs.evolve(turn.state, free_rows=()))

    monkeypatch.setattr(replays, "step", other)
    with pytest.raises(DivergenceError) as caught:
        list(journal.turns())
    found = caught.value.divergence
    assert found.step >= 30
    assert found.field.startswith(("plans", "reasons", "finished", "the state"))
    assert str(found.turn) in str(caught.value)
    assert journal.count <= found.turn + 1


def _admits_late(turn: Turn) -> bool:
    """Whether a sample takes a row in a turn well after the first step."""
    late = turn.before.next_step >= 30
    return late and any(isinstance(one, Admitted) for one in turn.transition.reasons)


def test_another_policy_diverges_where_it_first_matters() -> None:
    config = EngineConfig(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=8)
    urgent = Submit(Request(id="urgent", prompt=(3,), max_tokens=2, priority=-1))
    every = [Submit(Request(id=f"{i}", prompt=(i,), max_tokens=2)) for i in range(3)]
    turns = run(config, (Tick(0.0), *every, urgent))
    journal = opened(encode_journal(config, turns))
    journal.segments = (
        attrs.evolve(
            journal.segments[0],
            head=attrs.evolve(
                journal.segments[0].head, config=attrs.evolve(config, policy=Priority())
            ),
        ),
    )
    with pytest.raises(DivergenceError) as caught:
        list(journal.turns())
    found = caught.value.divergence
    assert (found.turn, found.step, found.field) == (0, 0, "reasons")
    assert found.expected[0][:2] == ["Admitted", "0"]
    assert found.found[0][:2] == ["Admitted", "urgent"]
    assert "then admitted '0', now 'urgent'" in str(caught.value)


def test_segments_follow_each_other() -> None:
    config, turns = recorded(4)
    first, second = encode_journal(config, turns[:30]), encode_journal(config, turns[25:])
    with pytest.raises(JournalError, match="does not come after"):
        Journal(open_segments({"b": second, "a": first}))
    gap = encode_journal(config, turns[33:])
    with pytest.raises(JournalError, match="begins with turn 33"):
        list(Journal(open_segments({"a": first, "c": gap})).turns())


def test_a_segment_without_a_head_is_skipped_only_at_the_end() -> None:
    config, turns = recorded(5)
    data = encode_journal(config, turns)
    assert len(open_segments({"one": data, "two": MAGIC})) == 1
    with pytest.raises(JournalError, match="two: it has no head"):
        open_segments({"one": data, "two": MAGIC, "three": data})


@pytest.mark.parametrize("cuts", [[], [4], [4, 7], [1, 2, 9]])
def test_all_turns_before_a_segment_without_a_head_are_replayed(cuts: list[int]) -> None:
    config, turns = recorded(4)
    turns = turns[:12]
    whole = encode_journal(config, turns)
    ends, digest, files = record_ends(whole), START_DIGEST, dict[str, bytes]()
    bodies = [whole[a:b] for a, b in itertools.pairwise(ends[:-2])]
    for turn in turns:
        if turn.number in (0, *cuts):
            about = Head(config=config, turn=turn.number, digest=digest)
            head = evolve(about, state=turn.before) if turn.number else about
            name = f"from {turn.number}"
            files[name] = MAGIC + head_record(head)
        files[name] += bodies[turn.number]
        record_ = compact(facts(turn.before, turn.transition))
        digest = extend_digest(digest, turn.transition, record_)
    segments = open_segments({**files, "last": MAGIC})
    assert [segment.name for segment in segments] == [*files]
    journal = Journal(segments)
    assert [turn.number for turn in journal.turns()] == [*range(12)]
    assert journal.torn == ["last: it is cut off before its first turn"]


def test_the_state_between_two_segments_is_compared() -> None:
    """The second one is of a state that the turns before do not lead to, though it goes
    on with their digest.
    """
    config, turns = recorded(4)
    whole, before = encode_journal(config, turns), START_DIGEST
    for turn in turns[:30]:
        record_ = compact(facts(turn.before, turn.transition))
        before = extend_digest(before, turn.transition, record_)
    ends = record_ends(whole)
    bodies = [whole[a:b] for a, b in itertools.pairwise(ends[:-2])]
    first = whole[: ends[30]]
    state = turns[30].before
    for other, error in (
        (state, ""),
        (evolve(state, arrivals=999), "the state (second)"),
    ):
        head = head_record(Head(config=config, turn=30, digest=before, state=other))
        second = b"".join([MAGIC, head, *bodies[30:]])
        journal = Journal(open_segments({"first": first, "second": second}))
        if not error:
            assert len([*journal.turns()]) == len(turns)
            continue
        with pytest.raises(DivergenceError) as caught:
            list(journal.turns())
        assert (caught.value.divergence.turn, caught.value.divergence.field) == (
            29,
            error,
        )


@pytest.mark.parametrize("kept", [1, 2])
def test_a_last_turn_that_is_missing_is_missed_by_what_follows_it(kept: int) -> None:
    """The digest of the last state follows it, and then the end; or that alone."""
    config, turns = recorded(4)
    whole = encode_journal(config, turns)
    ends = record_ends(whole)
    *_, before_turn, turn, digest, end = ends
    assert end == len(whole)
    followers = whole[turn:digest] if kept == 1 else whole[turn:]
    journal = opened(whole[:before_turn] + followers)
    with pytest.raises(JournalError, match=rf"after turn {len(turns) - 2} .* missing"):
        list(journal.turns())
    assert not journal.closed
