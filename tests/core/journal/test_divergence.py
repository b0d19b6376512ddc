"""What a replay says of another engine: the right turn, and in words who, what then, what
now.
"""

import json
import re
from random import Random
from typing import Any

import pytest

from minfer.engine import step
from minfer.journal.decisions import Facts, facts
from minfer.journal.divergence import MAX_FACT_LEVELS, Divergence, find_divergence
from minfer.journal.replay import DivergenceError
from minfer.records.config import EngineConfig
from minfer.records.messages import Execute, Submit
from minfer.records.state import Turn
from tests.circles import seeds
from tests.core.changed import CHANGES
from tests.core.journal.reported import a_run, opened, reported
from tests.core.recorded import recorded


def otherwise(config: EngineConfig, turn: Turn) -> bool:
    """Whether the engine as it is now plans or says anything else in a recorded turn."""
    now = step(config, turn.before, turn.events)
    mine, recorded_ = (
        ([c for c in t.commands if isinstance(c, Execute)], facts(turn.before, t))
        for t in (now, turn.transition)
    )
    return mine != recorded_


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
@seeds(14, 200)
def test_changed_schedulers_are_reported_in_the_right_turn_and_under_request_ids(
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
        assert any("'" in one.words for one in where.differences), "no sample is named"
        assert str(where.turn) in str(caught.value)
    assert found > len(seeds) / 20


def test_reasons_come_before_plans() -> None:
    state, then = a_run()
    now: Facts = {"plans": [{}]}
    where = find_divergence(1, state, 1.0, then, now)
    assert where.field == "reasons"
    assert where.differences[0].words == "then admitted 'b', now none"
    assert where.legend.startswith("[Admitted, id, sample, waited, hit, known")


@seeds(2, 5)
def test_every_fact_has_a_legend(seeds: range) -> None:
    for seed in seeds:
        _, turns = recorded(seed)
        for turn in turns:
            known = reported(turn)
            for name in known:
                where = find_divergence(0, turn.before, 0.0, known, known | {name: None})
                assert where.legend
            for plan in known.get("plans", ()):
                for name in plan:
                    less = [{key: value for key, value in plan.items() if key != name}]
                    now = known | {"plans": less}
                    where = find_divergence(
                        0, turn.before, 0.0, known | {"plans": [plan]}, now
                    )
                    assert where.field == f"plans[0].{name}" or where.field == "plans"
                    assert where.legend


@pytest.mark.long
def test_facts_that_no_engine_has_written_are_reported_without_words() -> None:
    """A journal that was tampered with: field, then and now, whatever they are."""
    rng, (state, then) = Random(0), a_run()
    odd: list[Any] = [None, 3, "x", [], {}, [[]], [[9, 9]], [None], {"x": 1}, -1.5]
    odd += [
        [["Admitted"]],
        [["Nobody", 1]],
        [["clip", 1]],
        [[1]],
        [["QueueBlocked", "a", 0]],
    ]
    odd.append([[99, "a", 0, [[1, 1]]]])
    for _ in range(2000):
        now = json.loads(json.dumps(then))
        part = rng.choice([now, *(p for p in now["plans"] if isinstance(p, dict))])
        names = ["reasons", "finished", "wake", "plans", *then["plans"][0]]
        part[rng.choice(names)] = rng.choice(odd)
        for one in (
            find_divergence(1, state, 1.0, then, now),
            find_divergence(1, state, 1.0, now, then),
        ):
            assert isinstance(one, Divergence)
            assert str(one)


@pytest.mark.parametrize(
    ("levels", "kept"), [(MAX_FACT_LEVELS, True), (MAX_FACT_LEVELS + 1, False)]
)
def test_facts_with_too_many_levels_count_as_none(levels: int, kept: bool) -> None:
    state, now = a_run()
    deep: list[Any] = []
    for _ in range(levels - 2):  # the innermost list and the facts are levels, too
        deep = [deep]
    where = find_divergence(1, state, 1.0, now | {"reasons": deep}, now)
    assert where.field == "reasons"
    assert where.expected == (deep if kept else None)


@pytest.mark.parametrize("length", [1, 297, 298, 299, 5000])
def test_a_long_fact_is_cut_and_a_short_one_is_whole(length: int) -> None:
    """300 characters are shown, the quotation marks of JSON among them."""
    was, now = "a" * length, "b" * length
    where = Divergence(3, 4, 0.5, "finished", was, now)
    shown = [f'"{text}"' if length <= 298 else f'"{text[:296]}...' for text in (was, now)]
    assert str(where).endswith(f"finished was {shown[0]}, is {shown[1]}")
