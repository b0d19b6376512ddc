"""Objects of other types are refused by their type, not by their fields."""

import json
from typing import Annotated, Any

import pytest
from pydantic import Field

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.bodies import StrictObject, read_body
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    template_content,
    text_or_parts,
)


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


class Part(TypedObject):
    kinds = ("text",)
    text: str


class Says(StrictObject):
    content: Annotated[str | list[Part], text_or_parts(Part, Field(max_length=2))]


def test_a_text_stays_a_text_and_parts_stay_parts() -> None:
    for content in (
        "x",
        [],
        [{"type": "text", "text": ""}, {"type": "text", "text": "x"}],
    ):
        read = read_body(Says, json.dumps({"content": content}).encode())
        assert template_content(read.content) == content


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (5, "content"),
        ([5], "content[0]"),
        ([{"type": "text", "text": 5}], "content[0].text"),
        ([{"type": "text", "text": ""}, {"type": "image"}], "content[1].type"),
        ([{"type": "text", "text": ""}] * 3, "content"),
    ],
)
def test_wrong_parts_are_refused_by_their_place(content: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(Says, json.dumps({"content": content}).encode())
    assert caught.value.param == param
