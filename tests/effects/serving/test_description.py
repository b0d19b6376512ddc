"""The description says what is there: every path, and every field with its bounds."""

import re
from typing import Any

import pytest
from starlette.routing import Route, WebSocketRoute

from minfer.effects.serving.description import description
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.request_parsing.bodies import StrictObject
from tests.effects.served import Serving


def test_every_route_is_in_it(bundled: Serving) -> None:
    found = bundled.get("/openapi.json").json()
    assert found == description()
    routes = []
    for route in bundled.service._routes():
        assert isinstance(route, Route | WebSocketRoute)
        methods = getattr(route, "methods", {"GET"}) - {"HEAD"}
        routes.append((route.path.replace(":path", ""), sorted(methods)))
    reported = [
        (path, sorted(map(str.upper, ops))) for path, ops in found["paths"].items()
    ]
    assert sorted(reported) == sorted(routes)


@pytest.mark.parametrize("one", [*ENDPOINTS, *QUERY_ENDPOINTS], ids=lambda one: one.path)
def test_every_field_of_a_body_is_in_it(one: Any) -> None:
    assert issubclass(one.body, StrictObject)
    made = description()
    post = made["paths"][one.path]["post"]
    assert post["summary"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].removeprefix("#/components/schemas/")
    fields = made["components"]["schemas"][name]["properties"]
    assert fields.keys() == one.body.model_fields.keys() | one.body.neutral.keys()


def schemas(found: Any) -> list[str]:
    """All references in a value."""
    if isinstance(found, list):
        return [ref for one in found for ref in schemas(one)]
    if isinstance(found, dict):
        own = [found["$ref"]] if "$ref" in found else []
        return own + [ref for one in found.values() for ref in schemas(one)]
    return []


def test_no_reference_leads_nowhere() -> None:
    made = description()
    there = {f"#/components/schemas/{name}" for name in made["components"]["schemas"]}
    assert set(schemas(made)) <= there


def test_every_part_of_a_path_is_a_parameter() -> None:
    for path, operations in description()["paths"].items():
        for operation in operations.values():
            reported = [one["name"] for one in operation.get("parameters", ())]
            assert reported == re.findall(r"{(\w+)}", path)


@pytest.mark.parametrize("one", [*ENDPOINTS, *QUERY_ENDPOINTS], ids=lambda one: one.path)
def test_what_comes_too_late_is_among_the_answers(one: Any) -> None:
    reported = description()["paths"][one.path]["post"]["responses"]
    assert {"408", "504"} <= reported.keys()


def test_a_stream_is_not_described_as_strings() -> None:
    paths = description()["paths"]
    streams = [one.path for one in ENDPOINTS if one.streams]
    assert streams
    for path in streams:
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content["text/event-stream"] == {}


def test_descriptions_of_fields() -> None:
    made = description()["components"]["schemas"]
    chat = made["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["tools"]["enum"] == [None, []]
    assert chat["properties"]["metadata"] == {
        "description": "accepted, and changes nothing"
    }
    n, null = chat["properties"]["n"]["anyOf"]
    assert (n["minimum"], n["maximum"], null["type"]) == (1, 128, "null")
    prompt = made["CompletionBody"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string"} in prompt
    assert made["TextBlock"]["properties"]["type"] == {"enum": ["text"]}


def test_errors_have_the_shape_of_their_protocol() -> None:
    paths = description()["paths"]
    for path, shape in (("/v1/messages", "AnthropicError"), ("/v1/completions", "Error")):
        reported = paths[path]["post"]["responses"]["400"]["content"]["application/json"]
        assert reported["schema"]["$ref"] == f"#/components/schemas/{shape}"
