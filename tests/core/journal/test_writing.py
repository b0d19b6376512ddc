"""A journal gives back every turn that went in."""

import math
from typing import Any, cast

import attrs
import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.engine import step
from minfer.journal.decisions import facts
from minfer.journal.format import START_DIGEST
from minfer.journal.writing import beam_rows, encode_journal, turn_record
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Executed, Failed, Submit, Tick
from minfer.records.request import Continuation, Request
from minfer.records.state import Turn
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.beam import BeamRound
from minfer.values.checks import MAX_INT64
from tests.circles import seeds
from tests.core.journal.made import opened, run
from tests.core.recorded import recorded


@pytest.mark.parametrize("number", [0, MAX_INT64, MAX_INT64 + 1, MAX_INT64 + 9, -1, 0.5])
def test_what_is_no_number_of_a_step_comes_back_as_another_such(number: Any) -> None:
    config = EngineConfig(num_blocks=8)
    turns = run(config, (Tick(1.0), Failed(number)))
    [turn] = opened(encode_journal(config, turns)).turns()
    event = turn.events[-1]
    assert isinstance(event, Failed)
    assert event.step == (number if number in (0, MAX_INT64) else MAX_INT64 + 1)


@pytest.mark.long
@seeds(3, 40)
def test_replay_gives_every_turn_back(seeds: range) -> None:
    """Faults, cancels, preemptions, garbled and late results: all of them are events."""
    for seed in seeds:
        config, turns = recorded(seed)
        journal = opened(encode_journal(config, turns, {"why": "a test"}))
        assert list(journal.turns()) == turns
        assert journal.state == turns[-1].transition.state
        assert journal.closed
        assert journal.checked == 1
        assert not journal.torn
        assert journal.about == {"why": "a test"}
        again = opened(encode_journal(config, turns))
        list(again.turns())
        assert again.digest == journal.digest


def test_a_journal_may_begin_in_mid_run() -> None:
    config, turns = recorded(5)
    part = turns[20:]
    journal = opened(encode_journal(config, part))
    assert list(journal.turns()) == part
    assert [t.number for t in journal.turns(until=25)] == [20, 21, 22, 23, 24]
    assert journal.state == turns[25].before


@pytest.mark.parametrize(
    "yields",
    [
        ((1.5,),),
        ([3],),
        ((-1,),),
        ((2**40,),),
        (("a",),),
        (),
        ((1, 2, 3),),
        ((49,),),
        None,
        7,
        "no",
    ],
)
def test_results_that_cannot_be_are_recorded_too(yields: Any) -> None:
    config = EngineConfig(num_blocks=4, vocab_size=50)
    arrives = Submit(Request(id="a", prompt=(1, 2), max_tokens=2))
    unknown = Failed(9, "\ud800 \x00"), Executed(7, yields)
    turns = run(
        config,
        (Tick(0.0), arrives),
        (Tick(1.0), Executed(0, yields), *unknown),
        (Tick(2.0), Failed(1, "why")),
        (Tick(3.0),),
    )
    found = [
        turn.transition.state for turn in opened(encode_journal(config, turns)).turns()
    ]
    assert found == [turn.transition.state for turn in turns]


def test_results_of_another_step_are_recorded_as_such() -> None:
    config = EngineConfig(num_blocks=4, vocab_size=50)
    arrives = Submit(Request(id="a", prompt=(1, 2), max_tokens=2))
    turns = run(config, (Tick(0.0), arrives), (Tick(1.0), Executed(5, ((3,),))))
    read = list(opened(encode_journal(config, turns)).turns())
    assert [turn.events for turn in read] == [turn.events for turn in turns]


def test_as_many_tokens_of_other_rows_are_recorded_as_they_are() -> None:
    config = EngineConfig(num_blocks=8, vocab_size=50)
    both = [Submit(Request(id=one, prompt=(1, 2), max_tokens=2)) for one in "ab"]
    turns = run(config, (Tick(0.0), *both), (Tick(1.0), Executed(0, ((3, 4), ()))))
    read = list(opened(encode_journal(config, turns)).turns())
    assert [turn.events for turn in read] == [turn.events for turn in turns]


def test_what_is_no_event_replays_as_nothing() -> None:
    config = EngineConfig(num_blocks=4, vocab_size=50)
    odd: tuple[Any, ...] = (
        None,
        object(),
        [1],
        Executed(cast(int, None), ()),
        Failed(10**5000, "x"),
    )
    turns = run(config, (Tick(0.0), *odd))
    (read,) = opened(encode_journal(config, turns)).turns()
    reported = [
        (type(r).__name__, getattr(r, "event", "")) for r in read.transition.reasons
    ]
    assert reported == [
        ("Ignored", name) for name in ("event", "event", "event", "executed", "failed")
    ]


def test_keys_do_not_cross_the_border_of_a_process() -> None:
    """A wrong key would give a request another one's KV: the reader makes them from
    tokens.
    """
    config = EngineConfig(num_blocks=8, vocab_size=50, block_size=2)
    forged = Request(
        id="a", prompt=(1, 2, 3, 4, 5), max_tokens=2, keys=(b"x" * 32, b"y" * 32)
    )
    turns = run(config, (Tick(0.0), Submit(forged)))
    (turn,) = opened(encode_journal(config, turns)).turns()
    (read,) = (event.request for event in turn.events if isinstance(event, Submit))
    assert read.keys == block_keys(b"", forged.prompt, 2)


def test_turns_without_a_time_and_odd_orders_come_back() -> None:
    config = EngineConfig(num_blocks=4, vocab_size=50)
    one = Request(
        id="\ud800</script>", prompt=(1, 2), max_tokens=2, deadline=3.0, client="c"
    )
    for size in (64, 1):
        own = attrs.evolve(config, block_size=size)
        keys = block_keys(b"", (1, 2), size)
        two = attrs.evolve(one, id="b", deadline=math.inf, output=(4,), keys=keys)
        turns = run(
            own,
            (),
            (Submit(one), Tick(1.0), Tick(0.5)),
            (Cancel("b"), Executed(0, ((3,),))),
            (Tick(3.0), Submit(two), Cancel("b"), Submit(two), Executed(1, ((4,),))),
            (Tick(4.0),),
        )
        assert list(opened(encode_journal(own, turns)).turns()) == turns


def test_an_empty_run_is_a_journal() -> None:
    journal = opened(encode_journal(EngineConfig(num_blocks=4), []))
    assert list(journal.turns()) == []
    assert journal.closed


def test_a_steady_turn_costs_its_tokens() -> None:
    rows = 300
    config = EngineConfig(num_blocks=1000, max_num_seqs=rows, vocab_size=150_000)
    every = [
        Submit(Request(id=str(i), prompt=(i, 1), max_tokens=99)) for i in range(rows)
    ]
    turns = run(config, (Tick(0.0), *every))
    for number in range(6):
        plan = turns[-1].transition.state.inflight[0]
        events = (
            Tick(number + 1.0),
            Executed(plan.step, tuple((140_000,) for _ in plan.max_sampled_tokens)),
        )
        state = turns[-1].transition.state
        turns.append(Turn(len(turns), state, events, step(config, state, events)))
    record = facts(turns[-1].before, turns[-1].transition)
    assert record == {}
    assert len(turn_record(turns[-1], b"", START_DIGEST)) == 8 + 23 + 3 * rows


def test_rows_of_beams_are_those_whose_requests_are_of_a_search() -> None:
    config = EngineConfig(num_blocks=9, block_size=4, depth=1)
    beam = BeamRound(id="s", width=1, prompt=2, most=4)
    plain = Request(id="a", prompt=(1, 2), max_tokens=3)
    of_search = Request(
        id="b", prompt=(3, 4), max_tokens=1, continuation=Continuation(beam_round=beam)
    )
    (turn,) = run(config, (Submit(plain), Submit(of_search)))
    state = turn.transition.state
    assert beam_rows(state, state.inflight[0]) == [1]


BEST = TokenLogprobs(5, -0.5, 2, (6, 5), (-0.25, -0.5))


def other(**fields: Any) -> TokenLogprobs:
    return evolve(BEST, **fields)


@pytest.mark.parametrize(
    ("one", "comes_back"),
    [
        (BEST, True),
        (other(rank=MAX_INT64, likeliest=(-MAX_INT64,)), True),
        (other(logprob=-math.inf), True),
        (other(rank=MAX_INT64 + 1), False),
        (other(rank=1.0), False),
        (other(rank=True), False),
        (other(likeliest=(6, -MAX_INT64 - 1)), False),
        (other(likeliest=[6, 5]), False),
        (other(logprobs=[-0.25, -0.5]), False),
        (other(logprobs=(-0.25, "x")), False),
        (other(logprob=None), False),
    ],
)
def test_log_probabilities_of_a_beam_come_back_if_they_are_numbers(
    one: TokenLogprobs, comes_back: bool
) -> None:
    beam = BeamRound(id="s", width=2, prompt=2, most=9)
    request = Request(
        id="b", prompt=(3, 4), max_tokens=4, continuation=Continuation(beam_round=beam)
    )
    config = EngineConfig(num_blocks=8, block_size=4, depth=1)
    turns = run(config, (Submit(request),), (Executed(0, ((5,),), ((one,),)),))
    _, turn = opened(encode_journal(config, turns)).turns()
    [event] = turn.events
    assert isinstance(event, Executed)
    assert event.yields == ((5,),)
    assert event.logprobs == (((one,),) if comes_back else ())


@pytest.mark.parametrize("searched", ["", "a", "b", "c", "ab", "ac", "bc", "abc"])
def test_log_probabilities_of_beams_come_back_and_no_others(searched: str) -> None:
    config = EngineConfig(num_blocks=9, block_size=4, depth=1)
    beam = BeamRound(id="s", width=1, prompt=2, most=4)
    plain = Request(id="a", prompt=(1, 2), max_tokens=2)
    asked = [
        Submit(
            attrs.evolve(
                plain,
                id=name,
                continuation=Continuation(beam_round=beam if name in searched else None),
            )
        )
        for name in "abc"
    ]
    column = tuple(
        (TokenLogprobs(at + 3, -0.5 * at, at + 1, (7,) * at, (-0.25,) * at),)
        for at in range(3)
    )
    result = Executed(0, ((3,), (4,), (5,)), column)
    turns = run(config, (Tick(0.0), *asked), (Tick(1.0), result))
    _, read = opened(encode_journal(config, turns)).turns()
    [back] = [event for event in read.events if isinstance(event, Executed)]
    kept = back.logprobs or ((),) * 3
    assert kept == tuple(
        one if name in searched else () for name, one in zip("abc", column, strict=True)
    )
