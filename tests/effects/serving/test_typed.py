"""Objects of other types are refused by their type, not by their fields."""

import json
from typing import Any

import pytest

from minfer.effects.serving.bodies import read_body
from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.typed import TypedObject, as_parts


class Shape(TypedObject):
    kinds = ("circle", "disc")
    type: str = "circle"
    radius: float


def read(**fields: Any) -> Shape:
    return read_body(Shape, json.dumps(fields).encode())


def test_its_types_are_read() -> None:
    assert read(type="disc", radius=1.0).type == "disc"
    assert read(radius=1.0).type == "circle"


@pytest.mark.parametrize("kind", ["square", 5, ["circle"]])
def test_other_types_are_refused_whatever_their_fields(kind: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read(type=kind, side=2)
    assert caught.value.param == "type"
    words = f'{json.dumps(kind)} is not supported; there is "circle" or "disc"'
    assert words in str(caught.value)


def test_a_string_is_one_part() -> None:
    assert as_parts("text", "x") == [{"type": "text", "text": "x"}]
    assert as_parts("text", [1]) == [1]
