"""What a replay says of another engine: the right turn, and in words who, what then, what
now.
"""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.messages import Event, Execute, Executed, Submit, Tick
from minfer.request import Request
from minfer.runs import replay as replays
from minfer.runs.decisions import Facts, facts
from minfer.runs.divergence import Divergence, _batches, diverged
from minfer.runs.journal_writing import encode_journal
from minfer.runs.replay import DivergenceError, Journal, open_segments
from minfer.runs.turns import EngineRaisedError
from minfer.state import EngineState, Transition, Turn, initial
from tests.circles import seeds
from tests.core.changed import CHANGES
from tests.core.recorded import recorded

MOST = 8  # names in a sentence


def opened(config: EngineConfig, turns: list[Turn]) -> Journal:
    return Journal(open_segments({"run": encode_journal(config, turns)}))


def told(turn: Turn) -> Any:
    """A turn's facts as a journal has them."""
    return json.loads(json.dumps(facts(turn.before, turn.transition)))


def otherwise(config: EngineConfig, turn: Turn) -> bool:
    """Whether the engine as it is now plans or says anything else in a recorded turn."""
    now = step(config, turn.before, turn.events)
    mine, recorded_ = (
        ([c for c in t.commands if isinstance(c, Execute)], facts(turn.before, t))
        for t in (now, turn.transition)
    )
    return mine != recorded_


@pytest.mark.parametrize("change", CHANGES)
@seeds(8, 200)
def test_changed_schedulers_are_told_in_the_right_turn_and_under_request_ids(
    seeds: range, change: str
) -> None:
    found = 0
    for seed in seeds:
        config, turns = recorded(seed)
        journal = opened(config, turns)
        with pytest.MonkeyPatch.context() as patch:
            CHANGES[change](patch)
            first = next((turn for turn in turns if otherwise(config, turn)), None)
            if first is None:
                list(journal.turns())
                continue
            with pytest.raises(DivergenceError) as caught:
                list(journal.turns())
        found += 1
        where = caught.value.divergence
        assert where.turn == first.number
        assert where.differences
        assert where.legend
        ids = {e.request.id for t in turns for e in t.events if isinstance(e, Submit)}
        for one in where.differences:
            assert re.search(r"\bthen .*, now ", one.words)
            assert set(re.findall(r"'(\w+)'", one.words)) <= ids
            assert one.then != one.now
        assert any("'" in one.words for one in where.differences), "nobody is named"
        assert str(where.turn) in str(caught.value)
    assert found > len(seeds) / 20


@seeds(3, 200)
def test_plans_are_put_together_again_from_their_facts(seeds: range) -> None:
    """Names, rows, figures and tables of every plan of hostile runs."""
    for seed in seeds:
        _, turns = recorded(seed)
        for turn in turns:
            plans = [c.plan for c in turn.transition.commands if isinstance(c, Execute)]
            batches = _batches(turn.before, told(turn))
            assert len(batches) == len(plans)
            for batch, plan in zip(batches, plans, strict=True):
                named = [*batch.rows.values()]
                assert [row["device row"] for row in named] == [*plan.rows]
                assert [row.get("input tokens", 1) for row in named] == [*plan.counts]
                assert [row.get("tokens at most", 1) for row in named] == [*plan.most]
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
                assert not any("generation" in name for name in names[: len(plan.gens)])


# --- words ------------------------------------------------------------------------------


def words(then: Facts, now: Facts, before: EngineState | None = None) -> list[str]:
    where = diverged(7, before or initial(EngineConfig(num_blocks=9)), 1.5, then, now)
    assert (where.turn, where.time) == (7, 1.5)
    return [one.words for one in where.differences]


def admitted(name: str, *, hit: int = 0) -> list[Any]:
    return ["Admitted", name, 0, 0.5, hit, 8, 0, hit, 8]


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ([admitted("a")], [admitted("b")], "then admitted 'a', now 'b'"),
        ([], [admitted("b")], "then admitted nobody, now 'b'"),
        (
            [admitted("a", hit=4)],
            [admitted("a")],
            "admitted 'a': then with hit 4, cached 4, now with hit 0, cached 0",
        ),
        (
            [["Held", "a", 1, "blocks", 3, 2]],
            [["Held", "a", 1, "rows", 0, 0]],
            (
                "then held 'a' sample 1 for blocks (3 needed, 2 available), "
                "now 'a' sample 1 for rows"
            ),
        ),
        (
            [["Preempted", "a", 0, ["a", 0], 9, 8]],
            [["Preempted", "b", 0, ["a", 0], 5, 4]],
            "then preempted 'a' for itself, now 'b' for 'a'",
        ),
        (
            [["Missed", "a", 0, 1, 3]],
            [["Missed", "a", 0, 2, 3]],
            (
                "then missed the prefix of 'a' from block 1 of 3 on, "
                "now 'a' from block 2 of 3 on"
            ),
        ),
        ([["Ignored", "cancel"]], [], "then ignored event cancel, now nobody"),
        (
            [["Voided", 3, 1, 4]],
            [["Voided", 3, 2, 4]],
            "then voided step 3 plans 1 rows 4, now step 3 plans 2 rows 4",
        ),
    ],
)
def test_a_reason_that_differs_is_a_sentence(then: Any, now: Any, said: str) -> None:
    assert words({"reasons": then}, {"reasons": now}) == [said]


def test_many_names_are_counted() -> None:
    some = [admitted(f"r{i}") for i in range(30)]
    (said,) = words({"reasons": some}, {})
    assert said.endswith(f" and {30 - MOST} more, now nobody")
    assert said.count("'r") == MOST


def test_ends_and_wakes_are_sentences() -> None:
    then = {"finished": [["a", 0, "length", 12, 0], ["b", 0, "stop", 3, 0]], "wake": 3.5}
    now = {"finished": [["b", 0, "stop", 3, 0]]}
    assert words(then, now) == [
        "then ended 'a' (length, 12 tokens), now nobody",
        "then asked to be woken at 3.5 s, now not at all",
    ]


def a_run() -> tuple[EngineState, Facts]:
    """A state in which `a` runs and `b` comes, and what is decided."""
    config = EngineConfig(num_blocks=9, block_size=4, depth=1)
    first = (Tick(0.0), Submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9)))
    state = step(config, initial(config), first).state
    done = Tick(1.0), *_result(state)
    coming = Submit(Request(id="b", prompt=(4, 5), max_tokens=9, n=2))
    transition = step(config, state, (*done, coming))
    return state, told(Turn(1, state, (), transition))


def _result(state: EngineState) -> tuple[Event, ...]:
    return (Executed(state.inflight[0].step, ((7,),)),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda plan: plan.update(joined=[], opens=[], counts=[], fills=[]),
            "step 1: then with 'b', now with nobody instead",
        ),
        (
            lambda plan: plan.update(counts=[[1, 1]]),
            "step 1: input tokens: then 2 for 'b', now 1 for 'b'",
        ),
        (
            lambda plan: plan.update(most=[[1, 0]]),
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
        (lambda plan: plan.update(repeat=3), "step 1: forwards: then 1, now 3"),
        (
            lambda plan: plan.update(copies=[[1, 2, 3]]),
            "step 1: copies: then none, now block 1 to 2 (3 positions)",
        ),
        (
            lambda plan: plan.update(
                joined=[[0, 1, 1]],
                counts=[[0, 2]],
                fills=[[0, 0]],
                opens=[[0, "b", 0, [[1, 1]]]],
            ),
            "step 1: then in the order 'a', 'b', now 'b', 'a'",
        ),
    ],
)
def test_a_plan_that_differs_is_told_under_names(
    change: Callable[[Facts], None], said: str
) -> None:
    state, then = a_run()
    now = json.loads(json.dumps(then))
    change(now["plans"][0])
    assert words(then, now, state)[0] == said


def test_a_step_that_is_not_planned_is_told() -> None:
    state, then = a_run()
    assert words(then, then | {"plans": []}, state) == [
        "then planned step 1, now no step"
    ]


def test_reasons_come_before_plans() -> None:
    state, then = a_run()
    now: Facts = {"plans": [{}]}
    where = diverged(1, state, 1.0, then, now)
    assert where.field == "reasons"
    assert where.differences[0].words == "then admitted 'b', now nobody"
    assert where.legend.startswith("[Admitted, id, sample, waited, hit, known")


@seeds(2, 5)
def test_every_fact_has_a_legend(seeds: range) -> None:
    for seed in seeds:
        _, turns = recorded(seed)
        for turn in turns:
            known = told(turn)
            for name in known:
                where = diverged(0, turn.before, 0.0, known, known | {name: None})
                assert where.legend
            for plan in known.get("plans", ()):
                for name in plan:
                    less = [{key: value for key, value in plan.items() if key != name}]
                    now = known | {"plans": less}
                    where = diverged(0, turn.before, 0.0, known | {"plans": [plan]}, now)
                    assert where.field == f"plans[0].{name}" or where.field == "plans"
                    assert where.legend


def test_facts_that_no_engine_has_written_are_told_without_words() -> None:
    """A journal that was tampered with: field, then and now, whatever they are."""
    rng, (state, then) = Random(0), a_run()
    odd: list[Any] = [None, 3, "x", [], {}, [[]], [[9, 9]], [None], {"x": 1}, -1.5]
    odd += [[["Admitted"]], [["Nobody", 1]], [["clip", 1]], [[1]], [["Held", "a", 0]]]
    odd.append([[99, "a", 0, [[1, 1]]]])
    for _ in range(2000):
        now = json.loads(json.dumps(then))
        part = rng.choice([now, *(p for p in now["plans"] if isinstance(p, dict))])
        names = ["reasons", "finished", "wake", "plans", *then["plans"][0]]
        part[rng.choice(names)] = rng.choice(odd)
        for one in (
            diverged(1, state, 1.0, then, now),
            diverged(1, state, 1.0, now, then),
        ):
            assert isinstance(one, Divergence)
            assert str(one)


# --- an engine that raises --------------------------------------------------------------


def test_a_replay_names_the_turn_in_which_the_engine_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(3)
    journal = opened(config, turns)

    def other(
        config: EngineConfig, state: EngineState, events: tuple[Event, ...]
    ) -> Transition:
        if state is turns[20].before or state == turns[20].before:
            raise KeyError("r7")
        return step(config, state, events)

    monkeypatch.setattr(replays, "step", other)
    at = next(turn.number for turn in turns if turn.before == turns[20].before)
    with pytest.raises(EngineRaisedError) as caught:
        list(journal.turns())
    error = caught.value
    assert (error.turn, error.time) == (at, turns[at].before.time)
    assert error.error == "KeyError: 'r7'"
    assert error.where.startswith("test_divergence.py:")
    assert str(error).startswith(
        f"turn {at}: the engine raised KeyError: 'r7' (test_divergence.py"
    )
    assert journal.count == at


def test_a_transition_that_is_none_is_the_engines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, turns = recorded(3)
    monkeypatch.setattr(replays, "step", lambda *_: None)
    with pytest.raises(
        EngineRaisedError, match="turn 0: the engine raised AttributeError"
    ):
        list(opened(config, turns).turns())
