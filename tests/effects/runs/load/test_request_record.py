"""Latencies of one request, by their definitions."""

import pytest

from minfer.effects.runs.load.request_record import (
    RequestFailure,
    RequestRecord,
    one_line,
)


def test_latencies_are_those_of_the_definitions() -> None:
    one = RequestRecord(0, due=1, sent=2, ended=9, events=(5, 6, 9), output_tokens=5)
    assert one.ttft == 3
    assert one.e2el == 7
    assert one.tpot == 1  # four tokens in the four seconds after the first
    assert one.completed


@pytest.mark.parametrize(
    "one",
    [
        RequestRecord(0, 0, 0, 1, events=(1.0,), output_tokens=1),
        RequestRecord(0, 0, 0, 1, output_tokens=5),
    ],
)
def test_without_a_second_token_there_is_no_tpot(one: RequestRecord) -> None:
    assert one.tpot is None


def test_a_failure_is_not_completed() -> None:
    assert not RequestRecord(0, 0, 0, 1, failure=RequestFailure("a", "b")).completed


def test_a_message_fits_on_a_line() -> None:
    assert one_line("a\n b\x1b[31m\t" + "c" * 1000) == ("a b?[31m " + "c" * 1000)[:300]
