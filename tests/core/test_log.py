"""The two-level log against a tuple."""

import hypothesis.strategies as st
from hypothesis import given

from minfer.log import Log


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=40)),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from((1, 3, 64)),
)
def test_a_log_is_a_tuple_that_grows(
    parts: list[list[int]], start: int, stop: int, recent: int
) -> None:
    log, model = Log(tuple(parts[0])) if parts else Log[int](), tuple(parts[0]) if parts else ()
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
