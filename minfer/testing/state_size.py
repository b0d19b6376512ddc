"""The size of a policy's state."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import fields, has

_WORD_BYTES: Final = 64  # of a text or a number that count as one item


def state_size(state: Any) -> int:
    """The number of values in a state, however deep; long texts and numbers count as
    several. What is in it twice counts once.
    """
    seen, todo, size = set[int](), [state], 0
    while todo:
        value = todo.pop()
        size += 1
        match value:
            case str() | bytes():
                size += len(value) // _WORD_BYTES
            case bool() | float() | None:
                pass
            case int():
                size += value.bit_length() // (8 * _WORD_BYTES)
            case _ if id(value) in seen:
                size -= 1
            case _:
                seen.add(id(value))
                todo += _parts(value)
    return size


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return [part for pair in value.items() for part in pair]
    if has(type(value)):
        return [getattr(value, field.name) for field in fields(type(value))]
    if hasattr(value, "__iter__"):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
