"""What could be valid passes; what could not is refused early."""

import json
from typing import Any, Final

import pytest

from minfer.effects.live.errors import TooLongError
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.body_counts import (
    MAX_CONTAINERS,
    MAX_LIST_ITEMS,
    BodyCounter,
)

TEXT: Final = 40_000  # characters
PART: Final = 2**16  # bytes
SOLO: Final = [{"role": "user", "content": "a, b"}]
VALID: Final[dict[str, Any]] = {
    "a context of ids": {"prompt": [7] * 2047},
    "many prompts of ids": {"prompt": [[7] * 2000] * 100},
    "many short prompts": {"prompt": [[7, 5]] * MAX_LIST_ITEMS},
    "long numbers": {"prompt": [1.000000000000001e-300] * 2047},
    "a text of commas": {"prompt": "," * TEXT},
    "a text of quotes": {"prompt": '"' * TEXT},
    "a text of brackets": {"prompt": "[{" * (TEXT // 2)},
    "a text of emoji": {"prompt": "\U0001f600" * TEXT},
    "texts of commas": {"prompt": ["," * TEXT] * 10},
    "messages": {"messages": SOLO * MAX_LIST_ITEMS},
    "parts": {"messages": [{"role": "user", "content": SOLO * MAX_LIST_ITEMS}]},
}
FAR: Final = "maximum context length is 2048 tokens"
HOSTILE: Final[dict[str, tuple[Any, str]]] = {
    "ids": ({"prompt": [7] * 1_000_000, "max_tokens": 1}, FAR),
    "a text": ({"prompt": "a" * 4_000_000}, FAR),
    "brackets": ({"messages": [[]] * 500_000}, "lists and objects"),
}


def parts(body: Any) -> list[bytes]:
    data = json.dumps(body).encode()
    return [data[begin : begin + PART] for begin in range(0, len(data), PART)]


def add_all(counter: BodyCounter, chunks: list[bytes]) -> None:
    for chunk in chunks:
        counter.add(chunk)


def count(body: Any) -> int:
    """How many parts were taken."""
    counter = BodyCounter(2048, TEXT)
    for num_taken, chunk in enumerate(parts(body)):
        try:
            counter.add(chunk)
        except (ApiError, TooLongError):
            return num_taken
    return len(parts(body))


@pytest.mark.parametrize("body", VALID.values(), ids=VALID)
def test_what_could_be_valid_passes(body: dict[str, Any]) -> None:
    assert count(body) == len(parts(body))


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_not_is_refused_before_it_is_there(name: str) -> None:
    body, message = HOSTILE[name]
    counter = BodyCounter(2048, TEXT)
    kind = TooLongError if message == FAR else ApiError
    with pytest.raises(kind, match=message):
        add_all(counter, parts(body))
    assert count(body) < 0.6 * len(parts(body))


def test_how_a_body_is_cut_does_not_matter() -> None:
    data = json.dumps({"messages": SOLO * 50, "prompt": [7, 8]}).encode()
    at_once, bytewise = BodyCounter(2048, TEXT), BodyCounter(2048, TEXT)
    at_once.add(data)
    for byte in data:
        bytewise.add(bytes([byte]))
    assert at_once == bytewise
    assert at_once.commas == data.count(b",")
    assert at_once.containers == data.count(b"[") + data.count(b"{") == 53
    assert at_once.quotes == data.count(b'"')


def test_lists_are_bounded() -> None:
    counter = BodyCounter(2048, TEXT)
    counter.add(b"[" * MAX_CONTAINERS)
    with pytest.raises(ApiError, match="lists and objects"):
        counter.add(b"{")
