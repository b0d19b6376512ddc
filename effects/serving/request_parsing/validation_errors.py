"""Errors of fields, in plain words.

pydantic validates bodies, and has a kind for each error. Its own messages speak of
integers and strings that "should be valid"; these say what to send instead.
"""

import json
from collections.abc import Mapping
from typing import Final

from pydantic_core import ErrorDetails

_MAX_TEXT_CHARS: Final = 64  # of a text that an error shows
_MAX_JSON_CHARS: Final = 80  # of a value as JSON

# By kind: what a value must be. In braces: the bound that was violated.
_MUST_BE: Final[Mapping[str, str]] = {
    "bool_type": "be true or false",
    "dict_type": "be an object",
    "finite_number": "be a finite number",
    "float_type": "be a number",
    "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}",
    "int_from_float": "be a whole number",
    "int_parsing_size": "be a smaller whole number",
    "int_type": "be a whole number",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "list_type": "be a list",
    "literal_error": "be {expected}",
    "model_type": "be an object",
    "string_type": "be a string",
    "string_unicode": "be valid Unicode",
}
# Likewise, where showing the value itself would not help.
_MUST_HAVE: Final[Mapping[str, str]] = {
    "string_too_long": "have at most {max_length} characters",
    "string_too_short": "have at least {min_length} characters",
    "too_long": "have at most {max_length} items",
    "too_short": "have at least {min_length} items",
}
_LITERALS: Final = {"True": "true", "False": "false"}  # Python's spelling, and JSON's


def describe_error(error: ErrorDetails) -> str:
    """The error of a value, without its field's name."""
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    bounds = {name: _json_form(bound) for name, bound in error.get("ctx", {}).items()}
    if (must := _MUST_HAVE.get(kind)) is not None:
        return f"must {must.format_map(bounds)}"
    if (must := _MUST_BE.get(kind)) is not None:
        return f"must {must.format_map(bounds)}{_shown_value(error['input'])}"
    return error["msg"]  # from `bodies.invalid_value`, as a rule


def _json_form(bound: object) -> str:
    """A bound in the form of JSON."""
    is_whole = isinstance(bound, float) and bound.is_integer()
    text = str(int(bound)) if is_whole else str(bound)  # type: ignore[call-overload]
    return _LITERALS.get(text, text)


def _shown_value(value: object) -> str:
    """The wrong value, if it is short enough to help."""
    if not isinstance(value, str | int | float):
        return ""
    cut = value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
    return f", not {json.dumps(cut)[:_MAX_JSON_CHARS]}"
