"""What counts as the results of a step."""

from typing import Any

import pytest

from minfer.records.plan import flaw_beside, tokens_of
from minfer.records.token_logprobs import TokenLogprobs


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


SIZES = (2, 0, 1)  # tokens of three rows
SCORE = TokenLogprobs(7, -0.5, 1)


def test_log_probabilities_are_none_or_one_for_each_token_of_a_row() -> None:
    assert flaw_beside(((SCORE, SCORE), (), ()), (), SIZES) == ""
    short, rows, listed = ((SCORE,), (), ()), ((SCORE, SCORE), ()), ([SCORE] * 2, (), ())
    more = ((SCORE, SCORE), (), (), ())
    several: tuple[Any, ...] = (None, [], short, rows, more, listed)
    for wrong in several:
        assert flaw_beside(wrong, (), SIZES).startswith("log-probabilities must be")


def test_pooled_vectors_are_none_or_bytes_for_each_row() -> None:
    for right in ((), (b"", b"abcd", b""), (b"",) * 3):
        assert flaw_beside((), right, SIZES) == ""
    wrong: Any
    for wrong in (None, [b""] * 3, (b"",), (b"",) * 4, (b"", "", b""), ((), (), ())):
        assert flaw_beside((), wrong, SIZES).startswith("pooled vectors must be")
