"""Plans cut into micro-batches, and their results put together again."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.execution.ranks.micro_batches import merge_results, micro_batches
from minfer.records.messages import Executed
from minfer.records.plan import Copy, Grow, NewRow, Plan, PrefillTokens, SaveState
from minfer.sampling.reference_sampler import RowSampling

SAMPLING = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of rows, some of which are opened, filled, grown, copied to, deferred."""
    rows = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True))
    size = len(rows)
    row_set = draw(st.sets(st.integers(0, size - 1)))
    opens = tuple(
        NewRow(i, (f"r{i}", 0), (1, 2), 2, 9, SAMPLING, ((100 + i, 200 + i),))
        for i in row_set
    )
    return Plan(
        step=draw(st.integers(0, 9)),
        run_ids=tuple(range(50, 50 + size)),
        rows=tuple(rows),
        starts=tuple(range(size)),
        num_scheduled_tokens=(1,) * size,
        max_sampled_tokens=(1,) * size,
        fills=tuple(PrefillTokens(i, (i, i + 1)) for i in row_set),
        opens=opens,
        grows=tuple(Grow(rows[i], 3, (300 + i,)) for i in draw(st.sets(st.just(0)))),
        copies=tuple(Copy(7, 100 + i, 3) for i in row_set),
        deferred=tuple(sorted(draw(st.sets(st.integers(0, size - 1))))),
        saves=tuple(
            SaveState(i, (400 + i,))
            for i in sorted(draw(st.sets(st.integers(0, size - 1))))
        ),
    )


@given(plans(), st.integers(1, 4))
def test_each_row_is_in_one_micro_batch_with_all_that_is_its_own(
    plan: Plan, count: int
) -> None:
    step_parts = micro_batches(plan, count)
    assert sorted(
        entry for micro_batch in step_parts for entry in micro_batch.entries
    ) == [*range(len(plan.rows))]
    counts = [0] * 5
    for micro_batch in step_parts:
        part_plan, step = micro_batch.plan, micro_batch.plan.step
        assert {row % count for row in part_plan.rows} == {step % count}
        assert step // count == plan.step
        for place, entry in enumerate(micro_batch.entries):
            columns = (
                "run_ids",
                "rows",
                "starts",
                "num_scheduled_tokens",
                "max_sampled_tokens",
            )
            assert all(
                getattr(part_plan, name)[place] == getattr(plan, name)[entry]
                for name in columns
            )
            assert (place in part_plan.deferred) == (entry in plan.deferred)
        moved = [
            evolve(item, index=micro_batch.entries[item.index])
            for item in part_plan.fills
        ]
        assert moved == [item for item in plan.fills if item.index in micro_batch.entries]
        moved_opens = [
            evolve(item, index=micro_batch.entries[item.index])
            for item in part_plan.opens
        ]
        assert moved_opens == [
            item for item in plan.opens if item.index in micro_batch.entries
        ]
        for save in part_plan.saves:
            entry = micro_batch.entries[save.index]
            assert save.pages == (400 + entry,)
        targets = {
            block for item in part_plan.opens for table in item.tables for block in table
        }
        assert {item.target for item in part_plan.copies} <= targets
        for i, kind in enumerate(
            (
                part_plan.fills,
                part_plan.opens,
                part_plan.grows,
                part_plan.copies,
                part_plan.saves,
            )
        ):
            counts[i] += len(kind)
    sizes = (plan.fills, plan.opens, plan.grows, plan.copies, plan.saves)
    assert counts == [len(item) for item in sizes]


def test_what_a_save_overwrites_is_copied_with_the_first_micro_batch() -> None:
    """Row 1 starts from a state in page 7, which the save of row 0 takes."""
    opened = NewRow(1, ("r", 0), (1,) * 9, 9, 20, SAMPLING, ((100,), (101, 102)))
    plan = Plan(
        step=3,
        run_ids=(50, 51),
        rows=(0, 1),
        starts=(3, 8),
        num_scheduled_tokens=(1, 1),
        max_sampled_tokens=(1, 1),
        fills=(PrefillTokens(1, (1,)),),
        opens=(opened,),
        copies=(Copy(7, 101, 4), Copy(8, 102, 4)),
        saves=(SaveState(0, (9, 7)),),
    )
    first, second = (part.plan for part in micro_batches(plan, 2))
    assert (first.copies, first.saves) == (plan.copies[:1], plan.saves)
    assert (second.copies, second.opens) == (plan.copies[1:], (evolve(opened, index=0),))


@given(plans(), st.integers(1, 4))
def test_results_come_back_in_the_plan_s_order(plan: Plan, count: int) -> None:
    expected = Executed(plan.step, tuple((row,) for row in plan.rows))
    results = [
        (
            micro_batch,
            Executed(
                micro_batch.plan.step, tuple((row,) for row in micro_batch.plan.rows)
            ),
        )
        for micro_batch in micro_batches(plan, count)
    ]
    assert merge_results(plan, results) == expected
