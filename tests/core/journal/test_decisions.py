"""What a turn decided, as data."""

import attrs

from minfer.journal.decisions import _membership, compact, extend_digest, facts
from minfer.journal.format import START_DIGEST
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Execute, Submit, Tick
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import Transition
from tests.core.journal.made import run
from tests.core.recorded import recorded


def test_only_positions_are_in_the_digest() -> None:
    _, turns = recorded(9)
    for turn in turns:
        for command in turn.transition.commands:
            if isinstance(command, Execute):
                record = compact(facts(turn.before, turn.transition))
                moved = attrs.evolve(
                    command.plan, starts=(9999, *command.plan.starts[1:])
                )
                other = Transition(
                    turn.transition.state, (attrs.evolve(command, plan=moved),)
                )
                assert extend_digest(
                    START_DIGEST, turn.transition, record
                ) != extend_digest(START_DIGEST, other, record)
                return


def test_the_facts_of_a_turn_with_two_plans() -> None:
    config = EngineConfig(num_blocks=40, block_size=4)
    arrives = Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9))
    (turn,) = run(config, (Tick(0.0), arrives))
    assert facts(turn.before, turn.transition) == {
        "plans": [
            {
                "left": [],
                "joined": [[0, 0, 0]],
                "num_scheduled_tokens": [[0, 3]],
                "fills": [[0, 0]],
                "opens": [[0, "a", 0, [[0, 1]]]],
            },
            {"grows": [[0, 1, [[1, 1]]]]},
        ],
        "reasons": [["Admitted", "a", 0, 0.0, 0, 3, 0, 0, 3]],
    }


def test_tables_of_all_groups_are_facts() -> None:
    groups = CacheGroup(), CacheGroup(8, pages=2)
    config = EngineConfig(num_blocks=90, block_size=4, groups=groups)
    arrives = Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9))
    (turn,) = run(config, (Tick(0.0), arrives))
    first, second = facts(turn.before, turn.transition)["plans"]
    assert first["opens"] == [[0, "a", 0, [[0, 1]], [[1, 2]]]]
    assert second == {"grows": [[0, 1, [[3, 1]]], [0, 2, [[4, 2]], 1]]}


def test_rows_that_are_in_another_order_are_all_named() -> None:
    plan = Plan(
        0,
        (2, 1),
        (0, 1),
        starts=(0, 0),
        num_scheduled_tokens=(1, 1),
        max_sampled_tokens=(1, 1),
    )
    assert _membership((1, 2), plan) == {"run_ids": [2, 1]}
    assert _membership((3, 2, 1), plan) == {"left": [3], "joined": []}
