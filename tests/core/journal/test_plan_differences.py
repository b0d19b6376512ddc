"""Plans are put together again from facts, and told under names."""

import json
from collections.abc import Callable

import pytest

from minfer.journal.decisions import Facts
from minfer.journal.plan_differences import rebuild_plans
from minfer.records.messages import Execute
from tests.circles import seeds
from tests.core.journal.reported import a_run, reported, words
from tests.core.recorded import recorded


@seeds(3, 200)
def test_plans_are_put_together_again_from_their_facts(seeds: range) -> None:
    """Names, rows, figures and tables of every plan of hostile runs."""
    for seed in seeds:
        _, turns = recorded(seed)
        for turn in turns:
            plans = [c.plan for c in turn.transition.commands if isinstance(c, Execute)]
            made = rebuild_plans(turn.before, reported(turn))
            assert len(made) == len(plans)
            for batch, plan in zip(made, plans, strict=True):
                named = [*batch.rows.values()]
                assert [row["device row"] for row in named] == [*plan.rows]
                assert [row.get("input tokens", 1) for row in named] == [
                    *plan.num_scheduled_tokens
                ]
                assert [row.get("tokens at most", 1) for row in named] == [
                    *plan.max_sampled_tokens
                ]
                names = [*batch.rows]
                for fill in plan.fills:
                    assert named[fill.index]["first position"] == plan.starts[fill.index]
                for new in plan.opens:
                    request, number = new.name
                    sample = f" sample {number}" if number else ""
                    assert names[new.index] == repr(request) + sample
                    table = named[new.index]["blocks"]
                    assert (
                        tuple(b for at, n in table for b in range(at, at + n))
                        == new.tables[0]
                    )
                assert not any(
                    "generation" in name for name in names[: len(plan.run_ids)]
                )


@pytest.mark.parametrize(
    ("change", "emitted"),
    [
        (
            lambda plan: plan.update(
                joined=[], opens=[], num_scheduled_tokens=[], fills=[]
            ),
            "step 1: then with 'b', now with none instead",
        ),
        (
            lambda plan: plan.update(num_scheduled_tokens=[[1, 1]]),
            "step 1: input tokens: then 2 for 'b', now 1 for 'b'",
        ),
        (
            lambda plan: plan.update(num_scheduled_tokens=[]),
            "step 1: input tokens: then 2 for 'b', now 1 for 'b'",
        ),
        (
            lambda plan: plan.update(max_sampled_tokens=[[0, 3]]),
            "step 1: tokens at most: then 1 for 'a', now 3 for 'a'",
        ),
        (
            lambda plan: plan.update(drafts=[[0, 2]]),
            "step 1: drafts: then 0 for 'a', now 2 for 'a'",
        ),
        (
            lambda plan: plan.update(max_sampled_tokens=[[1, 0]]),
            "step 1: tokens at most: then 1 for 'b', now 0 for 'b'",
        ),
        (
            lambda plan: plan.update(fills=[[1, 1]]),
            "step 1: first position: then 0 for 'b', now 1 for 'b'",
        ),
        (
            lambda plan: plan["opens"][0].__setitem__(3, [[4, 1], [6, 2]]),
            "step 1: blocks: then 2 for 'b', now 4 6-7 for 'b'",
        ),
        (
            lambda plan: plan.update(grows=[[0, 1, [[5, 1]]]]),
            "step 1: new blocks: then 1 from entry 1 for 'a', now 5 from entry 1 for 'a'",
        ),
        (
            lambda plan: plan.update(copies=[[1, 2, 3]]),
            "step 1: copies: then none, now block 1 to 2 (3 positions)",
        ),
        (
            lambda plan: plan.update(
                joined=[[0, 1, 1]],
                num_scheduled_tokens=[[0, 2]],
                fills=[[0, 0]],
                opens=[[0, "b", 0, [[1, 1]]]],
            ),
            "step 1: then in the order 'a', 'b', now 'b', 'a'",
        ),
    ],
)
def test_a_plan_that_differs_is_reported_under_names(
    change: Callable[[Facts], None], emitted: str
) -> None:
    state, then = a_run()
    now = json.loads(json.dumps(then))
    change(now["plans"][0])
    assert words(then, now, state)[0] == emitted


def test_a_step_that_is_not_planned_is_reported() -> None:
    state, then = a_run()
    assert words(then, then | {"plans": []}, state) == [
        "then planned step 1, now no step"
    ]
