"""A message is opened without its body being read."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.envelope import (
    MAX_MESSAGE_ID_CHARS,
    CancelMessage,
    RequestMessage,
    open_message,
)

LARGE = 150_000  # characters


def test_a_body_is_what_stood_there() -> None:
    body = '{"a": 1.50, "b": [ "\\u00fc" , 12345678901234567890123 ] , "a": null}'
    text = f' {{ "body" :  {body} , "endpoint":"chat", "id":"\\u00fc" }} '
    message = open_message(text)
    assert message.name == "ü"
    assert message.parse() == RequestMessage("ü", "chat", body.encode())


def test_of_a_request_that_is_to_end() -> None:
    assert open_message('{"cancel": "a"}').parse() == CancelMessage("a")
    assert open_message('{"cancel": ""}').parse() == CancelMessage("")


@pytest.mark.parametrize("size", [MAX_MESSAGE_ID_CHARS, MAX_MESSAGE_ID_CHARS + 1, 50_000])
@pytest.mark.parametrize("letter", ["x", "😀"])
@pytest.mark.parametrize("escaped", [False, True])
def test_ids_are_short(size: int, letter: str, *, escaped: bool) -> None:
    text = json.dumps({"id": letter * size, "body": {}}, ensure_ascii=escaped)
    assert open_message(text).name == (
        letter * size if size <= MAX_MESSAGE_ID_CHARS else ""
    )


NO_OBJECT: dict[str, tuple[str | None, str]] = {
    "binary": (None, "binary"),
    "nothing": ("", "not valid JSON"),
    "half": ('{"id": "a"', "not valid JSON"),
    "half an unknown one": ('{"x": "a"', "not valid JSON"),
    "a list": ("[1]", "must be an object"),
    "a string": ('"id"', "must be an object"),
    "a broken body": ('{"body": {"a": [1, 2}}', "not valid JSON"),
    "too deep a body": ('{"body": ' + "[" * 50_000, "not valid JSON"),
    "too deep a field": ('{"x": ' + "[" * 50_000, "not valid JSON"),
    "two": ("{} {}", "not valid JSON"),
}


@pytest.mark.parametrize(("text", "words"), NO_OBJECT.values(), ids=NO_OBJECT)
def test_what_is_no_object(text: str | None, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        open_message(text)


NO_SENSE: dict[str, tuple[Any, str | None, str]] = {
    "an id that is none": ({"id": ["a"]}, None, "id: must be a string of 1 to 128"),
    "an empty id": ({"id": "", "body": {}}, "", "id: must be"),
    "no endpoint": ({"id": "a", "body": {}}, "a", "endpoint: must be a string"),
    "a text": ({"id": "a", "endpoint": "x", "body": "{}"}, "a", "body: must be"),
    "no body": ({"id": "a", "endpoint": "x"}, "a", "body: must be an object"),
    "unknown": ({"mo`re": 1, "id": "a"}, "a", "mo`re: is not a field here"),
    "a number": ({"cancel": 1}, None, "cancel: must be an id"),
    "both": ({"cancel": "a", "id": "a"}, "a", "and the only field"),
}


@pytest.mark.parametrize(("content", "name", "words"), NO_SENSE.values(), ids=NO_SENSE)
def test_invalid_messages(content: Any, name: str | None, words: str) -> None:
    message = open_message(json.dumps(content))
    assert message.name == name
    with pytest.raises(ApiError, match=words) as caught:
        message.parse()
    assert caught.value.param == words.split(":")[0] or name == "a"


def test_a_long_name_of_a_field_is_cut() -> None:
    with pytest.raises(ApiError) as caught:
        open_message(json.dumps({"x" * LARGE: 1})).parse()
    assert len(str(caught.value)) < 2 * MAX_MESSAGE_ID_CHARS


def quickest(action: Callable[[], object]) -> float:
    """Seconds, at best."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)


@pytest.mark.long
@pytest.mark.parametrize("place", ["id", "endpoint", "body", "cancel", "x"])
def test_nothing_large_is_read_wherever_it_stands(place: str) -> None:
    """Reading it takes twenty to forty times as long on an idle machine."""
    large = "[" + "[]," * (LARGE // 3) + "[]]"
    text = f'{{"{place}": {large}}}'

    def tried() -> None:
        with pytest.raises(ApiError):
            open_message(text).parse()

    assert quickest(tried) < quickest(lambda: from_json(text)) / 4
