"""The two-level log against a tuple."""

import hypothesis.strategies as st
from hypothesis import given

from minfer.values.log import Log


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=40)),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from((1, 3, 64)),
)
def test_a_log_is_a_tuple_that_grows(
    parts: list[list[int]], start: int, stop: int, recent: int
) -> None:
    log, model = (
        Log(tuple(parts[0])) if parts else Log[int](),
        tuple(parts[0]) if parts else (),
    )
    for part in parts[1:]:
        before, kept = log, tuple(log)
        log, model = log.extended(tuple(part), recent), model + tuple(part)
        assert before == kept, "the old log has not changed"
    assert (len(log), tuple(log), log[:]) == (len(model), model, model)
    assert log[start:stop] == model[start:stop]
    assert log == model
    assert log != [*model]
    assert hash(log) == hash(Log(model))
    for i in range(-len(model), len(model)):
        assert log[i] == model[i]


def test_a_slice_of_old_entries_has_none_of_the_recent() -> None:
    assert Log((1, 2, 3), (4, 5, 6))[0:2] == (1, 2)
    assert Log((1, 2, 3), (4, 5, 6))[1:5] == (2, 3, 4, 5)


def test_recent_entries_join_the_old_ones_when_there_are_enough() -> None:
    log = Log[int]()
    for entry in range(8):
        log = log.extended((entry,), 3)
    assert (log.old, log.recent) == ((0, 1, 2, 3, 4, 5), (6, 7))


def test_a_slice_of_only_recent_entries_does_not_touch_the_old_ones() -> None:
    log = Log((1, 2, 3), (4, 5))
    assert log[3:] == (4, 5)
    assert log[3:3] == log[4:2] == log[5:3] == log[5:1] == ()
    assert log[2:4] == (3, 4)
    assert log[1:3] == (2, 3)
    assert [*log] == [1, 2, 3, 4, 5]
    assert log != Log((1, 2, 3), (4, 6))
    assert log != "12345"
