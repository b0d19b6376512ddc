"""A journal gives back what went in, and names the place of damage and of other
decisions.
"""

import math
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any, cast

import attrs
import pytest

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.keys import block_keys
from minfer.messages import Cancel, Event, Execute, Executed, Failed, Submit, Tick
from minfer.policies import Priority
from minfer.request import Request
from minfer.runs import replay as replays
from minfer.runs.decisions import chained, compact, facts
from minfer.runs.journal import (
    MAGIC,
    START,
    JournalError,
    encode_journal,
    payloads,
    turn_record,
)
from minfer.runs.projection import state_digest
from minfer.runs.replay import DivergenceError, Journal, open_segments
from minfer.state import EngineState, Hold, Live, Transition, Turn, initial
from tests.circles import long, seeds
from tests.core.recorded import recorded


def opened(data: bytes) -> Journal:
    return Journal(open_segments({"run": data}))


def run(config: EngineConfig, *turns: tuple[Event, ...]) -> list[Turn]:
    state, log = initial(config), list[Turn]()
    for events in turns:
        log.append(Turn(len(log), state, events, step(config, state, events)))
        state = log[-1].transition.state
    return log


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
    told = [(type(r).__name__, getattr(r, "event", "")) for r in read.transition.reasons]
    assert told == [
        ("Ignored", name) for name in ("event", "event", "event", "executed", "failed")
    ]


def test_keys_do_not_cross_the_border_of_a_process() -> None:
    """A wrong key would give a request another one's KV: whoever reads makes them from
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
    config = EngineConfig(num_blocks=1000, max_num_seqs=256, vocab_size=150_000)
    every = [Submit(Request(id=str(i), prompt=(i, 1), max_tokens=99)) for i in range(256)]
    turns = run(config, (Tick(0.0), *every))
    for number in range(6):
        plan = turns[-1].transition.state.inflight[0]
        events = (
            Tick(number + 1.0),
            Executed(plan.step, tuple((140_000,) for _ in plan.most)),
        )
        state = turns[-1].transition.state
        turns.append(Turn(len(turns), state, events, step(config, state, events)))
    told = facts(turns[-1].before, turns[-1].transition)
    assert told == {}
    assert len(turn_record(turns[-1], b"", START)) == 8 + 23 + 3 * 256


# --- another engine ---------------------------------------------------------------------


def test_the_first_divergent_turn_and_field_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler that lets the last, not the first, give way is found where it first
    does.
    """
    config, turns = recorded(7, 120)
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


def test_positions_alone_are_in_the_digest() -> None:
    _, turns = recorded(9)
    for turn in turns:
        for command in turn.transition.commands:
            if isinstance(command, Execute):
                told = compact(facts(turn.before, turn.transition))
                moved = attrs.evolve(
                    command.plan, starts=(9999, *command.plan.starts[1:])
                )
                other = Transition(
                    turn.transition.state, (attrs.evolve(command, plan=moved),)
                )
                assert chained(START, turn.transition, told) != chained(
                    START, other, told
                )
                return


def test_a_state_digest_sees_all_but_tokens() -> None:
    _, turns = recorded(11)
    seen = {state_digest(turn.before) for turn in turns}
    assert len(seen) == len({turn.before.time for turn in turns} | {0.0})
    state = turns[30].before
    for change in (
        {"free_rows": (77,)},
        {"next_gen": 10**6},
        {"faults": ((("x", 0), 1),)},
    ):
        assert state_digest(attrs.evolve(state, **change)) != state_digest(state)


def test_a_state_digest_sees_every_part() -> None:
    state = full_state()
    others = [*apart(state)]
    assert len({state_digest(one) for one in (state, *others)}) == 1 + len(others)


def with_first(column: Any, cell: Any) -> Any:
    return (cell, *column[1:])


def each(value: Any, **fields: Any) -> Iterator[Any]:
    """The record with one of the fields changed."""
    return (attrs.evolve(value, **{name: one}) for name, one in fields.items())


def apart(state: Any) -> Iterator[EngineState]:
    """States that differ from this one in a single part."""
    run, blocks, plan, fence = (
        state.running,
        state.blocks,
        state.inflight[0],
        state.fences[0],
    )
    prefix = blocks.prefix
    first, (block, node) = state.waiting.first(), next(iter(prefix.nodes.items()))
    rest, seq = state.waiting.remove(first.place), run.seqs[0]
    seqs: dict[str, Any] = {
        "arrived": 77.5,
        "preempted": 9,
        "history": (1,),
        "sample": 5,
        "cached": 99,
    }
    moved = {"place": ((), 999, 0)}
    lines = [rest, *(rest.insert(one) for one in each(first, **seqs, **moved))]
    columns = ("gens", "rows", "starts", "base", "known", "sched", "last")
    runs = [
        *each(run, **{name: with_first(getattr(run, name), 999) for name in columns}),
        attrs.evolve(
            run, tables=with_first(run.tables, run.tables[0].extended((99,), 64))
        ),
    ]
    runs += [
        attrs.evolve(run, seqs=with_first(run.seqs, one))
        for one in each(seq, **seqs, **moved)
    ]
    chains = each(run.chains[0], sealed=99, leaf=99, low=99)
    runs += [attrs.evolve(run, chains=with_first(run.chains, one)) for one in chains]
    wrong = ({"parent": 999}, {"users": 999}, {"children": 999}, {"last_use": 999})
    pools = [
        *each(
            blocks.pool,
            fresh=999,
            free=999,
            spare=(*blocks.pool.spare, 99),
            freed=blocks.pool.freed.set(99, (1,)),
        ),
    ]
    prefixes = [
        *each(prefix, next_use=999, idle=prefix.idle.set(99, 1)),
        *(
            attrs.evolve(prefix, nodes=prefix.nodes.set(block, node._replace(**one)))
            for one in wrong
        ),
    ]
    every = [
        *(attrs.evolve(blocks, pool=one) for one in pools),
        *(attrs.evolve(blocks, prefix=one) for one in prefixes),
    ]
    cells = {
        name: with_first(getattr(plan, name), 99)
        for name in ("gens", "rows", "starts", "counts", "most")
    }
    plans = [
        with_first(state.inflight, one) for one in each(plan, step=999, repeat=9, **cells)
    ]
    fences = [
        with_first(state.fences, one)
        for one in each(fence, until=99, held=(99,), private=(99,))
    ]
    parts = {
        "waiting": lines,
        "running": runs,
        "blocks": every,
        "inflight": plans,
        "fences": fences,
        "held": [None, Hold(((0,), 99, 0), "blocks")],
        "free_rows": [(*state.free_rows, 9)],
        "time": [99.5],
        "next_step": [999],
        "next_gen": [999],
        "arrivals": [999],
        "faults": [((("x", 0), 1),)],
        "policy": [7],
        "requests": [state.requests.set("x", Live(((), 99, 0), 1))],
    }
    for name, values in parts.items():
        for value in values:
            yield attrs.evolve(state, **{name: value})


def full_state() -> EngineState:
    """A state in which everything is there: who waits and runs, steps, fences, published
    blocks.
    """
    states = (turn.before for seed in range(40) for turn in recorded(seed)[1])
    return next(
        one
        for one in states
        if one.waiting
        and len(one.running) > 1
        and one.inflight
        and one.fences
        and one.blocks.prefix.nodes
        and one.held
    )


def test_the_facts_of_a_turn_with_two_plans() -> None:
    config = EngineConfig(num_blocks=40, block_size=4)
    arrives = Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9))
    (turn,) = run(config, (Tick(0.0), arrives))
    assert facts(turn.before, turn.transition) == {
        "plans": [
            {
                "left": [],
                "joined": [[0, 0, 0]],
                "counts": [[0, 3]],
                "fills": [[0, 0]],
                "opens": [[0, "a", 0, [[0, 1]]]],
            },
            {"grows": [[0, 1, [[1, 1]]]]},
        ],
        "reasons": [["Admitted", "a", 0, 0.0, 0, 3, 0, 0, 3]],
    }


# --- files that are not whole -----------------------------------------------------------


@pytest.mark.parametrize("every", [97, *long([1])])
def test_a_torn_tail_loses_the_last_record_alone(every: int) -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    starts = [0, *_ends(data)]
    ends = {
        at + near for at in starts[2:-1] for near in (-1, 0, 1) if at + near >= starts[2]
    }
    for cut in sorted({*range(starts[2], len(data), every), *ends}):
        journal = opened(data[:cut])
        whole = sum(end <= cut for end in starts[2:])  # records after the head
        found = list(journal.turns())
        assert found == turns[: min(whole, len(turns))]
        assert bool(journal.torn) == (cut not in starts)
        assert not journal.closed


def _ends(data: bytes | bytearray) -> list[int]:
    at, ends = len(MAGIC), []
    while at < len(data):
        at += 8 + struct.unpack_from("<I", data, at)[0]
        ends.append(at)
    return ends


def test_a_last_record_that_was_not_written_whole_is_torn() -> None:
    config, turns = recorded(8, 20)
    data = bytearray(encode_journal(config, turns))
    del data[_ends(data)[len(turns)] :]  # the engine did not get to its end
    data[-1] ^= 1
    journal = opened(bytes(data))
    assert list(journal.turns()) == turns[:-1]
    assert "cut off" in journal.torn[0]


def test_damage_is_named_with_its_place() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = _ends(data)
    broken = bytearray(data)
    broken[ends[4] + 12] ^= 1
    journal = opened(bytes(broken))
    with pytest.raises(JournalError, match=f"run: record 5 at byte {ends[4]} is damaged"):
        list(journal.turns())
    assert journal.count == 4
    assert len(list(journal.turns(until=4))) == 4


def test_turns_that_were_taken_away_are_missed() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = _ends(data)
    for kept in (3, len(turns) - 1):  # then the digest of the last state, and the end
        with pytest.raises(
            JournalError, match=rf"after turn {kept - 1} .* turns are missing"
        ):
            list(opened(data[: ends[kept]] + data[ends[-3] :]).turns())
    with pytest.raises(JournalError, match="turns are missing"):
        list(opened(data[: ends[3]] + data[ends[-2] :]).turns())  # the end alone
    for odd in (b"?", b"Tx"):
        record = struct.pack("<II", len(odd), zlib.crc32(odd)) + odd
        with pytest.raises(JournalError, match=r"damaged|no turn"):
            list(opened(data[: ends[3]] + record + data[ends[3] :]).turns())


def test_a_length_that_is_wrong_is_no_torn_tail() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    for bit in (5, 12, 30):
        broken = bytearray(data)
        at = _ends(data)[4]
        broken[at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalError, match=f"record 5 at byte {at} is damaged"):
            list(opened(bytes(broken)).turns())


def test_zeros_are_a_torn_tail_only_at_the_end() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    cut = _ends(data)[6]
    journal = opened(data[:cut] + bytes(4096))
    assert list(journal.turns()) == turns[:6]
    assert journal.torn
    with pytest.raises(JournalError, match=r"record 7 .* is damaged"):
        list(opened(data[:cut] + bytes(800) + data[cut + 800 :]).turns())


def test_reordered_records_diverge() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    ends = _ends(data)
    parts = [data[a:b] for a, b in zip([len(MAGIC), *ends], ends, strict=False)]
    parts[5], parts[6] = parts[6], parts[5]
    with pytest.raises(JournalError, match="turn 4"):
        list(opened(MAGIC + b"".join(parts)).turns())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "this file is empty"),
        (b"PK\x03\x04 something", "not a journal"),
        (b"minfer journal 2\n", "newer format"),
        (MAGIC, "no head"),
        (MAGIC + b"\x05\0\0\0", "no head"),
        (
            MAGIC + struct.pack("<II", 3, zlib.crc32(b"Hxx")) + b"Hxx",
            "head cannot be read",
        ),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        opened(data)


def test_a_head_of_another_format_or_with_unknown_records_is_refused() -> None:
    def head(text: bytes) -> bytes:
        payload = b"H" + zlib.compress(text)
        return MAGIC + struct.pack("<II", len(payload), zlib.crc32(payload)) + payload

    newer, older = b'{"format": 9}', b'{"format": 1, "about": {"minfer": "0.2.0"}}'
    with pytest.raises(
        JournalError, match=r"format 9, .* it is newer; .* the minfer that wrote it"
    ):
        opened(head(newer))
    with pytest.raises(
        JournalError, match=r"format 1, .* otherwise; replay it with minfer 0\.2\.0"
    ):
        opened(head(older))
    with pytest.raises(JournalError, match="policy of your own, name its module"):
        opened(head(b'{"format": 3, "config": {"is": "Mine"}, "turn": 0, "about": {}}'))
    with pytest.raises(JournalError, match="num_blocks"):
        opened(
            head(
                b'{"format":2,"config":{"is":"EngineConfig","num_blocks":-1},"turn":0,"about":{}}'
            )
        )


def test_a_turn_that_is_not_of_its_state_is_refused() -> None:
    config, turns = recorded(8, 20)
    data = encode_journal(config, turns)
    body = list(payloads(data, "run"))
    later = next(p for p in body[2:] if p[1] == 3)  # a result, when nothing is in flight
    framed = struct.pack("<II", len(later), zlib.crc32(later)) + later
    head = data[: _ends(data)[0]]
    with pytest.raises(JournalError, match="turn 0: it is no turn of this state"):
        list(opened(head + framed).turns())


def test_a_result_that_lacks_tokens_is_refused() -> None:
    """So it is where a turn before it is missing."""
    config, turns = recorded(10, 20)
    data = encode_journal(config, turns)
    at = next(
        i
        for i, turn in enumerate(payloads(data, "run"))
        if turn[:1] == b"T" and turn[1] & 2
    )
    turn = list(payloads(data, "run"))[at]
    bare = turn[:18] + struct.pack(
        "<BI", 0, 0
    )  # no token ids, and all rows yielded their most
    framed = struct.pack("<II", len(bare), zlib.crc32(bare)) + bare
    with pytest.raises(JournalError, match=f"turn {at - 1}: it is no turn of this state"):
        list(opened(data[: _ends(data)[at - 1]] + framed).turns())


def test_a_turn_that_pretends_to_have_tokens_is_refused() -> None:
    data = encode_journal(EngineConfig(num_blocks=4), [])
    turn = struct.pack("<cBd8sBI", b"T", 0, 0.0, START, 0, 2**31)  # of no bytes each
    framed = struct.pack("<II", len(turn), zlib.crc32(turn)) + turn
    begin = time.perf_counter()
    with pytest.raises(
        JournalError, match=r"turn 0: .* no turn of this state.*2147483648"
    ):
        list(opened(data[: _ends(data)[0]] + framed).turns())
    assert time.perf_counter() - begin < 0.5


def test_segments_follow_each_other() -> None:
    config, turns = recorded(4)
    first, second = encode_journal(config, turns[:30]), encode_journal(config, turns[25:])
    with pytest.raises(JournalError, match="does not come after"):
        Journal(open_segments({"b": second, "a": first}))
    gap = encode_journal(config, turns[33:])
    with pytest.raises(JournalError, match="begins with turn 33"):
        list(Journal(open_segments({"a": first, "c": gap})).turns())
