"""What the examples show is what a server sends."""

import json
from typing import Any

import pytest

from minfer.effects.serving.description import description
from minfer.effects.serving.endpoints import ENDPOINTS, QUESTIONS
from minfer.effects.serving.examples import EXAMPLES
from tests.effects.served import Serving

# More than the example shows comes back of a response: what was asked for, for one.
PARTLY = ("/v1/responses",)


def shape(value: Any) -> Any:
    """A value's fields, of all depths, and the kinds of what is in them."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) else type(value).__name__


def answered(served: Serving, path: str, **more: Any) -> Any:
    example = EXAMPLES[path]
    if example.body is not None:
        return served.http.post(served.url + path, json={**example.body, **more})
    name = "bundled"
    if path.startswith("/v1/requests"):
        body = EXAMPLES["/v1/completions"].body or {}
        name = served.post("completions", **body).json()["id"]
    return served.get(path.format(name=name))


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_answer_is_as_its_example(bundled: Serving, path: str) -> None:
    found = answered(bundled, path)
    assert found.status_code == 200, found.text
    real, shown = shape(found.json()), shape(EXAMPLES[path].answer)
    assert shown.items() <= real.items() if path in PARTLY else shown == real


@pytest.mark.parametrize("path", [path for path, one in EXAMPLES.items() if one.events])
def test_a_stream_is_as_its_example(bundled: Serving, path: str) -> None:
    lines = answered(bundled, path, stream=True).text.splitlines()
    shown = [
        line for line in EXAMPLES[path].stream.splitlines() if line not in ("", "...")
    ]
    real = [read(line) for line in lines]
    assert all(read(line) in real for line in shown)


def read(line: str) -> Any:
    """A line of a stream; of JSON its shape."""
    data = line.removeprefix("data: ")
    return shape(json.loads(data)) if data.startswith("{") else line


def test_every_endpoint_has_one_and_it_is_described() -> None:
    asked = {one.path for one in ENDPOINTS} | {one.path for one in QUESTIONS}
    assert asked <= EXAMPLES.keys()
    assert {one.path for one in ENDPOINTS if one.streams} == {
        path for path, one in EXAMPLES.items() if one.events
    }
    paths = description()["paths"]
    for path, example in EXAMPLES.items():
        method = "get" if example.body is None else "post"
        operation = paths[path][method]
        answer = operation["responses"]["200"]["content"]["application/json"]
        assert answer["example"] == example.answer
        if example.body is not None:
            body = operation["requestBody"]["content"]["application/json"]
            assert body["example"] == example.body
