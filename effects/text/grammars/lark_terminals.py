r"""Users' grammars in Lark's form as terminals: for texts within a call's arguments.

    start: line+                      I_0: I_1+
    line: /[^\n]*/ LF      -->        I_1: /[^\x{A}]*/ I_2
    %import common.LF                 I_2: /[\x{A}]/

A text of a grammar is within JSON's quotes, or before a tag that ends it. As rules, the
compiler's lexer would read such a text word by word, each as long as it can be: within
JSON the backslash of a line break might as well begin a quote within the line, and the
lexer cannot go back. As one terminal, a text is one word. So rules become terminals;
their texts and patterns are written with JSON's escapes where these are wanted, and what
`%ignore` names may be before and behind each of a rule's words.

Terminals cannot contain themselves: a grammar with recursive rules is refused, and so
are the compiler's extensions, such as JSON schemas and tokens of the model. Of what is
ignored, only white space is enforced: a comment ends where a lexer can read no more of
it, which a terminal cannot say.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import define, field, frozen

from minfer.effects.text.grammars.escaped_patterns import (
    escape_text,
    literal,
    write_pattern,
)
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.patterns import CharacterSet, character, pattern_parts
from minfer.sampling.structured import MAX_CONSTRAINT

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
_HEX: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)", re.DOTALL)
# Lark's library, as far as its texts have characters that JSON escapes.
_COMMON: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*(?s:[^*]|\*+[^*\/])*\*+\/",
}
_SPACES: Final = frozenset(" \t\n\r\f\v")
_COMMON_SPACES: Final = frozenset(
    f"common.{name}" for name in ("LF", "CR", "NEWLINE", "WS", "WS_INLINE")
)
_LONGEST: Final = 32  # characters that an error shows
_MAX_NAMES: Final = 1000


@frozen
class _Token:
    """A word of a grammar."""

    kind: str
    text: str
    flags: str = ""  # of a text or a pattern


@frozen
class _Definition:
    """A rule or a terminal."""

    name: str
    body: list[_Token]


@define
class _Grammar:
    """A grammar's definitions, by their names, and what it imports and ignores."""

    definitions: dict[str, _Definition] = field(factory=dict)
    imports: dict[str, str] = field(factory=dict)  # names in Lark's library
    ignored: list[list[_Token]] = field(factory=list)


def lark_terminals(definition: str, prefix: str, *, escaped: bool) -> list[str]:
    """A grammar as terminals whose names begin with `prefix`, of which the first is the
    whole: with JSON's escapes, if texts are to be `escaped`. Raises GrammarError.
    """
    grammar = _read(definition)
    if "start" not in grammar.definitions:
        raise GrammarError("has no rule 'start'")
    _check_recursion(grammar)
    if not _ignores_spaces(grammar):
        why = "what '%ignore' names, other than white space, cannot be enforced within"
        raise GrammarError(f"{why} a call; put it into the rules")
    names = dict.fromkeys(("start", *grammar.definitions, *grammar.imports))
    ignored = f"{prefix}{len(names)}" if grammar.ignored else ""
    new_names = {name: f"{prefix}{i}" for i, name in enumerate(names)}
    writer = _Writer(new_names, escaped, ignored)
    lines = [writer.definition(grammar.definitions.pop("start"))]
    lines += [writer.definition(entry) for entry in grammar.definitions.values()]
    lines += [writer.imported(name, path) for name, path in grammar.imports.items()]
    if ignored:
        ways = " | ".join(writer.body(body) for body in grammar.ignored)
        lines.append(f"{ignored}: ({ways})*")
    return lines


@frozen
class TextGrammar:
    """What a text must be: of a grammar in Lark's form, or of a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str

    def check(self) -> None:
        """Raise GrammarError if the text cannot be enforced within JSON."""
        if len(self.definition) > MAX_CONSTRAINT:
            why = f"has {len(self.definition)} characters, of at most {MAX_CONSTRAINT}"
            raise GrammarError(f"{why}; make it smaller")
        self.terminals("", escaped=True)

    def terminals(self, prefix: str, *, escaped: bool) -> list[str]:
        """The text as terminals, the first of which is the whole. Raises GrammarError."""
        if self.syntax == "lark":
            return lark_terminals(self.definition, prefix, escaped=escaped)
        return [f"{prefix}0: /{write_pattern(self.definition, escaped=escaped)}/"]


# --- reading ----------------------------------------------------------------------------


def _read(definition: str) -> _Grammar:
    grammar = _Grammar()
    for line in _lines(definition):
        first, *rest = line
        if first.kind == "statement":
            _read_statement(grammar, first.text, rest)
        elif first.kind == "name":
            _read_definition(grammar, first.text.lstrip("!?"), rest)
        else:
            raise _refused(first.text)
    return grammar


def _read_statement(grammar: _Grammar, word: str, rest: list[_Token]) -> None:
    if word == "%ignore" and rest:
        grammar.ignored.append(rest)
    elif word == "%import" and rest and rest[0].kind == "path":
        path = rest[0].text
        alias = [token.text for token in rest[1:] if token.kind == "alias"]
        name = alias[0].removeprefix("->").strip() if alias else path.split(".")[1]
        grammar.imports[name] = path
    elif word == "%import" and rest and rest[0].text == "common":
        names = [token.text for token in rest[1:] if token.kind == "name"]
        grammar.imports |= {name: f"common.{name}" for name in names}
    else:
        raise _refused(word)


def _read_definition(grammar: _Grammar, name: str, rest: list[_Token]) -> None:
    if rest and rest[0].kind == "priority":
        rest = rest[1:]
    if not rest or rest[0].text != ":":
        raise _refused(rest[0].text if rest else name)
    if name in grammar.definitions:
        raise GrammarError(f"defines {name[:_LONGEST]!r} twice")
    grammar.definitions[name] = _Definition(name, rest[1:])
    if len(grammar.definitions) > _MAX_NAMES:
        raise GrammarError(f"has more than {_MAX_NAMES} rules and terminals")


def _lines(definition: str) -> Iterator[list[_Token]]:
    """The definitions and statements: a line that begins with a bar continues another."""
    line: list[_Token] = []
    fresh = False
    for token in _tokens(definition):
        if token.kind == "line":
            fresh = True
            continue
        if fresh and line and token.text != "|":
            yield line
            line = []
        fresh = False
        line.append(token)
    if line:
        yield line


def _tokens(definition: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(definition):
        kind = match.lastgroup or ""
        if kind in ("comment", "blank"):
            continue
        if kind in ("pattern", "flags"):
            yield _Token("pattern", match["pattern"], match["flags"])
        elif kind in ("text", "ignoring"):
            yield _Token("text", _unquoted(match["text"]), match["ignoring"] or "")
        elif kind == "high":
            yield _Token("pattern", _range(match["low"], match["high"]))
        else:
            yield _Token(kind, match[0])


def _unquoted(word: str) -> str:
    """The text of a literal, which has the escapes of JSON, and those of bytes."""
    written = _HEX.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], word)
    try:
        text: str = json.loads(written)
    except ValueError:
        raise GrammarError(f"{word[:_LONGEST]} is no text in Lark's form") from None
    return text


def _range(low: str, high: str) -> str:
    """A pattern of the characters between two."""
    ends = [_unquoted(low), _unquoted(high)]
    if any(len(end) != 1 for end in ends):
        raise _refused(f"{low}..{high}")
    return f"[{literal(ends[0])}-{literal(ends[1])}]"


def _check_recursion(grammar: _Grammar) -> None:
    """Raise GrammarError for a definition within itself."""
    done: set[str] = set()
    path: dict[str, Iterator[str]] = {}
    for start in grammar.definitions:
        due = [start]
        while due:
            name = due[-1]
            if name not in path and name not in done:
                path[name] = iter(_names_of(grammar, name))
            within = next((one for one in path.get(name, ()) if one not in done), None)
            if within is None:
                path.pop(name, None)
                done.add(name)
                due.pop()
            elif within in path:
                why = f"the rule {within[:_LONGEST]!r} contains itself, which cannot be"
                raise GrammarError(f"{why} enforced within a call; write a repetition")
            else:
                due.append(within)


def _names_of(grammar: _Grammar, name: str) -> list[str]:
    definition = grammar.definitions.get(name)
    body = [] if definition is None else definition.body
    return [token.text for token in body if token.kind == "name"]


def _ignores_spaces(grammar: _Grammar) -> bool:
    """Whether only white space is ignored."""
    due = [token for body in grammar.ignored for token in body]
    seen: set[str] = set()
    while due:
        token = due.pop()
        if token.kind == "name" and token.text in grammar.definitions:
            if token.text not in seen:
                seen.add(token.text)
                due += grammar.definitions[token.text].body
        elif not _is_space(token, grammar):
            return False
    return True


def _is_space(token: _Token, grammar: _Grammar) -> bool:
    """Whether a word stands for white space, or for no text."""
    match token.kind:
        case "text":
            return _SPACES.issuperset(token.text)
        case "pattern":
            return all(map(_is_space_part, pattern_parts(token.text)))
        case "name":
            return grammar.imports.get(token.text) in _COMMON_SPACES
    return token.kind in ("sign", "times")


def _is_space_part(part: str | CharacterSet) -> bool:
    if isinstance(part, CharacterSet):
        spaces = part.ascii.issubset(map(ord, _SPACES))
        return spaces and part.known and not part.beyond
    return part == character(ord(" ")) or part[0] in "()|*+?{"


def _is_rule(name: str) -> bool:
    return name.lstrip("_")[:1].islower()


def _refused(text: str) -> GrammarError:
    why = f"{text[:_LONGEST]!r} in a grammar cannot be enforced within a call"
    return GrammarError(f"{why}; leave it out, or write it otherwise")


# --- writing ----------------------------------------------------------------------------


@frozen
class _Writer:
    """Writes terminals under new names."""

    names: Mapping[str, str]
    escaped: bool
    ignored: str = ""  # the terminal of what is ignored; empty: nothing is

    def definition(self, definition: _Definition) -> str:
        """A definition as a terminal. What is ignored may be behind each word of a rule,
        and before the first.
        """
        body = self.body(definition.body, spaced=_is_rule(definition.name))
        if definition.name == "start" and self.ignored:
            body = f"{self.ignored} ({body})"
        return f"{self.names[definition.name]}: {body}"

    def imported(self, name: str, path: str) -> str:
        """A terminal of Lark's library."""
        pattern = _COMMON.get(path.split(".")[1])
        if pattern is None:
            return f"%import {path} -> {self.names[name]}"
        return f"{self.names[name]}: {self._pattern(pattern)}"

    def body(self, tokens: list[_Token], *, spaced: bool = False) -> str:
        """What is behind a definition's colon."""
        words = []
        for token in tokens:
            word = self._word(token)
            is_word = token.kind in ("text", "pattern") or (
                token.kind == "name" and not _is_rule(token.text)
            )
            words.append(
                f"({word} {self.ignored})"
                if spaced and self.ignored and is_word
                else word
            )
        return " ".join(filter(None, words))

    def _word(self, token: _Token) -> str:
        match token.kind:
            case "text" if token.flags and token.text:
                return self._pattern(f"(?i:{literal(token.text)})")
            case "text":
                text = escape_text(token.text) if self.escaped else token.text
                return json.dumps(text, ensure_ascii=False)
            case "pattern" if token.flags:
                return self._pattern(f"(?{token.flags}:{token.text})")
            case "pattern":
                return self._pattern(token.text)
            case "name" if token.text in self.names:
                return self.names[token.text]
            case "name":
                raise GrammarError(f"does not define {token.text[:_LONGEST]!r}")
            case "alias":
                return ""
            case "times":
                return token.text
            case "sign" if token.text not in ":,":
                return token.text
        raise _refused(token.text)

    def _pattern(self, pattern: str) -> str:
        return f"/{write_pattern(pattern, escaped=self.escaped)}/"
