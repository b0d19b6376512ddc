"""Constraints in the compiler's language: Lark, JSON schemas, regular expressions.

White space between the tokens of JSON is bounded: a small model may write nothing else up
to its last token, and then its output is no JSON.
"""

import json
import re
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark import check_lark
from minfer.effects.text.grammars.patterns import rewrite_pattern
from minfer.effects.text.grammars.schemas import OPTIONS, check_schema, ends_in_escape
from minfer.sampling.structured import StructuredOutputs

# A blank, or a new line and its indentation.
WHITESPACE: Final = r"(?: |\r?\n[ \t]{0,32})"
# Characters: translating takes time by their square, and holds Python's lock throughout.
MAX_GBNF_CHARS: Final = 8192
# What ends a regular expression.
_REGEX_END: Final = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPED_IN_REGEX: Final = {
    "/": r"\/",
    "\n": r"\n",
    "\r": r"\r",
    "\\\n": r"\n",
    "\\\r": r"\r",
}
TEXT: Final = r"(.|\n)*"  # any, as a regular expression


@frozen
class GrammarText:
    """A constraint in the compiler's language, and its kind."""

    kind: str  # "json", "regex" or "lark"
    text: str


def to_grammar_text(
    constraint: StructuredOutputs, *, compiled: bool = True
) -> GrammarText:
    """A constraint in the compiler's language, its schemas only if it is to be `compiled`
    next. Raises GrammarError.
    """
    param = constraint.param
    match constraint.kind:
        case "regex":
            return GrammarText("regex", _whole_regex(constraint.text, param))
        case "choice":
            # One word of many: of rules, the compiler allows 2,000 at a place.
            return GrammarText(
                "lark", f"start: ONE\nONE: {_alternatives(constraint.choice or ())}"
            )
        case "grammar":
            return GrammarText("lark", _to_lark(constraint.text, param))
        case "json_object":
            return GrammarText("json", '{"type": "object"}')
        case "structural_tag":
            return GrammarText(
                "lark", _structural_tags(constraint.text, param, compiled=compiled)
            )
        case _:
            return GrammarText(
                "json", check_schema(constraint.text, param, compiled=compiled)
            )


def _whole_regex(text: str, param: str) -> str:
    """A regular expression in the compiler's words. It must not end within an escape: the
    compiler, which puts it between slashes, would take the second one for a part of it.
    """
    if ends_in_escape(text):
        raise GrammarError(f"{param}: ends with a single backslash", param)
    try:
        return rewrite_pattern(text, escapes=False)
    except GrammarError as error:
        raise GrammarError(f"{param}: {error}", param) from None


def constraint_rule(constraint: StructuredOutputs) -> str:
    """A constraint as a part of a rule of Lark. Raises GrammarError."""
    grammar = to_grammar_text(constraint, compiled=False)
    match grammar.kind:
        case "json":
            return json_rule(
                grammar.text, whitespace=not constraint.disable_any_whitespace
            )
        case "regex":
            text = _REGEX_END.sub(
                lambda match: _ESCAPED_IN_REGEX.get(match[0], match[0]), grammar.text
            )
            return f"/{text}/"
    return f"%lark {{\n{grammar.text}\n}}"


def json_rule(schema: str, *, whitespace: bool = True) -> str:
    """A part of a rule of Lark that matches a checked schema; without `whitespace`, there
    is none between tokens.
    """
    options: dict[str, Any] = {"whitespace_flexible": whitespace, "lenient": False}
    if whitespace:
        options["whitespace_pattern"] = WHITESPACE
    parsed = json.loads(schema)
    if isinstance(parsed, dict):
        parsed[OPTIONS] = {**parsed.get(OPTIONS, {}), **options}
    return f"%json {json.dumps(parsed)}"


def _alternatives(texts: tuple[str, ...]) -> str:
    return " | ".join(map(quote, dict.fromkeys(texts)))


def quote(text: str) -> str:
    """A text as a terminal of Lark, which reads the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _to_lark(text: str, param: str) -> str:
    """A grammar in Lark's form; what looks like llama.cpp's is translated."""
    if "::=" not in text or any(map(_is_lark, text.splitlines())):
        return check_lark(text, param)
    if len(text) > MAX_GBNF_CHARS:
        reason = f"has {len(text)} characters, of at most {MAX_GBNF_CHARS} in GBNF"
        raise GrammarError(f"{param}: {reason}; write it in Lark", param)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    # It has an error of its own, and raises others for what it does not expect.
    except Exception as error:
        raise GrammarError(
            f"{param}: cannot be translated from GBNF to Lark: {error}", param
        ) from None
    return check_lark(lark, param)


def _is_lark(line: str) -> bool:
    """Whether a line can only be Lark's: its options, or its rule of where to start."""
    line = line.lstrip()
    if line.startswith("%"):
        return True
    after_name = line.removeprefix("start").lstrip()
    return line.startswith("start") and after_name[:1] == ":" and after_name[:3] != "::="


# --- structural tags --------------------------------------------------------------------


@frozen
class _Tag:
    begin: str
    trigger: str  # that it begins with
    schema: str
    end: str


def _structural_tags(text: str, param: str, *, compiled: bool) -> str:
    """Free text with tags in it, as Lark. Raises GrammarError."""
    try:
        tags = [
            _structural_tag(structure, index, text, param, compiled=compiled)
            for index, structure in enumerate(_structures(text))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(
            f'{param}: must be {{"type": "structural_tag", "structures": [{{"begin": '
            f'TEXT, "schema": SCHEMA, "end": TEXT}}, ...], "triggers": [TEXT, ...]}}',
            param,
        ) from None
    names = " | ".join(f"tag_{index}" for index in range(len(tags)))
    lines = [f"start: ({names})* rest", "rest: TEXT", f"TEXT: /{TEXT}/"]
    for index, tag in enumerate(tags):
        texts = [tag.begin[len(tag.trigger) :], tag.end]
        begin, end = (quote(text) if text else "" for text in texts)
        lines += [
            f"head_{index}[lazy]: TEXT {quote(tag.trigger)}",
            f"tag_{index}: head_{index} {begin} {json_rule(tag.schema)} {end}",
        ]
    return "\n".join(lines)


def _structures(text: str) -> list[dict[str, Any]]:
    description = json.loads(text)
    if description["type"] != "structural_tag" or set(description) - {
        *("type", "structures", "triggers")
    }:
        raise ValueError
    structures: list[dict[str, Any]] = description["structures"]
    if not structures or not all(map(str.__len__, description["triggers"])):
        raise ValueError
    return structures


def _structural_tag(
    structure: dict[str, Any], number: int, text: str, param: str, *, compiled: bool
) -> _Tag:
    where = f"structures[{number}]"
    begin, end = structure["begin"], structure["end"]
    if set(structure) - {"begin", "schema", "end"} or not isinstance(end, str):
        raise ValueError
    triggers = json.loads(text)["triggers"]
    trigger = next(
        (candidate for candidate in triggers if begin.startswith(candidate)), None
    )
    if trigger is None:
        reason = f"{param}: {where}: begins with none of the triggers"
        raise GrammarError(reason, param)
    try:
        schema_text = json.dumps(structure["schema"])
        schema = check_schema(schema_text, f"{where}.schema", compiled=compiled)
    except GrammarError as error:
        raise GrammarError(f"{param}: {error}", param) from None
    return _Tag(begin, trigger, schema, end)
