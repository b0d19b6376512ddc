"""The persistent queue against a tuple."""

import hypothesis.strategies as st
from hypothesis import given

from minfer.values.queue import RUN_ENTRIES, Queue


@given(
    st.lists(
        st.tuples(st.integers(0, RUN_ENTRIES + 20), st.integers(0, 100), st.booleans()),
        max_size=40,
    ),
    st.integers(0, 4 * RUN_ENTRIES),
)
def test_a_queue_is_a_tuple_that_changes_at_its_ends(
    changes: list[tuple[int, int, bool]], most: int
) -> None:
    queue, model, number = Queue[int](), tuple[int, ...](), 0
    for count, share, adds in changes:
        before, was = queue, tuple(queue)
        if adds:
            more = tuple(range(number, number + count))
            number += count
            queue = queue.extended(more, most)
            model = (model + more)[-most:] if most else ()
        else:
            gone = len(model) * share // 100
            queue, model = queue.without_first(gone), model[gone:]
        assert tuple(queue) == model
        assert (len(queue), bool(queue)) == (len(model), bool(model))
        assert tuple(before) == was, "the old queue has not changed"
        runs = [queue.runs[number] for number in sorted(queue.runs)]
        assert all(runs)
        assert sum(map(len, runs)) - queue.gone == len(queue)
        assert queue.gone < len(runs[0]) if runs else not queue.gone


def test_short_runs_are_made_longer_and_none_is_copied_that_is_long() -> None:
    queue = Queue[int]()
    for number in range(10 * RUN_ENTRIES):
        queue = queue.extended((number,), 10**6)
    assert [len(run) for run in queue.runs.values()] == [RUN_ENTRIES] * 10
    first = queue.runs[queue.first]
    shorter = queue.without_first(RUN_ENTRIES - 1).extended((1,), 10**6)
    assert shorter.runs[queue.first] is first
    assert [*shorter][:2] == [RUN_ENTRIES - 1, RUN_ENTRIES]
