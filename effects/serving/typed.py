"""Objects whose `type` says which of many they are, as parts of messages are.

Of these many, a few are supported. The others are refused by their type, before anything
is said about their fields.
"""

from typing import Any, ClassVar

from pydantic import model_validator

from minfer.effects.serving.bodies import StrictObject, shown, wrong


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


def as_parts(kind: str, content: object) -> object:
    """Content as a list of parts: a string is one, of the type `kind`."""
    return [{"type": kind, "text": content}] if isinstance(content, str) else content
