"""Checks messages before a chat template renders them: a template drops unknown parts
without an error.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_BESIDE_CONTENT: Final = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_MAX_SHOWN_CHARS: Final = 80  # of a value in an error
_MEDIUM: Final = re.compile(r"(input_)?(image|audio|video)(_url)?")  # types of parts


def message_error(message: Any) -> str | None:
    """The error of a message, beginning with its field; None if the message is valid."""
    if not isinstance(message, Mapping):
        return f": must be an object with role and content, not {_kind(message)}"
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(ROLES)
        return f".role: {_shown(role)} is not supported; there is {roles}"
    content = message.get("content")
    if content is None:
        # The server may have sent an answer without text before.
        empty = role == "assistant" and (
            "content" in message or any(message.get(field) for field in _BESIDE_CONTENT)
        )
        return None if empty else ".content: is missing"
    if isinstance(content, str):
        return None
    if not isinstance(content, list | tuple):
        return f".content: must be a string or a list of parts, not {_kind(content)}"
    errors = (
        (index, _part_error(content_part)) for index, content_part in enumerate(content)
    )
    return next((f".content[{index}]{error}" for index, error in errors if error), None)


def unsupported(kind: object, shown: str, supported: str) -> str:
    """The error about a type of parts, `shown` in it, other than the `supported` ones."""
    is_medium = isinstance(kind, str) and _MEDIUM.fullmatch(kind)
    note = ": models read text here, multimodal ones too" if is_medium else ""
    return f"{shown} is not supported{note}; there is {supported}"


def _part_error(content_part: Any) -> str | None:
    if not isinstance(content_part, Mapping):
        return f": must be an object, not {_kind(content_part)}"
    if content_part.get("type") != "text":
        kind = content_part.get("type")
        return ".type: " + unsupported(kind, _shown(kind), '"text"')
    if not isinstance(content_part.get("text"), str):
        return f".text: must be a string, not {_kind(content_part.get('text'))}"
    return None


def _shown(value: object) -> str:
    return json.dumps(value, default=_kind)[:_MAX_SHOWN_CHARS]


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
