"""Every kind of flaw has words of ours."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.bodies import StrictObject, read_body


class Form(StrictObject):
    whole: Annotated[int, Field(ge=1, le=9)] = 1
    number: Annotated[float, Field(gt=0.5, lt=2.0)] = 1.0
    yes: bool = True
    text: Annotated[str, Field(min_length=1, max_length=3)] = "x"
    several: Annotated[list[int], Field(min_length=1, max_length=2)] | None = None
    by_name: dict[str, int] | None = None
    choice: Literal["a", "b"] = "a"
    off: Literal[False] = False
    needed: int


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("whole", "1", 'must be a whole number, not "1"'),
        ("whole", 1.5, "must be a whole number, not 1.5"),
        ("whole", 0, "must be at least 1, not 0"),
        ("whole", 10, "must be at most 9, not 10"),
        ("number", "x" * 99, f'must be a number, not "{"x" * 64}"'),
        ("number", 0.5, "must be above 0.5, not 0.5"),
        ("number", 2, "must be below 2, not 2"),
        ("yes", 1, "must be true or false, not 1"),
        ("text", [], "must be a string"),
        ("text", "four", "must have at most 3 characters"),
        ("text", "", "must have at least 1 characters"),
        ("several", {}, "must be a list"),
        ("several", [], "must have at least 1 items"),
        ("several", [1, 2, 3], "must have at most 2 items"),
        ("by_name", 5, "must be an object, not 5"),
        ("choice", "c", "must be 'a' or 'b', not \"c\""),
        ("off", True, "must be false, not true"),
        ("needed", None, "is missing"),
    ],
)
def test_validation_errors_are_in_plain_words(field: str, value: Any, words: str) -> None:
    fields = {"needed": 1, field: value}
    with pytest.raises(ApiError) as caught:
        read_body(Form, json.dumps(fields).encode())
    assert str(caught.value) == f"{field}: {words}"
