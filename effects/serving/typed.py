"""Objects whose `type` says which of many they are, as parts of messages are.

Of these many, a few are supported. The others are refused by their type, before anything
is said about their fields.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import PlainValidator, TypeAdapter, model_validator

from minfer.effects.serving.bodies import StrictObject, shown, wrong


class Spoken(Protocol):
    """A part of content."""

    @property
    def text(self) -> str:
        """What it says."""


class TypedObject(StrictObject):
    """An object of one of the types `kinds`."""

    kinds: ClassVar[tuple[str, ...]]
    type: str

    # Runs before `StrictObject._known`: what is defined later does.
    @model_validator(mode="before")
    @classmethod
    def _of_a_kind(cls, given: Any) -> Any:
        """Refuse other types."""
        if isinstance(given, dict) and given.get("type", cls.kinds[0]) not in cls.kinds:
            there = " or ".join(map(shown, cls.kinds))
            said = f"{shown(given['type'])} is not supported; there is {there}"
            raise wrong(said, "type")
        return given


def text_or_parts(kind: Any, most: Any) -> PlainValidator:
    """Content that is a text, or a list of parts, `most` so many: to some templates it
    makes a difference which of these it is.
    """
    parts: TypeAdapter[Any] = TypeAdapter(Annotated[list[kind], most])

    def read(given: object) -> object:
        return given if isinstance(given, str) else parts.validate_python(given)

    return PlainValidator(read, json_schema_input_type=str | list[kind])


def told_content(content: str | Sequence[Spoken]) -> str | list[dict[str, str]]:
    """Content as chat templates take it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
