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
    served_description = bundled.get("/openapi.json").json()
    assert served_description == description()
    routes = []
    for route in bundled.service._routes():
        assert isinstance(route, Route | WebSocketRoute)
        methods = getattr(route, "methods", {"GET"}) - {"HEAD"}
        routes.append((route.path.replace(":path", ""), sorted(methods)))
    described = [
        (path, sorted(map(str.upper, ops)))
        for path, ops in served_description["paths"].items()
    ]
    assert sorted(described) == sorted(routes)


@pytest.mark.parametrize(
    "endpoint", [*ENDPOINTS, *QUERY_ENDPOINTS], ids=lambda endpoint: endpoint.path
)
def test_every_field_of_a_body_is_in_it(endpoint: Any) -> None:
    assert issubclass(endpoint.body, StrictObject)
    api = description()
    post = api["paths"][endpoint.path]["post"]
    assert post["summary"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].removeprefix("#/components/schemas/")
    fields = api["components"]["schemas"][name]["properties"]
    assert (
        fields.keys() == endpoint.body.model_fields.keys() | endpoint.body.neutral.keys()
    )


def schemas(value: Any) -> list[str]:
    """All references in a value."""
    if isinstance(value, list):
        return [ref for item in value for ref in schemas(item)]
    if isinstance(value, dict):
        own_references = [value["$ref"]] if "$ref" in value else []
        return own_references + [ref for item in value.values() for ref in schemas(item)]
    return []


def test_no_reference_leads_nowhere() -> None:
    api = description()
    references = {f"#/components/schemas/{name}" for name in api["components"]["schemas"]}
    assert set(schemas(api)) <= references


def test_every_part_of_a_path_is_a_parameter() -> None:
    for path, operations in description()["paths"].items():
        for operation in operations.values():
            parameters = [
                parameter["name"] for parameter in operation.get("parameters", ())
            ]
            assert parameters == re.findall(r"{(\w+)}", path)


@pytest.mark.parametrize(
    "endpoint", [*ENDPOINTS, *QUERY_ENDPOINTS], ids=lambda endpoint: endpoint.path
)
def test_what_comes_too_late_is_among_the_answers(endpoint: Any) -> None:
    responses = description()["paths"][endpoint.path]["post"]["responses"]
    assert {"408", "504"} <= responses.keys()


def test_a_stream_is_not_described_as_strings() -> None:
    paths = description()["paths"]
    streams = [endpoint.path for endpoint in ENDPOINTS if endpoint.streams]
    assert streams
    for path in streams:
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content["text/event-stream"] == {}


def test_descriptions_of_fields() -> None:
    schemas_by_name = description()["components"]["schemas"]
    chat = schemas_by_name["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["tools"]["enum"] == [None, []]
    assert chat["properties"]["metadata"] == {
        "description": "accepted, and changes nothing"
    }
    n, null = chat["properties"]["n"]["anyOf"]
    assert (n["minimum"], n["maximum"], null["type"]) == (1, 128, "null")
    prompt = schemas_by_name["CompletionBody"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string"} in prompt
    assert schemas_by_name["TextBlock"]["properties"]["type"] == {"enum": ["text"]}


def test_errors_have_the_shape_of_their_protocol() -> None:
    paths = description()["paths"]
    for path, shape in (("/v1/messages", "AnthropicError"), ("/v1/completions", "Error")):
        content = paths[path]["post"]["responses"]["400"]["content"]["application/json"]
        assert content["schema"]["$ref"] == f"#/components/schemas/{shape}"
