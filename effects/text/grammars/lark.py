"""Checks of users' grammars in Lark's form, before they go to the compiler.

The compiler calls itself for each rule that a rule refers to, and again for brackets:
rules that refer to each other in a long chain would overflow the stack, and kill the
process. So their number is bounded, with their brackets. Schemas in a grammar are checked
like any others, and tokens that are referred to by name become ids, as the compiler's
vocabulary has no names (`vocabulary.py`).

Before and between masks the compiler adds text for as long as only one letter may come.
Two repetitions of which the first takes all text of both, as in `start: /b+/ /b+/`, would
have it add for ever, so this is switched off, by an option that comes last: an earlier
one, of the grammar's own, does not count.

Of Lark's form, only the ends of words are parsed here.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.schemas import OPTIONS, check_schema

# The number of rules, and for each the depth of its nested brackets. A thread's stack of
# 8 MiB overflows at 2,500.
MAX_RULES_AND_BRACKETS: Final = 1000
_NO_FORCING: Final = '%llguidance {"no_forcing": true}'
_SCHEMA: Final = "%json"
_MAX_SHOWN_CHARS: Final = 64  # characters of a name that an error shows
# Texts, comments and patterns, which are skipped, and names of tokens. If the closing
# quote or slash is missing, the rest of the grammar is skipped.
_SPECIAL_WORD: Final = re.compile(
    r"""
    "(?:\\.|[^"\\])*+(?:"|\\?\Z)     # a text
    | (?://|\#)[^\n]*+                 # a comment
    | /(?:\\.|[^/\\])*+(?:/|\\?\Z)     # a regular expression
    | %json\s*+                        # a schema comes after it
    | <[^<>\[\s][^<>\s]*+>             # a name of a token
    """,
    re.VERBOSE | re.DOTALL,
)


@frozen
class _LarkPiece:
    """A part of a grammar."""

    text: str
    kind: str = ""  # the beginning of a special word; empty: other text


def check_lark(text: str, param: str) -> str:
    """A grammar that can be handed on. Raises GrammarError, which names the field."""
    texts = []
    depth = _Depth()
    for piece in _pieces(text, param):
        if not piece.kind:
            depth.read(piece.text)
        texts.append(piece.text)
    if depth.total > MAX_RULES_AND_BRACKETS:
        reason = f"has {depth.total} rules and brackets within each other, of at most"
        raise GrammarError(
            f"{param}: {reason} {MAX_RULES_AND_BRACKETS}; make it smaller", param
        )
    return "".join(texts)


def to_compiled_lark(text: str, ids: Mapping[str, int], param: str) -> str:
    """A grammar that was checked, as the compiler gets it: with tokens by their ids, and
    nothing forced. Raises GrammarError.
    """
    texts = []
    for piece in _pieces(text, param, compiled=True):
        if piece.kind == "<" and piece.text not in ids:
            reason = f"{param}: the model has no marker {piece.text[:_MAX_SHOWN_CHARS]!r}"
            raise GrammarError(reason, param)
        texts.append(f"<[{ids[piece.text]}]>" if piece.kind == "<" else piece.text)
    return f"{''.join(texts)}\n{_NO_FORCING}\n"


class _Depth:
    """The greatest depth of the compiler's calls: all rules might be in one chain."""

    def __init__(self) -> None:
        self.total = 0
        self._open = self._deepest = 0

    def read(self, text: str) -> None:
        """Parse the text between words."""
        for sign in _SIGNS.findall(text):
            if sign == ":":
                self.total += 1
                self._open = self._deepest = 0
            elif sign in "([":
                self._open += 1
                if self._open > self._deepest:
                    self._deepest = self._open
                    self.total += 1
            else:
                self._open -= 1


_SIGNS: Final = re.compile(r"[:()\[\]]")


def _pieces(text: str, param: str, *, compiled: bool = False) -> Iterator[_LarkPiece]:
    position = 0
    while (word := _SPECIAL_WORD.search(text, position)) is not None:
        yield _LarkPiece(text[position : word.start()])
        position = word.end()
        if word[0].startswith(_SCHEMA):
            schema, position = _read_schema(text, position, param, compiled=compiled)
            yield _LarkPiece(f"{_SCHEMA} {schema}", _SCHEMA)
        else:
            yield _LarkPiece(word[0], word[0][0])
    yield _LarkPiece(text[position:])


def _read_schema(text: str, start: int, param: str, *, compiled: bool) -> tuple[str, int]:
    """A schema as it is enforced, and where it ends; in the compiler's words, if it is to
    be `compiled` next.
    """
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        reason = f"{param}: what is behind {_SCHEMA} is not valid JSON: {error}"
        raise GrammarError(reason, param) from None
    options = schema.pop(OPTIONS, {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict) or options.get("lenient"):
        reason = f"{param}: lenient schemas are not enforced; leave it out"
        raise GrammarError(reason, param)
    checked = json.loads(check_schema(json.dumps(schema), param, compiled=compiled))
    if options:
        checked[OPTIONS] = {**options, **checked.get(OPTIONS, {})}
    return json.dumps(checked), end
