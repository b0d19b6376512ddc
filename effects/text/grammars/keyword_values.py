"""Helpers that add keywords to a schema, or replace a keyword by an equal one."""

from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from minfer.effects.text.grammars.formats import (
    COMPILER_FORMATS,
    LIBRARY_PATTERNS,
    STANDARD_PATTERNS,
)
from minfer.effects.text.grammars.grammar_library import GrammarError, KeywordError

Made = TypeVar("Made")
COMMENTS: Final = frozenset(
    {
        *("$comment", "contentEncoding", "contentMediaType", "contentSchema", "default"),
        *("deprecated", "description", "discriminator", "example", "examples"),
        *("externalDocs", "id", "readOnly", "title", "writeOnly", "xml"),
    }
)


def require(schema: dict[str, Any], word: str, value: Any) -> None:
    """Add a keyword to a schema; if the schema has it already, both values must hold.
    Raises GrammarError for an `allOf` that is no list.
    """
    if word in schema:
        require_all(schema, {word: value})
    else:
        schema[word] = value


def require_all(schema: dict[str, Any], other_schema: Any) -> None:
    """Add another schema, which must hold as well. Raises GrammarError likewise."""
    subschemas = schema.get("allOf", [])
    if not isinstance(subschemas, list):
        raise GrammarError("allOf must be a list of schemas")
    schema["allOf"] = [*subschemas, other_schema]


def read_format(schema: dict[str, Any]) -> None:
    """Replace a format by its pattern, unless it is the compiler's."""
    if not isinstance(name := schema.get("format"), str) or name in COMPILER_FORMATS:
        return
    del schema["format"]
    pattern = STANDARD_PATTERNS.get(name)
    if pattern is None and "pattern" not in schema:
        pattern = LIBRARY_PATTERNS.get(name)
    if pattern is not None:
        require(schema, "pattern", pattern)


def translate_keyword(translate: Callable[..., Made], word: str, *patterns: str) -> Made:
    """Returns the result of `translate` for patterns. Raises KeywordError, which names
    their keyword.
    """
    try:
        return translate(*patterns)
    except GrammarError as error:
        raise KeywordError(str(error), word) from None


def pointer_keys(reference: str) -> list[str]:
    """The keys of a reference's path (a JSON pointer)."""
    steps = unquote(reference).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]
