"""Constraints of an answer, in the various fields of requests.

OpenAI's `response_format` (and `text.format`, of responses), vLLM's `structured_outputs`,
and the older `guided_json` and its like. At most one of them may have a constraint. It
becomes a `StructuredOutputs`, and errors name the field that it came from.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

import attrs
from attrs import frozen
from pydantic import Field

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.bodies import StrictObject
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.typed_objects import TypedObject
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.schemas import check_schema
from minfer.records.request import ParameterError
from minfer.sampling.structured import FIELD, MAX_CONSTRAINT, StructuredOutputs

# A schema in a client's body; a string has it as text.
Schema = dict[str, Any] | bool | str
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CONSTRAINT)]
_CONSTRAINT_FIELDS: Final = frozenset(
    parameter.name for parameter in attrs.fields(StructuredOutputs)
)
_MAX_NAME_CHARS: Final = 64


@frozen
class Constraint:
    """A constraint, by the names of `StructuredOutputs`, and its field."""

    values: Mapping[str, Any]
    field: str  # of the body, with dots

    def build(self) -> StructuredOutputs:
        """The `StructuredOutputs`. Raises ApiError, which names the field."""
        if unknown := sorted(self.values.keys() - _CONSTRAINT_FIELDS):
            name = f"{self.field}.{unknown[0][:_MAX_NAME_CHARS]}"
            raise ApiError(f"{name}: is not a field here; leave it out", name)
        try:
            values = {
                name: value for name, value in self.values.items() if value is not None
            }
            return StructuredOutputs(**values)
        except ParameterError as error:
            param = client_field(error.param, self.field)
            reason = str(error).removeprefix(f"{error.param}: ")
            raise ApiError(f"{param}: {reason}", param) from None


def client_field(param: str | None, field: str) -> str:
    """The client's name of a field of `StructuredOutputs`, which came in `field`."""
    return param if field == FIELD and param is not None else field


class ResponseFormat(TypedObject):
    """OpenAI's, with vLLM's structural tags. What cannot be enforced of a schema is
    refused if it is `strict`, and free otherwise.
    """

    kinds = ("text", "json_object", "json_schema", "structural_tag")
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def constraint(self) -> Constraint | None:
        """The constraint of the format, if any. Raises ApiError."""
        field = "response_format"
        match self.type:
            case "json_object":
                return Constraint({"json_object": True}, field)
            case "json_schema":
                return schema_constraint(self.json_schema, f"{field}.json_schema")
            case "structural_tag":
                structural_tag = self.model_dump(
                    include={"type", "structures", "triggers"}
                )
                return Constraint({"structural_tag": structural_tag}, field)
        return None


def schema_constraint(
    json_schema: Mapping[str, Any] | None, field_path: str
) -> Constraint:
    """The constraint of OpenAI's object around a schema. Raises ApiError."""
    if json_schema is None:
        raise ApiError(f"{field_path}: is missing", field_path)
    name, strict, description = (
        json_schema.get(key) for key in ("name", "strict", "description")
    )
    short = isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS
    messages = {
        "name": "" if short else f"must be a text of 1 to {_MAX_NAME_CHARS} characters",
        "strict": "" if isinstance(strict, bool | None) else "must be true or false",
        "description": "" if isinstance(description, str | None) else "must be a text",
        "schema": ""
        if isinstance(json_schema.get("schema"), dict)
        else "must be an object",
    }
    unknown = dict.fromkeys(
        json_schema.keys() - messages, "is not a field here; leave it out"
    )
    for key, message in {**messages, **dict(sorted(unknown.items()))}.items():
        if message:
            field = f"{field_path}.{key[:_MAX_NAME_CHARS]}"
            raise ApiError(f"{field}: {message}", field)
    schema, field = json.dumps(json_schema["schema"]), f"{field_path}.schema"
    if not strict and _schema_error(schema, field):
        note_ignored(field)
        schema = _lenient_schema(schema, field)
    return Constraint({"json": schema}, field)


@lru_cache(maxsize=16)  # a body is asked for its constraint several times
def _schema_error(schema: str, field: str) -> str:
    """Why a schema cannot be enforced; empty if it can."""
    try:
        check_schema(schema, field)
    except GrammarError as error:
        return str(error)
    return ""


@lru_cache(maxsize=16)
def _lenient_schema(schema: str, field: str) -> str:
    """A schema without the parts that cannot be enforced. Raises ApiError for an invalid
    schema.
    """
    try:
        return check_schema(schema, field, lenient=True)
    except GrammarError as error:
        raise ApiError(str(error), field) from None


class ConstrainedBody(StrictObject):
    """The fields of a body that constrain its answer."""

    response_format: ResponseFormat | None = None
    # vLLM's:
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def constraint(self) -> Constraint | None:
        """The only constraint, if any. Raises ApiError for more than one."""
        candidates = []
        if self.response_format is not None:
            candidates += [self.response_format.constraint()]
        if self.structured_outputs is not None:
            candidates.append(Constraint(self.structured_outputs, FIELD))
        for kind in ("json", "regex", "choice", "grammar"):
            field = f"guided_{kind}"
            if (value := getattr(self, field)) is not None:
                candidates.append(Constraint({kind: value}, field))
        constraints = [candidate for candidate in candidates if candidate is not None]
        if len(constraints) > 1:
            first, second, *_ = (constraint.field for constraint in constraints)
            raise ApiError(f"{second}: {first} is set, too; leave one out", second)
        return constraints[0] if constraints else None
