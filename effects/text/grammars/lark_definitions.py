"""Reads users' grammars in Lark's form: definitions, imports, and what is ignored.

A definition is a line; lines that begin with a bar continue it. What the compiler has
beyond that is refused here: options, parameters, overriding.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from attrs import define, field, frozen

from minfer.effects.text.grammars.escaped_patterns import literal_pattern
from minfer.effects.text.grammars.grammar_library import GrammarError

_TOKEN: Final = re.compile(
    r"""
    (?P<comment>(?://|\#)[^\n]*+)
    | (?P<low>"(?:\\.|[^"\\\n])*+")\s*\.\.\s*(?P<high>"(?:\\.|[^"\\\n])*+")
    | (?P<text>"(?:\\.|[^"\\\n])*+")(?P<ignoring>i(?![a-z]))?
    | /(?P<pattern>(?:\\.|[^/\\\n])++)/(?P<flags>[a-z]*)
    | (?P<statement>%[a-z]+)
    | (?P<path>common\.[A-Z_]+)
    | (?P<name>[!?]{0,2}_?[A-Za-z][A-Za-z0-9_-]*)
    | (?P<alias>->\s*[A-Za-z_][A-Za-z0-9_-]*)
    | (?P<times>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?|\{[0-9]*,?[0-9]*\}|[*+?])
    | (?P<sign>[()\[\]|&:,])
    | (?P<priority>\.\s*-?[0-9]+)
    | (?P<line>\n)
    | (?P<blank>[ \t\r]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_BYTE_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)", re.DOTALL)
MAX_SHOWN_CHARS: Final = 32  # characters that an error shows
_MAX_NAMES: Final = 1000


@frozen
class LarkToken:
    """A word of a grammar."""

    kind: str
    text: str
    flags: str = ""  # of a text or a pattern


@frozen
class Definition:
    """A rule or a terminal."""

    name: str
    body: list[LarkToken]


@define
class LarkGrammar:
    """A grammar's definitions, by their names, and what it imports and ignores."""

    definitions: dict[str, Definition] = field(factory=dict)
    imports: dict[str, str] = field(factory=dict)  # names in Lark's library
    ignored: list[list[LarkToken]] = field(factory=list)


def refused_word(text: str) -> GrammarError:
    """The error about a word of a grammar."""
    reason = f"{text[:MAX_SHOWN_CHARS]!r} in a grammar cannot be enforced within a call"
    return GrammarError(f"{reason}; leave it out, or write it otherwise")


def read_lark(definition: str) -> LarkGrammar:
    """The definitions of a grammar. Raises GrammarError."""
    grammar = LarkGrammar()
    for line in _lines(definition):
        first, *tokens = line
        if first.kind == "statement":
            _read_statement(grammar, first.text, tokens)
        elif first.kind == "name":
            _read_definition(grammar, first.text.lstrip("!?"), tokens)
        else:
            raise refused_word(first.text)
    return grammar


def _read_statement(grammar: LarkGrammar, word: str, tokens: list[LarkToken]) -> None:
    if word == "%ignore" and tokens:
        grammar.ignored.append(tokens)
    elif word == "%import" and tokens and tokens[0].kind == "path":
        path = tokens[0].text
        alias = [token.text for token in tokens[1:] if token.kind == "alias"]
        name = alias[0].removeprefix("->").strip() if alias else path.split(".")[1]
        grammar.imports[name] = path
    elif word == "%import" and tokens and tokens[0].text == "common":
        names = [token.text for token in tokens[1:] if token.kind == "name"]
        grammar.imports |= {name: f"common.{name}" for name in names}
    else:
        raise refused_word(word)


def _read_definition(grammar: LarkGrammar, name: str, tokens: list[LarkToken]) -> None:
    if tokens and tokens[0].kind == "priority":
        tokens = tokens[1:]
    if not tokens or tokens[0].text != ":":
        raise refused_word(tokens[0].text if tokens else name)
    if name in grammar.definitions:
        raise GrammarError(f"defines {name[:MAX_SHOWN_CHARS]!r} twice")
    grammar.definitions[name] = Definition(name, tokens[1:])
    if len(grammar.definitions) > _MAX_NAMES:
        raise GrammarError(f"has more than {_MAX_NAMES} rules and terminals")


def _lines(definition: str) -> Iterator[list[LarkToken]]:
    """The definitions and statements: a line that begins with a bar continues another."""
    line: list[LarkToken] = []
    at_line_start = False
    for token in _tokens(definition):
        if token.kind == "line":
            at_line_start = True
            continue
        if at_line_start and line and token.text != "|":
            yield line
            line = []
        at_line_start = False
        line.append(token)
    if line:
        yield line


def _tokens(definition: str) -> Iterator[LarkToken]:
    for match in _TOKEN.finditer(definition):
        kind = match.lastgroup or ""
        if kind in ("comment", "blank"):
            continue
        if kind in ("pattern", "flags"):
            yield LarkToken("pattern", match["pattern"], match["flags"])
        elif kind in ("text", "ignoring"):
            yield LarkToken("text", _unquoted(match["text"]), match["ignoring"] or "")
        elif kind == "high":
            yield LarkToken("pattern", _range(match["low"], match["high"]))
        else:
            yield LarkToken(kind, match[0])


def _unquoted(word: str) -> str:
    """The text of a literal, which has the escapes of JSON, and those of bytes."""
    written = _BYTE_ESCAPE.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], word)
    try:
        text: str = json.loads(written)
        text.encode()
    except ValueError:  # a lone surrogate cannot be encoded
        raise GrammarError(
            f"{word[:MAX_SHOWN_CHARS]} is no text in Lark's form"
        ) from None
    return text


def _range(low: str, high: str) -> str:
    """A pattern of the characters between two."""
    ends = [_unquoted(low), _unquoted(high)]
    if any(len(end) != 1 for end in ends):
        raise refused_word(f"{low}..{high}")
    return f"[{literal_pattern(ends[0])}-{literal_pattern(ends[1])}]"
