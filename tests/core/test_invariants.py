"""The checker bites: states and turns that are wrong on purpose are named."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.invariants import InvariantError, check
from minfer.ledger import check_turn
from minfer.log import Log
from minfer.messages import Emit, Execute, Finished, Submit, Tick, WakeAt
from minfer.plan import Fill, Open
from minfer.sequence import Running
from minfer.state import EngineState, Fence, Transition
from tests.core.test_engine import CONFIG, Bench, ask


def busy(depth: int = 2) -> Bench:
    bench = Bench(evolve(CONFIG, depth=depth))
    bench.give(*(Submit(ask("x" * n, 9, 12)) for n in (1, 2, 3)))
    for _ in range(6):
        bench.turn()
    return bench


def run_with(state: EngineState, **columns: Any) -> EngineState:
    return evolve(state, running=evolve(state.running, **columns))


def blocks_with(state: EngineState, **changes: Any) -> EngineState:
    return evolve(state, blocks=evolve(state.blocks, **changes))


def _node(state: EngineState, *, users: int | None = None, kids: int | None = None) -> Any:
    """The pool's nodes with the counts of block 0 changed."""
    key, parent, right_users, right_kids, ticket = state.blocks.nodes[0]
    wrong = (right_users if users is None else users, right_kids if kids is None else kids)
    return state.blocks.nodes.set(0, (key, parent, *wrong, ticket))


def _bad_states() -> dict[str, Callable[[EngineState], EngineState]]:
    def shared(s: EngineState) -> EngineState:
        tables = s.running.tables
        return run_with(s, tables=(tables[0], Log(tables[1][:-1] + tables[0][-1:]), *tables[2:]))

    return {
        "partition": shared,
        "partition: ": lambda s: blocks_with(s, free=s.blocks.free + 1),
        "cache truth": lambda s: blocks_with(s, nodes=_node(s, kids=7)),
        "refcount": lambda s: blocks_with(s, nodes=_node(s, users=7)),
        "evictable": lambda s: blocks_with(s, idle=s.blocks.idle.set(3, 3)),
        "columns": lambda s: run_with(s, rows=s.running.rows[:-1]),
        "order": lambda s: evolve(
            s, running=Running(*(getattr(s.running, c.name)[::-1] for c in Running.__attrs_attrs__))
        ),
        "rows": lambda s: run_with(s, rows=(s.running.rows[1], *s.running.rows[1:])),
        "generations": lambda s: run_with(s, gens=(999, *s.running.gens[1:])),
        "coverage": lambda s: run_with(s, sched=(s.running.sched[0] + 1, *s.running.sched[1:])),
        "conservation": lambda s: evolve(s, requests=s.requests.delete("x")),
        "depth": lambda s: evolve(s, inflight=s.inflight[::-1]),
        "fence": lambda s: evolve(s, fences=(Fence(77, (), ()),)),
    }


@pytest.mark.parametrize("law", _bad_states())
def test_a_wrong_state_is_named(law: str) -> None:
    state = busy().state
    config = evolve(CONFIG, depth=2)
    check(config, state)
    with pytest.raises(InvariantError, match=law.strip(": ")) as caught:
        check(config, _bad_states()[law](state))
    assert caught.value.law


def test_a_wrong_turn_is_named() -> None:
    bench = busy(depth=1)
    before = bench.state
    events = (Tick(99.0), bench.oracle.collect())
    turn = step(bench.config, before, events)
    check_turn(bench.config, before, events, turn)
    plan = next(c.plan for c in turn.commands if isinstance(c, Execute))

    def with_plan(**changes: Any) -> Transition:
        return evolve(turn, commands=(Execute(evolve(plan, **changes)),))

    wrong: dict[str, Transition] = {
        "plan": with_plan(rows=plan.rows[::-1]),
        "plan: a row without": with_plan(gens=(999, *plan.gens[1:])),
        "exclusive tail": with_plan(starts=(0, *plan.starts[1:])),
        "feed": with_plan(fills=(Fill(0, (1,)),)),
        "open": with_plan(opens=(_open(bench),)),
        "work conservation": evolve(turn, state=evolve(turn.state, inflight=())),
        "wake": evolve(turn, commands=(WakeAt(1.0),)),
        "emit": evolve(turn, commands=(Emit((("x", 0),), ()),)),
        "lifecycle": evolve(turn, commands=(Emit((), (), (Finished("nobody", 0, "stop", 0),)),)),
        "lifecycle: ": evolve(turn, commands=(Emit((), (), (Finished("x", 0, "stop", 0),)),)),
    }
    for law, bad in wrong.items():
        with pytest.raises(InvariantError, match=law.strip(": ")):
            check_turn(bench.config, before, events, bad)


def _open(bench: Bench) -> Open:
    return Open(0, ask("x"), 0, bench.state.running.tables[0][:])
