"""JSON objects of several kinds, distinguished by `type`, such as parts of messages.

A few kinds are supported. Others are refused by their type, before their fields are
checked.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import PlainValidator, TypeAdapter, model_validator

from minfer.effects.serving.request_parsing.bodies import (
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.text.message_checks import unsupported


class Spoken(Protocol):
    """A part of content."""

    @property
    def text(self) -> str:
        """Its text."""


class TypedObject(StrictObject):
    """An object of one of the types `kinds`."""

    kinds: ClassVar[tuple[str, ...]]
    type: str

    # Runs before `StrictObject._known`: validators run in reverse order of definition.
    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        """Refuse other types."""
        if isinstance(value, dict) and value.get("type", cls.kinds[0]) not in cls.kinds:
            supported = " or ".join(map(short_json, cls.kinds))
            message = unsupported(value["type"], short_json(value["type"]), supported)
            raise invalid_value(message, "type")
        return value


def read_by_type(classes: Mapping[str, type[StrictObject]], value: object) -> object:
    """An object of the class for its `type`. Raises PydanticCustomError."""
    if not isinstance(value, dict):
        raise invalid_value("must be an object")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in classes:
        supported = " or ".join(map(short_json, classes))
        raise invalid_value(unsupported(kind, short_json(kind), supported), "type")
    return classes[kind].model_validate(value)


def text_or_parts(kind: Any, item_limit: Any) -> PlainValidator:
    """A validator of content that is a text, or a list of parts; `item_limit` bounds
    their number. It keeps the form: some templates distinguish the two.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[list[kind], item_limit])

    def read(value: object) -> object:
        return value if isinstance(value, str) else adapter.validate_python(value)

    return PlainValidator(read, json_schema_input_type=str | list[kind])


def template_content(content: str | Sequence[Spoken]) -> str | list[dict[str, str]]:
    """Content in the form for chat templates."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": segment.text} for segment in content]
