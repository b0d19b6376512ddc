"""What an event may hold: values of a wrong type or size are refused when it is made."""

import math
from typing import Any

import pytest

from minfer.records.messages import MAX_TEXT, Cancel, Finish, Pause, Submit, Tick, clip
from minfer.records.request import ParameterError, Request

LARGEST = 1.7976931348623157e308


def test_times_are_finite_numbers() -> None:
    for good in (0, 0.0, -5.5, LARGEST, -LARGEST, 10**300):
        assert Tick(good).time == float(good)
    for bad in (math.nan, math.inf, -math.inf, 10**400, True, "1", None):
        with pytest.raises(ParameterError) as caught:
            Tick(bad)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.param == "time"


def test_what_is_submitted_is_a_request() -> None:
    request = Request(id="a", prompt=(1,), max_tokens=1)
    assert Submit(request).request is request
    with pytest.raises(ParameterError, match="must be a Request, not a dict") as caught:
        Submit({"id": "a"})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.param == "request"


@pytest.mark.parametrize("wrong", [3, None, b"a"])
def test_who_is_cancelled_has_a_name(wrong: Any) -> None:
    assert Cancel("a").id == "a"
    with pytest.raises(ParameterError, match="id: must be a string"):
        Cancel(wrong)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (0, "id", 3),
        (1, "sample", "0"),
        (1, "sample", 0.0),
        (1, "sample", 2**63),
        (2, "length", None),
        (2, "length", 2**63),
        (2, "length", True),
        (3, "reason", 3),
    ],
)
def test_fields_of_a_finish_are_of_their_types(place: int, name: str, wrong: Any) -> None:
    fields: list[Any] = ["a", 0, 5, "stop"]
    assert Finish(*fields).length == 5
    fields[place] = wrong
    with pytest.raises(ParameterError) as caught:
        Finish(*fields)
    assert caught.value.param == name


def test_a_pause_is_one_or_none() -> None:
    assert not Pause("a", 0, paused=False).paused
    for wrong in (0, 1, None, "no"):
        with pytest.raises(ParameterError) as caught:
            Pause("a", 0, paused=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "paused"


def test_texts_are_cut_to_what_a_record_keeps() -> None:
    assert clip("a" * MAX_TEXT) == "a" * MAX_TEXT
    assert clip("a" * (MAX_TEXT + 1)) == "a" * (MAX_TEXT - 3) + "..."
    assert clip("") == ""
    assert clip(3) == "a int"
