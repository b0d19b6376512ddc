"""A state's digest sees all that a state says, but tokens."""

from collections.abc import Iterator
from typing import Any

import attrs

from minfer.blocks.prefix import every_node
from minfer.journal.projection import projected, state_digest
from minfer.records.acceptance import Acceptance
from minfer.records.config import CacheGroup
from minfer.records.drafting import Drafting, Proposed, SampleAcceptance
from minfer.records.messages import Submit
from minfer.records.state import BlockedHead, EngineState, LiveRequest, initial
from minfer.values.log import Log
from minfer.values.pmap import Map
from tests.core.recorded import recorded
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.testing.turns import run_with


def test_a_state_digest_sees_all_but_tokens() -> None:
    _, turns = recorded(11)
    seen = {state_digest(turn.before) for turn in turns}
    assert len(seen) == len({turn.before.time for turn in turns} | {0.0})
    state = turns[30].before
    durations: tuple[dict[str, Any], ...] = (
        {"began": 7.5},
        {"decode": 7.5},
        {"token": 7.5},
        {"tokens": 7},
    )
    changes: tuple[dict[str, Any], ...] = (
        {"free_rows": (77,)},
        {"next_run_id": 10**6},
        {"faults": ((("x", 0), 1),)},
        *({"step_times": attrs.evolve(state.step_times, **own)} for own in durations),
    )
    for change in changes:
        assert state_digest(attrs.evolve(state, **change)) != state_digest(state)


def test_a_state_digest_sees_every_part() -> None:
    state = full_state()
    others = [*separate(state)]
    assert len({state_digest(one) for one in (state, *others)}) == 1 + len(others)


def test_a_state_digest_sees_the_tables_of_all_groups() -> None:
    groups = CacheGroup(), CacheGroup(6, pages=2)
    bench = Bench(attrs.evolve(CONFIG, groups=groups, num_blocks=90))
    bench.give(Submit(ask("a", 15, 20)))
    for _ in range(3):
        bench.turn()
    state = bench.state
    run, nodes = state.running, state.blocks.prefix.nodes
    (first, second), (chain,) = run.tables[0], run.chains
    (found,) = projected(state)["running"]
    assert found["more groups"] == [
        {"table": [*second], "sealed": chain.sealed[1], "behind the window": 2}
    ]
    key, (pages, *_) = next((k, n) for k, n in nodes.items() if len(n[0]) == 2)
    prefix, swapped = state.blocks.prefix, (pages[::-1], *nodes[key][1:])
    other = attrs.evolve(prefix, nodes=nodes.set(key, swapped))
    states = [
        state,
        run_with(state, tables=((first, Log(tuple(second)[::-1])),)),
        run_with(state, chains=(attrs.evolve(chain, low=(0, 1)),)),
        run_with(state, chains=(attrs.evolve(chain, sealed=(3, 9)),)),
        attrs.evolve(state, blocks=attrs.evolve(state.blocks, prefix=other)),
    ]
    assert len({state_digest(one) for one in states}) == len(states)


def test_journals_agree_on_what_is_known_before_a_step_had_drafts() -> None:
    """Digests are compared with those that earlier engines wrote."""
    proposed = Drafting(proposals=Map({("x", 0): Proposed(7, (1, 2))}))
    assert projected(attrs.evolve(initial(CONFIG), drafting=proposed))["drafting"] == {
        "proposed": [["x", 0, 7, 2]],
        "acceptance": [],
        "overall": [-1, "0.0", "0.0"],
    }


def with_first(column: Any, cell: Any) -> Any:
    return (cell, *column[1:])


def each(value: Any, **fields: Any) -> Iterator[Any]:
    """The record with one of the fields changed."""
    return (attrs.evolve(value, **{name: one}) for name, one in fields.items())


def separate(state: Any) -> Iterator[EngineState]:
    """States that differ from this one in a single part."""
    run, blocks, plan, fence = (
        state.running,
        state.blocks,
        state.inflight[0],
        state.fences[0],
    )
    prefix = blocks.prefix
    first, (key, node) = state.waiting.first(), next(iter(every_node(prefix).items()))
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
    columns = (
        "run_ids",
        "rows",
        "starts",
        "num_known_at_admission",
        "known",
        "scheduled",
        "last_index",
    )
    runs = [
        *each(run, **{name: with_first(getattr(run, name), 999) for name in columns}),
        attrs.evolve(
            run, tables=with_first(run.tables, (run.tables[0][0].extended((99,), 64),))
        ),
    ]
    runs += [
        attrs.evolve(run, seqs=with_first(run.seqs, one))
        for one in each(seq, **seqs, **moved)
    ]
    other = next(k for k in prefix.nodes if k not in (node.parent, run.chains[0].leaf))
    chains = each(run.chains[0], sealed=(99,), leaf=other, low=(99,))
    runs += [attrs.evolve(run, chains=with_first(run.chains, one)) for one in chains]
    wrong = (
        {"pages": (999,)},
        {"parent": other},
        {"users": 999},
        {"children": 999},
        {"last_use": 999},
    )
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
        *each(prefix, next_use=999, idle=prefix.idle.set(99, key)),
        *(
            attrs.evolve(
                prefix,
                nodes=prefix.nodes.set(
                    key, attrs.astuple(attrs.evolve(node, **one), recurse=False)
                ),
            )
            for one in wrong
        ),
    ]
    every = [
        *(attrs.evolve(blocks, pool=one) for one in pools),
        *(attrs.evolve(blocks, prefix=one) for one in prefixes),
    ]
    cells = {
        name: with_first(getattr(plan, name), 99)
        for name in (
            "run_ids",
            "rows",
            "starts",
            "num_scheduled_tokens",
            "max_sampled_tokens",
        )
    }
    plans = [with_first(state.inflight, one) for one in each(plan, step=999, **cells)]
    fences = [
        with_first(state.fences, one)
        for one in each(fence, until=99, published=(other,), private=(99,))
    ]
    parts = {
        "waiting": lines,
        "running": runs,
        "blocks": every,
        "inflight": plans,
        "fences": fences,
        "blocked": [None, BlockedHead(((0,), 99, 0), "blocks")],
        "free_rows": [(*state.free_rows, 9)],
        "time": [99.5],
        "next_step": [999],
        "next_run_id": [999],
        "arrivals": [999],
        "faults": [((("x", 0), 1),)],
        "policy": [7],
        "drafting": [
            Drafting(proposals=Map({("x", 0): Proposed(7, (1,))})),
            Drafting(proposals=Map({("x", 0): Proposed(8, (1,))})),
            Drafting(proposals=Map({("x", 0): Proposed(7, (1, 2))})),
            Drafting(proposals=Map({("x", 1): Proposed(7, (1,))})),
            Drafting(learnt=Map({("x", 0): SampleAcceptance(Acceptance(2.0, 1.0), 3)})),
            Drafting(learnt=Map({("x", 1): SampleAcceptance(Acceptance(2.0, 1.0), 3)})),
            Drafting(overall=SampleAcceptance(Acceptance(2.0, 1.0), 3)),
            Drafting(overall=SampleAcceptance(Acceptance(2.0, 2.0), 3)),
            Drafting(overall=SampleAcceptance(Acceptance(3.0, 1.0), 3)),
            Drafting(overall=SampleAcceptance(Acceptance(2.0, 1.0), 4)),
        ],
        "requests": [state.requests.set("x", LiveRequest(((), 99, 0), 1))],
    }
    for name, values in parts.items():
        for value in values:
            yield attrs.evolve(state, **{name: value})


def full_state() -> EngineState:
    """A state in which everything is there: who waits and runs, steps, fences, published
    blocks.
    """
    # Seed 64 has such a state; another one may, once the engine decides otherwise.
    seeds = range(60, 200)
    states = (turn.before for seed in seeds for turn in recorded(seed)[1])
    return next(
        one
        for one in states
        if one.waiting
        and len(one.running) > 1
        and one.inflight
        and one.fences
        and not one.fences[0].published
        and one.blocks.prefix.nodes
        and one.blocked
        and len(one.waiting.first().history) > 1 < len(one.running.seqs[0].history)
    )
