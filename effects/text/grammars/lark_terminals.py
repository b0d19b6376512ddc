r"""Users' grammars in Lark's form as terminals: for texts within a call's arguments.

    start: line+                      I_0: I_1+
    line: /[^\n]*/ LF      -->        I_1: /[^\x{A}]*/ I_2
    %import common.LF                 I_2: /[\x{A}]/

A text of a grammar is within JSON's quotes, or before a tag that ends it. As rules, the
compiler's lexer would read such a text word by word, each as long as it can be: within
JSON the backslash of a line break might as well begin a quote within the line, and the
lexer cannot go back. As one terminal, a text is one word. So rules become terminals;
their texts and patterns are written with JSON's escapes where these are wanted, and what
`%ignore` names may be before and after each of a rule's words.

Terminals cannot contain themselves. So within JSON a grammar with recursive rules stays a
grammar, if its words have no escapes; else it is refused, and so are the compiler's
extensions, such as JSON schemas and tokens of the model. Of what is
ignored, only white space is enforced: a comment ends where a lexer can read no more of
it, which a terminal cannot say.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import frozen

from minfer.effects.text.grammars.character_sets import CharacterSet, character
from minfer.effects.text.grammars.escaped_patterns import (
    escape_text,
    literal_pattern,
    write_pattern,
)
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_definitions import (
    MAX_SHOWN_CHARS,
    Definition,
    LarkGrammar,
    LarkToken,
    read_lark,
    refused_word,
)
from minfer.effects.text.grammars.lark_ends import check_ends
from minfer.effects.text.grammars.patterns import pattern_pieces
from minfer.sampling.structured import MAX_CONSTRAINT

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


def lark_terminals(definition: str, prefix: str, *, escaped: bool) -> list[str]:
    """A grammar as terminals whose names begin with `prefix`, of which the first is the
    whole: with JSON's escapes, if texts are to be `escaped`. Raises GrammarError.
    """
    grammar = _read_checked(definition)
    if name := _recursive_name(grammar):
        raise _recursion_error(name)
    names = dict.fromkeys(("start", *grammar.definitions, *grammar.imports))
    ignored = f"{prefix}{len(names)}" if grammar.ignored else ""
    new_names = {name: f"{prefix}{i}" for i, name in enumerate(names)}
    writer = _TerminalWriter(new_names, escaped, ignored)
    lines = [writer.definition(grammar.definitions.pop("start"))]
    lines += [
        writer.definition(definition) for definition in grammar.definitions.values()
    ]
    lines += [writer.imported(name, path) for name, path in grammar.imports.items()]
    if ignored:
        alternatives = " | ".join(writer.body(body) for body in grammar.ignored)
        lines.append(f"{ignored}: ({alternatives})*")
    return lines


def _nested_grammar(grammar: LarkGrammar) -> str:
    """A grammar with rules that contain themselves, as a part of another grammar's rule.
    Words must be the same with JSON's escapes as without: else the lexer could not tell
    where they end. Of white space that is ignored, blanks are left.
    """
    names: dict[str, str] = {}
    pending = ["start"]
    while pending:
        name = pending.pop()
        if name not in names:
            names[name] = f"rule_{len(names)}" if _is_rule(name) else f"W{len(names)}"
            pending += _names_of(grammar, name)
    names["start"] = "start"
    escaped, bare = (_TerminalWriter(names, written) for written in (True, False))
    lines = []
    for name in names:
        if (definition := grammar.definitions.get(name)) is not None:
            line, bare_line = escaped.definition(definition), bare.definition(definition)
        elif name in grammar.imports:
            path = grammar.imports[name]
            line, bare_line = escaped.imported(name, path), bare.imported(name, path)
        else:
            raise _undefined_error(name)
        if line != bare_line:
            raise _recursion_error(_recursive_name(grammar))
        lines.append(line)
    if any(_has_blank(token, grammar) for token in _ignored_words(grammar)):
        lines.append("%ignore / /")
    return "\n".join(["%lark {", *lines, "}"])


@frozen
class TextGrammar:
    """What a text must be: of a grammar in Lark's form, or of a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str

    def check(self) -> None:
        """Raise GrammarError if the text cannot be enforced within JSON."""
        if len(self.definition) > MAX_CONSTRAINT:
            reason = f"has {len(self.definition)} characters, of at most {MAX_CONSTRAINT}"
            raise GrammarError(f"{reason}; make it smaller")
        if not self.nested():
            self.terminals("", escaped=True)

    def nested(self) -> str:
        """The text within JSON as a grammar of its own, if its rules contain themselves;
        else empty. Raises GrammarError.
        """
        if self.syntax != "lark":
            return ""
        grammar = _read_checked(self.definition)
        if not _recursive_name(grammar):
            return ""
        check_ends(grammar)
        return _nested_grammar(grammar)

    def terminals(self, prefix: str, *, escaped: bool) -> list[str]:
        """The text as terminals, the first of which is the whole. Raises GrammarError."""
        if self.syntax == "lark":
            return lark_terminals(self.definition, prefix, escaped=escaped)
        return [f"{prefix}0: /{write_pattern(self.definition, escaped=escaped)}/"]


# --- checks -----------------------------------------------------------------------------


def _read_checked(definition: str) -> LarkGrammar:
    """A grammar that begins, and ignores only white space. Raises GrammarError."""
    grammar = read_lark(definition)
    if "start" not in grammar.definitions:
        raise GrammarError("has no rule 'start'")
    if not all(_is_space(token, grammar) for token in _ignored_words(grammar)):
        reason = "what '%ignore' names, other than white space, cannot be enforced within"
        raise GrammarError(f"{reason} a call; put it into the rules")
    return grammar


def _recursion_error(name: str) -> GrammarError:
    reason = (
        f"the rule {name[:MAX_SHOWN_CHARS]!r} contains itself, which cannot be enforced"
    )
    return GrammarError(
        f"{reason} beside words with quotes, backslashes or control characters; write a "
        "repetition"
    )


def _recursive_name(grammar: LarkGrammar) -> str:
    """The name of a definition within itself; empty if there is none."""
    done_names: set[str] = set()
    path: dict[str, Iterator[str]] = {}
    for start in grammar.definitions:
        stack = [start]
        while stack:
            name = stack[-1]
            if name not in path and name not in done_names:
                path[name] = iter(_names_of(grammar, name))
            inner = next(
                (
                    candidate
                    for candidate in path.get(name, ())
                    if candidate not in done_names
                ),
                None,
            )
            if inner is None:
                path.pop(name, None)
                done_names.add(name)
                stack.pop()
            elif inner in path:
                return inner
            else:
                stack.append(inner)
    return ""


def _names_of(grammar: LarkGrammar, name: str) -> list[str]:
    definition = grammar.definitions.get(name)
    body = [] if definition is None else definition.body
    return [token.text for token in body if token.kind == "name"]


def _ignored_words(grammar: LarkGrammar) -> Iterator[LarkToken]:
    """The words of what is ignored, and of the definitions that it names."""
    pending = [token for body in grammar.ignored for token in body]
    seen: set[str] = set()
    while pending:
        token = pending.pop()
        definition = grammar.definitions.get(token.text)
        if token.kind != "name" or definition is None:
            yield token
        elif token.text not in seen:
            seen.add(token.text)
            pending += definition.body


def _is_space(token: LarkToken, grammar: LarkGrammar) -> bool:
    """Whether a word stands for white space, or for no text."""
    match token.kind:
        case "text":
            return _SPACES.issuperset(token.text)
        case "pattern":
            return all(map(_is_space_piece, pattern_pieces(token.text)))
        case "name":
            return grammar.imports.get(token.text) in _COMMON_SPACES
    return token.kind in ("sign", "times")


def _has_blank(token: LarkToken, grammar: LarkGrammar) -> bool:
    match token.kind:
        case "text":
            return " " in token.text
        case "pattern":
            return any(
                piece == character(ord(" "))
                if isinstance(piece, str)
                else ord(" ") in piece.ascii
                for piece in pattern_pieces(token.text)
            )
    return grammar.imports.get(token.text) in ("common.WS", "common.WS_INLINE")


def _is_space_piece(piece: str | CharacterSet) -> bool:
    if isinstance(piece, CharacterSet):
        spaces = piece.ascii.issubset(map(ord, _SPACES))
        return spaces and piece.known and not piece.beyond
    return piece == character(ord(" ")) or piece[0] in "()|*+?{"


def _undefined_error(name: str) -> GrammarError:
    return GrammarError(f"does not define {name[:MAX_SHOWN_CHARS]!r}")


def _is_rule(name: str) -> bool:
    return name.lstrip("_")[:1].islower()


# --- writing ----------------------------------------------------------------------------


@frozen
class _TerminalWriter:
    """Writes terminals under new names."""

    names: Mapping[str, str]
    escaped: bool
    ignored: str = ""  # the terminal of what is ignored; empty: nothing is

    def definition(self, definition: Definition) -> str:
        """A definition as a terminal. What is ignored may be after each word of a rule,
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

    def body(self, tokens: list[LarkToken], *, spaced: bool = False) -> str:
        """What is after a definition's colon."""
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

    def _word(self, token: LarkToken) -> str:
        match token.kind:
            case "text" if token.flags and token.text:
                return self._pattern(f"(?i:{literal_pattern(token.text)})")
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
                raise _undefined_error(token.text)
            case "alias":
                return ""
            case "times":
                return token.text
            case "sign" if token.text not in ":,":
                return token.text
        raise refused_word(token.text)

    def _pattern(self, pattern: str) -> str:
        return f"/{write_pattern(pattern, escaped=self.escaped)}/"
