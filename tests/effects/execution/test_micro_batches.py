"""Plans cut into micro-batches, and their results put together again."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.execution.ranks.micro_batches import merge_results, micro_batches
from minfer.records.messages import Executed
from minfer.records.plan import Copy, Grow, NewRow, Plan, PrefillTokens
from minfer.sampling.reference_sampler import RowSampling

SAMPLING = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of rows, some of which are opened, filled, grown, copied to, deferred."""
    rows = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True))
    size = len(rows)
    some = draw(st.sets(st.integers(0, size - 1)))
    opens = tuple(
        NewRow(i, (f"r{i}", 0), (1, 2), 2, 9, SAMPLING, ((100 + i, 200 + i),))
        for i in some
    )
    return Plan(
        step=draw(st.integers(0, 9)),
        run_ids=tuple(range(50, 50 + size)),
        rows=tuple(rows),
        starts=tuple(range(size)),
        num_scheduled_tokens=(1,) * size,
        max_sampled_tokens=(1,) * size,
        fills=tuple(PrefillTokens(i, (i, i + 1)) for i in some),
        opens=opens,
        grows=tuple(Grow(rows[i], 3, (300 + i,)) for i in draw(st.sets(st.just(0)))),
        copies=tuple(Copy(7, 100 + i, 3) for i in some),
        deferred=tuple(sorted(draw(st.sets(st.integers(0, size - 1))))),
    )


@given(plans(), st.integers(1, 4))
def test_each_row_is_in_one_micro_batch_with_all_that_is_its_own(
    plan: Plan, count: int
) -> None:
    parts = micro_batches(plan, count)
    assert sorted(entry for part in parts for entry in part.entries) == [
        *range(len(plan.rows))
    ]
    found = [0] * 4
    for part in parts:
        own, step = part.plan, part.plan.step
        assert {row % count for row in own.rows} == {step % count}
        assert step // count == plan.step
        for at, entry in enumerate(part.entries):
            columns = (
                "run_ids",
                "rows",
                "starts",
                "num_scheduled_tokens",
                "max_sampled_tokens",
            )
            assert all(
                getattr(own, name)[at] == getattr(plan, name)[entry] for name in columns
            )
            assert (at in own.deferred) == (entry in plan.deferred)
        moved = [evolve(one, index=part.entries[one.index]) for one in own.fills]
        assert moved == [one for one in plan.fills if one.index in part.entries]
        moved_opens = [evolve(one, index=part.entries[one.index]) for one in own.opens]
        assert moved_opens == [one for one in plan.opens if one.index in part.entries]
        targets = {block for one in own.opens for table in one.tables for block in table}
        assert {one.target for one in own.copies} <= targets
        for i, of in enumerate((own.fills, own.opens, own.grows, own.copies)):
            found[i] += len(of)
    sizes = (plan.fills, plan.opens, plan.grows, plan.copies)
    assert found == [len(one) for one in sizes]


@given(plans(), st.integers(1, 4))
def test_results_come_back_in_the_plan_s_order(plan: Plan, count: int) -> None:
    wanted = Executed(plan.step, tuple((row,) for row in plan.rows))
    parts = [
        (part, Executed(part.plan.step, tuple((row,) for row in part.plan.rows)))
        for part in micro_batches(plan, count)
    ]
    assert merge_results(plan, parts) == wanted
