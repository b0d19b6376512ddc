"""The checker bites: states that are wrong on purpose are named."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import astuple, evolve

from minfer.blocks.prefix import every_node, pages_of
from minfer.lifecycle.committed import committed
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import (
    Submit,
)
from minfer.records.request import PromptOnly
from minfer.records.sequence import Running
from minfer.records.state import EngineState, Fence, initial
from minfer.records.waiting import WaitingQueue
from minfer.testing import invariants
from minfer.testing.invariants import InvariantError, _check_windows, check
from minfer.values.log import Log
from minfer.values.tickets import words_of
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.testing.turns import (
    blocks_with,
    busy,
    crowded,
    first_waits,
    run_with,
)


def _node(
    state: EngineState, *, users: int | None = None, kids: int | None = None
) -> Any:
    """The prefix's nodes with the counts of block 0 changed."""
    prefix = state.blocks.prefix
    key, node = next((k, n) for k, n in every_node(prefix).items() if n.pages == (0,))
    wrong = evolve(
        node,
        users=node.users if users is None else users,
        children=node.children if kids is None else kids,
    )
    return prefix.nodes.set(key, astuple(wrong, recurse=False))


def _named_twice(state: EngineState, *, other: bool) -> EngineState:
    """The first published block of a table is also its second, or is another
    sequence's.
    """
    run, prefix = state.running, state.blocks.prefix
    i = next(i for i, own in enumerate(run.chains) if own.sealed[0] > 1)
    mine = set(run.tables[i][0])
    instead = (
        next(b for b in pages_of(prefix, prefix.nodes) if b not in mine)
        if other
        else run.tables[i][0][1]
    )
    table = (Log((instead, *run.tables[i][0][1:])),)
    return run_with(state, tables=(*run.tables[:i], table, *run.tables[i + 1 :]))


def _first_chain(state: EngineState, **changes: Any) -> EngineState:
    """What the first that runs has published is changed."""
    first, *rest = state.running.chains
    return run_with(state, chains=(evolve(first, **changes), *rest))


def _also_stops(state: EngineState) -> EngineState:
    """A running sample ends at a token that is not looked for."""
    first, *rest = state.running.seqs
    request = evolve(first.request, stop_ids=frozenset({49}))
    return run_with(state, seqs=(evolve(first, request=request), *rest))


def _bad_states() -> dict[str, Callable[[EngineState], EngineState]]:
    def shared(s: EngineState) -> EngineState:
        tables = s.running.tables
        return run_with(
            s,
            tables=(
                tables[0],
                (Log(tables[1][0][:-1] + tables[0][0][-1:]),),
                *tables[2:],
            ),
        )

    return {
        "partition": shared,
        "partition: ": lambda s: blocks_with(s, free=s.blocks.free + 1),
        "cache truth": lambda s: blocks_with(s, nodes=_node(s, kids=7)),
        "refcount": lambda s: blocks_with(s, nodes=_node(s, users=7)),
        "evictable": lambda s: blocks_with(s, idle=s.blocks.prefix.idle.set(3, 3)),
        "columns": lambda s: run_with(s, rows=s.running.rows[:-1]),
        "order": lambda s: evolve(
            s,
            running=Running(
                *(getattr(s.running, c.name)[::-1] for c in Running.__attrs_attrs__)
            ),
        ),
        "rows": lambda s: run_with(s, rows=(s.running.rows[1], *s.running.rows[1:])),
        "generations": lambda s: run_with(s, run_ids=(999, *s.running.run_ids[1:])),
        "coverage": lambda s: run_with(
            s, scheduled=(s.running.scheduled[0] + 1, *s.running.scheduled[1:])
        ),
        "conservation": lambda s: evolve(s, requests=s.requests.delete("x")),
        "depth": lambda s: evolve(s, inflight=s.inflight[::-1]),
        "fence": lambda s: evolve(s, fences=(Fence(77, (), ()),)),
        "grow_at": lambda s: run_with(s, grow_at=(99, *s.running.grow_at[1:])),
        "publish_at": lambda s: run_with(s, publish_at=(99, *s.running.publish_at[1:])),
        "faults": lambda s: evolve(s, faults=((("unknown", 0), 1),)),
        "paused": lambda s: evolve(s, paused=frozenset({("x", 0)})),
        "time": lambda s: evolve(s, time=0.0),
        "order: .* from the future": lambda s: evolve(s, arrivals=0),
        "history": lambda s: first_waits(s, history=(1, 2, 3)),
        "stops": _also_stops,
        "filling": lambda s: run_with(
            evolve(s, filling=False),
            num_known_at_admission=(
                s.running.scheduled[0] + 1,
                *s.running.num_known_at_admission[1:],
            ),
        ),
        "keys": lambda s: _first_chain(s, keys=Log((b"x" * 32,) * 9)),
        "window": lambda s: _first_chain(s, low=(1,)),
        "self-alias": lambda s: _named_twice(s, other=False),
        "aliasing": lambda s: _named_twice(s, other=True),
        "evictable: tickets": lambda s: blocks_with(s, words=words_of((77,))),
    }


@pytest.mark.parametrize("law", _bad_states())
def test_a_wrong_state_is_named(law: str) -> None:
    state = crowded().state
    config = evolve(CONFIG, depth=2)
    check(config, state)
    with pytest.raises(InvariantError, match=law.strip(": ")) as caught:
        check(config, _bad_states()[law](state))
    assert caught.value.law


def test_behind_a_window_no_sample_uses_a_leaf() -> None:
    config = evolve(CONFIG, groups=(CacheGroup(8),))
    bench = Bench(config)
    bench.give(Submit(ask("x", 20, 12)))
    for _ in range(4):
        bench.turn()
    chain = evolve(
        bench.state.running.chains[0], leaf=next(iter(bench.state.blocks.prefix.nodes))
    )
    with pytest.raises(InvariantError, match="leaf"):
        check(config, run_with(bench.state, chains=(chain,)))


def test_what_a_window_holds_too_long_or_too_early_is_named() -> None:
    groups = CacheGroup(), CacheGroup(8, pages=2)
    config = evolve(CONFIG, groups=groups, num_blocks=200)
    bench = Bench(config)
    bench.give(Submit(ask("x", 40, 12)))
    for _ in range(5):
        bench.turn()
    (chain,), (tables,) = bench.state.running.chains, bench.state.running.tables
    assert chain.low[1] > 3
    kept = evolve(chain, low=(0, 0))
    with pytest.raises(InvariantError, match=r"window: 0 to \d+ held at"):
        check_windows(config, run_with(bench.state, chains=(kept,)))
    far = (tables[0], Log((*tables[1], *range(200, 250))))
    with pytest.raises(InvariantError, match=r"window: \d+ to \d+ held at"):
        check_windows(config, run_with(bench.state, tables=(far,)))
    odd = (tables[0], Log((*tables[1], 200)))
    with pytest.raises(InvariantError, match="window: part of a block"):
        check_windows(config, run_with(bench.state, tables=(odd,)))
    both = (Log((*tables[0], tables[1][-1])), tables[1])
    with pytest.raises(InvariantError, match="self-alias"):
        check_windows(config, run_with(bench.state, tables=(both,)))


def check_windows(config: EngineConfig, state: EngineState) -> None:
    """Other laws would say something of these states, too."""
    _check_windows(config, state.running, 0, committed(config, state, 0))


def test_a_line_that_does_not_find_its_own_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = crowded().state
    monkeypatch.setattr(WaitingQueue, "find", lambda *_: None)
    with pytest.raises(InvariantError, match="is not found"):
        check(evolve(CONFIG, depth=2), state)


def test_what_is_left_over_when_all_has_ended_is_named() -> None:
    """Laws that are asked before it would find each of these, too."""
    state = initial(CONFIG)
    invariants._check_quiescence(state)
    for wrong in (
        evolve(state, fences=(Fence(1, (), ()),)),
        evolve(state, faults=((("x", 0), 1),)),
        evolve(state, waiting=crowded().state.waiting),
        evolve(state, running=busy().state.running),
        blocks_with(state, live=1),
    ):
        with pytest.raises(InvariantError, match="quiescence: something is left over"):
            invariants._check_quiescence(wrong)


def test_who_computes_all_anew_shares_nothing_of_it() -> None:
    state = busy(1).state
    own = next(i for i, chain in enumerate(state.running.chains) if chain.sealed)
    seq = state.running.seqs[own]
    wish = evolve(seq.request, max_tokens=0, prompt_only=PromptOnly("mean"), output=())
    seqs = list(state.running.seqs)
    seqs[own] = evolve(seq, request=wish)
    with pytest.raises(InvariantError, match="computed anew"):
        check(CONFIG, run_with(state, seqs=tuple(seqs)))
