"""Checks of messages before a chat template sees them: a template drops what it does not
know, without an error.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_BESIDE_CONTENT: Final = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_LONGEST_SHOWN: Final = 80  # characters of a value that an error shows


def message_error(message: Any) -> str | None:
    """What is wrong with a message, beginning with its field; None if it can be read."""
    if not isinstance(message, Mapping):
        return f": must be an object with role and content, not {_kind(message)}"
    role = message.get("role")
    if role not in ROLES:
        there = ", ".join(ROLES)
        return f".role: {_shown(role)} is not supported; there is {there}"
    content = message.get("content")
    if content is None:
        # An answer without text may have been handed out.
        empty = role == "assistant" and (
            "content" in message or any(message.get(one) for one in _BESIDE_CONTENT)
        )
        return None if empty else ".content: is missing"
    if isinstance(content, str):
        return None
    if not isinstance(content, list | tuple):
        return f".content: must be a string or a list of parts, not {_kind(content)}"
    wrong = ((index, _part_error(part)) for index, part in enumerate(content))
    return next((f".content[{index}]{why}" for index, why in wrong if why), None)


def _part_error(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return f": must be an object, not {_kind(part)}"
    if part.get("type") != "text":
        return f'.type: {_shown(part.get("type"))} is not supported; there is "text"'
    if not isinstance(part.get("text"), str):
        return f".text: must be a string, not {_kind(part.get('text'))}"
    return None


def _shown(value: object) -> str:
    return json.dumps(value, default=_kind)[:_LONGEST_SHOWN]


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
