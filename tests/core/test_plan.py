"""What counts as the results of a step."""

from typing import Any

import pytest

from minfer.plan import tokens_of


def test_results_are_read_row_after_row() -> None:
    assert tokens_of(((3, 4), (), (5,))) == (3, 4, 5)
    assert tokens_of(()) == ()
    assert tokens_of(((), ())) == ()


@pytest.mark.parametrize(
    "yields",
    [None, 7, [(1,)], {(1,): 0}, ([1],), ((1,), [2]), ((1.0,),), ((True,),), (("a",),)],
)
def test_what_is_no_tuple_of_tuples_of_whole_numbers_is_nothing(yields: Any) -> None:
    assert tokens_of(yields) is None
