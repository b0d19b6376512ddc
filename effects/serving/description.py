"""GET /openapi.json: all endpoints, in the terms of OpenAPI 3.1.

Bodies are described by the models that validate them, so that this cannot be outdated:
fields, bounds, and unsupported fields with the values at which they change nothing. Of
answers it has the schema of errors only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from attrs import frozen
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core.core_schema import ModelSchema

import minfer
from minfer.effects.serving.adapters.updates import LOAD_PATH, UNLOAD_PATH
from minfer.effects.serving.anthropic.error_format import failure as anthropic_failure
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.request_parsing.bodies import ANYTHING, HINT, StrictObject
from minfer.effects.serving.request_parsing.typed_objects import TypedObject

JsonObject = dict[str, Any]
_REF: Final = "#/components/schemas/{model}"
_SUMMARY: Final = (
    "A null is as good as no field. Fields that are not described are refused by name, "
    "with status 400. Every answer has a header x-request-id: the one that was sent, or "
    "a new one."
)


@frozen
class BodylessEndpoint:
    """An endpoint without a body."""

    method: str
    path: str
    summary: str


BODYLESS: Final = (
    BodylessEndpoint("get", "/v1/models", "The names under which the model is served."),
    BodylessEndpoint("get", "/v1/models/{name}", "The model under one of its names."),
    BodylessEndpoint(
        "get", "/v1/requests/{name}", "What is known of a request, by its answer's id."
    ),
    BodylessEndpoint(
        "delete", "/v1/requests/{name}", "Cancel a request, by its answer's id."
    ),
    BodylessEndpoint(
        "get", "/v1/stream", "A WebSocket on which many requests are answered at once."
    ),
    BodylessEndpoint(
        "post",
        LOAD_PATH,
        "Load an adapter (lora_name, lora_path, load_inplace), by an option.",
    ),
    BodylessEndpoint(
        "post", UNLOAD_PATH, "Take an adapter's name away (lora_name), by an option."
    ),
    BodylessEndpoint(
        "post", "/reset_prefix_cache", "Find nothing any more of what is cached now."
    ),
    BodylessEndpoint(
        "get", "/health", "200 only while steps make progress; needs no key."
    ),
    BodylessEndpoint("get", "/healthz", "The same as /health."),
    BodylessEndpoint(
        "get", "/ready", "200 only while new requests are taken; needs no key."
    ),
    BodylessEndpoint("get", "/metrics", "Metrics for Prometheus; needs no key."),
    BodylessEndpoint("get", "/version", "The version of minfer."),
    BodylessEndpoint(
        "get",
        "/tokenizer_info",
        "The tokenizer's configuration, by an option.",
    ),
    BodylessEndpoint(
        "get", "/live", "How the engine is: a stream of events, or one object if once=1."
    ),
    BodylessEndpoint(
        "get",
        "/",
        "A page with a prompt box and a live view of the engine; needs no key.",
    ),
    BodylessEndpoint(
        "get", "/page/{folder}/{name}", "What that page is made of; needs no key."
    ),
    BodylessEndpoint(
        "get", "/favicon.ico", "The icon of these pages, as SVG; needs no key."
    ),
    BodylessEndpoint("get", "/openapi.json", "This description; needs no key."),
)
_STRING_SCHEMA: Final[JsonObject] = {"type": "string"}
_OPENAI_ERROR: Final[JsonObject] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {
                    **_STRING_SCHEMA,
                    "description": "what was wrong, and what to do",
                },
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "the field"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final[JsonObject] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _STRING_SCHEMA, "message": _STRING_SCHEMA},
        },
    },
}
_STATUSES: Final[Mapping[str, str]] = {
    "400": "The request makes no sense, or asks for what is not supported.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "500": "Something failed here.",
    "503": "Too many requests wait, or the server stops.",
    "504": "The answer was not there in time.",
}


class _Schemas(GenerateJsonSchema):
    """Adds the neutral fields of `StrictObject` to pydantic's schemas."""

    def model_schema(self, schema: ModelSchema) -> JsonObject:
        """A body's schema, with the unsupported fields and their neutral values."""
        json_schema = super().model_schema(schema)
        kind = schema["cls"]
        if not issubclass(kind, StrictObject):
            return json_schema
        required = json_schema.get("required", ())
        fields = json_schema.get("properties", {})
        for name in fields.keys() - required:
            fields[name] = _nullable(fields[name])
        if issubclass(kind, TypedObject):
            fields["type"] = {"enum": [*kind.kinds]}
        unsupported = {name: _neutral(values) for name, values in kind.neutral.items()}
        return {
            **json_schema,
            "properties": {**fields, **unsupported},
            "additionalProperties": False,
        }


def _nullable(field: JsonObject) -> JsonObject:
    plain = {name: value for name, value in field.items() if name != "default"}
    choices = field.get("anyOf", [plain])
    if {"type": "null"} in choices:
        return field
    nullable: JsonObject = {"anyOf": [*choices, {"type": "null"}]}
    if field.get("default") not in (None, math.inf):  # which JSON cannot express
        nullable["default"] = field["default"]
    return nullable


def _neutral(values: Sequence[Any]) -> JsonObject:
    if ANYTHING in values or HINT in values:
        return {"description": "accepted, and changes nothing"}
    return {"description": "not supported but at these values", "enum": [None, *values]}


@cache
def description() -> JsonObject:
    """The whole description."""
    endpoints: list[Endpoint | QueryEndpoint] = [*ENDPOINTS, *QUERY_ENDPOINTS]
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schema = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template=_REF,
        schema_generator=_Schemas,
    )
    paths: JsonObject = {}
    for endpoint in endpoints:
        paths[endpoint.path] = {"post": _operation(endpoint)}
    for bodyless in BODYLESS:
        paths.setdefault(bodyless.path, {})[bodyless.method] = _bodyless_operation(
            bodyless
        )
    errors = {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    bearer = {"type": "http", "scheme": "bearer"}
    api_key_header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "minfer",
            "version": minfer.__version__,
            "description": _SUMMARY,
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schema.get("$defs", {}), **errors},
            "securitySchemes": {"key": bearer, "x-api-key": api_key_header},
        },
    }


def _operation(endpoint: Endpoint | QueryEndpoint) -> JsonObject:
    """A POST with a body."""
    body = {"type": "object"} if endpoint.body is None else _ref(endpoint.body.__name__)
    answer: JsonObject = {"application/json": {"schema": {"type": "object"}}}
    streams = isinstance(endpoint, Endpoint) and endpoint.streams
    if streams:
        answer[
            "text/event-stream"
        ] = {}  # no schema: it could describe a single event only
    return {
        "summary": endpoint.summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body}},
        },
        "responses": {
            "200": {
                "description": "The answer; with stream, as events.",
                "content": answer,
            }
            if streams
            else {"description": "The answer.", "content": answer},
            **_failures(endpoint),
        },
    }


def _failures(endpoint: Endpoint | QueryEndpoint) -> JsonObject:
    schema_name = "AnthropicError" if endpoint.failure is anthropic_failure else "Error"
    content = {"application/json": {"schema": _ref(schema_name)}}
    return {
        status: {"description": text, "content": content}
        for status, text in _STATUSES.items()
    }


def _bodyless_operation(endpoint: BodylessEndpoint) -> JsonObject:
    """An operation without a body."""
    operation: JsonObject = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer."},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": _ref("Error")}},
            },
        },
    }
    if names := re.findall(r"{(\w+)}", endpoint.path):
        common = {"in": "path", "required": True, "schema": _STRING_SCHEMA}
        operation["parameters"] = [{"name": name, **common} for name in names]
    if endpoint.path == "/v1/stream":
        switch = {"101": {"description": "It is a WebSocket from here on."}}
        operation["responses"] = {**switch, **operation["responses"]}
        del operation["responses"]["200"]
    return operation


def _ref(name: str) -> JsonObject:
    return {"$ref": _REF.format(model=name)}
