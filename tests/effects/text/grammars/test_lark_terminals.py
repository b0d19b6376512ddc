r"""Grammars of texts as terminals: what they allow is what Lark, the library, parses."""

import json
import re
from random import Random

import pytest
from lark import Lark
from lark.exceptions import UnexpectedInput

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lark_terminals import TextGrammar
from tests.effects.text.grammars.random_words import draw, matcher, takes
from tests.quick import at_most

# A patch in the form that Codex's `apply_patch` takes.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
GRAMMARS = {
    "patch": PATCH,
    "sums": """
        start: expr
        expr: term (SP ADD SP term)+ -> add
            | term
        ?term: factor (SP MUL SP factor)*  // a comment with "quotes"
        !factor: INT
        SP: " "
        ADD: "+"
        MUL: "*"
        %import common.INT
    """,
    "white space": r"""
        start: "let" name "=" value ";"
        name: CNAME
        value: ESCAPED_STRING | SIGNED_INT -> number
        %import common (CNAME, ESCAPED_STRING, SIGNED_INT)
        %import common.WS -> SPACE
        %ignore SPACE
        %ignore /[\t ]|\r?\n/
    """,
    "sets": r"""
        start: A B? [C] D E{2,3} F~1..2 (G | "\x5c\u00e9\t")
        A: /[^"a-z]/
        B: "x".."z"
        C.2: /[\s"]+\//
        D: "key"i | /no[n"]e/i
        E: /(?s:.)\\./ | "\\"
        F: /[\\\]\-"]{1,2}/
        G: /\p{Lu}|\W\D\d/
    """,
    "operators": r"""
        start: WORD "\n" WORD
        WORD: /[a-c"\n]{1,6}/ & /[^b]*/
    """,
    "empty": r"""
        start: line*
        line: /[^\n]*/ NEWLINE |
        NEWLINE: /\r?\n/
    """,
}
EXTENDED = ("operators", "sets")  # in the compiler's form, not in Lark's
HEAD, TAIL = '{"input": "', '"}'
CUT = 40  # texts of each grammar


def for_lark(grammar: str) -> str:
    """A grammar for the library, which has no words without characters."""
    return grammar.replace("/(.*)/", "/(.+)/?").replace("line: /[^\\n]*/", "line: /.+/?")


RECURSIVE = {
    "sums": r"""
        start: sum
        ?sum: product (("+" | "-") product)* -> all
        product: atom ("*" atom)*
        atom: NUMBER | NAME "(" [sum ("," sum)*] ")" | "(" sum ")"
        NAME: /[a-z]{1,3}/
        %import common.NUMBER
        %import common.WS
        %ignore WS
    """,
    "terms": """
        start: "not" start | VARIABLE | "(" start "and" start ")"
        VARIABLE: "A".."F" "'"?
    """,
}


def within_json(grammar: TextGrammar) -> str:
    """A grammar of an object with such a text, with JSON's escapes."""
    if nested := grammar.nested():
        return f"start: {json.dumps(HEAD)} {nested} {json.dumps(TAIL)}"
    rules = grammar.terminals("T_", escaped=True)
    start = f"start: {json.dumps(HEAD)} T_0 {json.dumps(TAIL)}"
    return "\n".join([start, *rules])


def before_a_tag(grammar: TextGrammar) -> str:
    rules = grammar.terminals("T_", escaped=False)
    return "\n".join(['start[lazy]: T_0 "</x>"', *rules])


def texts(grammar: TextGrammar, closing: bytes = b'"*\\') -> list[str]:
    """Random texts of a grammar, which came as JSON."""
    walk, random = matcher(within_json(grammar)), Random(1)
    drawn = [draw(walk, random, closing=closing) for _ in range(CUT)]
    return [json.loads(text)["input"] for text in drawn]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(GRAMMARS.keys() - {*EXTENDED}))
def test_lark_parses_each_text(name: str) -> None:
    parser = Lark(for_lark(GRAMMARS[name]), lexer="dynamic_complete")
    drawn = texts(TextGrammar("lark", GRAMMARS[name]))
    assert len({*drawn}) > CUT / 2
    for text in drawn:
        parser.parse(text)


@pytest.mark.long
@pytest.mark.parametrize("name", RECURSIVE)
def test_lark_parses_each_text_of_recursive_rules(name: str) -> None:
    parser = Lark(RECURSIVE[name], lexer="dynamic_complete")
    drawn = texts(TextGrammar("lark", RECURSIVE[name]), b'")0A')
    assert len({*drawn}) > CUT / 2
    assert any(text.count("(") > 1 for text in drawn)
    for text in drawn:
        parser.parse(text)


@pytest.mark.long
@pytest.mark.parametrize("name", GRAMMARS)
def test_both_forms_allow_the_same(name: str) -> None:
    """Of texts and of spoilt ones, with and without escapes."""
    grammar = TextGrammar("lark", GRAMMARS[name])
    escaped, bare = matcher(within_json(grammar)), matcher(before_a_tag(grammar))
    random, spoilt = Random(2), 0
    for text in texts(grammar):
        assert takes(bare, f"{text}</x>".encode())
        place = random.randrange(len(text) + 1)
        edited = text[:place] + random.choice('"\\\n\t\x01aé*+ ') + text[place + 1 :]
        as_json = json.dumps({"input": edited}, ensure_ascii=False)
        fits = takes(bare, f"{edited}</x>".encode())
        assert takes(escaped, as_json.encode()) == fits, edited
        spoilt += not fits
    assert spoilt


@pytest.mark.long
def test_a_patch_is_taken_and_a_spoilt_one_refused() -> None:
    walk = matcher(within_json(TextGrammar("lark", PATCH)))
    parser = Lark(for_lark(PATCH))
    patch = (
        '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-x\n+"\\n\té"\n \n'
        "*** Delete File: c\n*** End Patch\n"
    )
    for place in range(len(patch)):
        spoilt = patch[:place] + patch[place + 1 :]
        try:
            parser.parse(spoilt)
            fits = True
        except UnexpectedInput:
            fits = False
        text = json.dumps({"input": spoilt}, ensure_ascii=False)
        assert takes(walk, text.encode()) == fits, spoilt
    assert takes(walk, json.dumps({"input": patch}, ensure_ascii=False).encode())


@pytest.mark.long
@pytest.mark.parametrize(
    "pattern",
    [
        r"ab+",
        r'"[^"]*"',
        r"(?s:.){1,3}x",
        r"[^\x00-\x1f]+\t[\W]",
        r'(?i:k"\n)|\\\d{2}',
        r"a|b\n|(?:c(?:d|\"))",
        r"[\p{Lu}\"]{2}/[^\P{L}]",
        r"^\S\s$",
    ],
)
def test_a_regular_expression_matches_each_text(pattern: str) -> None:
    compiled = re.compile(pattern.replace(r"\p{Lu}", "A-Z").replace(r"\P{L}", r"\W"))
    for text in texts(TextGrammar("regex", pattern)):
        assert compiled.fullmatch(text), text


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("start: a\na: b\nb: a? /./", "contains itself"),
        ('start: "(" start ")" | /"/', "'start' contains itself"),
        ('start: "(" start ")" | X', "does not define 'X'"),
        ('start: %json {"type": "string"}', "'%json'"),
        ('start: %lark { a: "a" }', "'%lark'"),
        ("start: <tool_call>", "'<'"),
        ("start: <[5]>", "'<'"),
        ("start: @other", "'@'"),
        ("start: A\nA: ~/a/", "'~'"),
        ('start[lazy]: "a"', "'['"),
        ('start: "a" B', "does not define 'B'"),
        ('a: "a"', "has no rule 'start'"),
        ('start: "a"\nstart: "b"', "defines 'start' twice"),
        ("start: /a(?<=b)/", "look-behind"),
        ("start: /a/x", "flag"),
        (r"start: /\p{Greek}/", "general category"),
        ('start: "\\q"', "is no text"),
        ('start: "\\ud800"', "is no text"),
        ('start: "ab".."c"', '\'"ab".."c"\''),
        ('%override start: "a"', "'%override'"),
        ("start: /a)|(b/", "nothing opens"),
        ('start: "a"\n%ignore /#[^\\n]*/', "other than white space"),
        ('start: "a"\n%import common.SH_COMMENT\n%ignore SH_COMMENT', "white space"),
        ('start: "a"\nNOTE: " "+ "#"\n%ignore NOTE', "other than white space"),
    ],
)
def test_what_cannot_be_enforced_is_refused(definition: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        TextGrammar("lark", definition).check()


def test_the_work_is_bounded_by_a_grammars_size() -> None:
    """Of definitions that each name the next one, once and twice."""
    for body in ("A{0}", "A{0} A{0}"):
        lines = [f"A{i}: {body.format(i + 1)}" for i in range(900)]
        spaces = ["start: A0", *lines, 'A900: " "', "%ignore A0"]
        with at_most(1):
            assert len(TextGrammar("lark", "\n".join(spaces)).terminals("", escaped=True))
        cycle = ["start: A0", *lines, "A900: A0"]
        with at_most(1), pytest.raises(GrammarError, match="contains itself"):
            TextGrammar("lark", "\n".join(cycle)).terminals("", escaped=True)


@pytest.mark.parametrize("pattern", ["a)|(?:b", "(a", "a)", "((a)", "(?:a|(?P<n>b)"])
@pytest.mark.parametrize("escaped", [True, False])
def test_brackets_have_to_fit(pattern: str, escaped: bool) -> None:
    with pytest.raises(GrammarError, match="escape it"):
        TextGrammar("regex", pattern).terminals("T_", escaped=escaped)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[^\x00-\U0010ffff]",
        r"[^\x00-\ud7ff\ue000-\U0010ffff]",
        r"a|b[^\s\S]",
        r"[\ud800]",
        r"[^\W\x00-\U0010ffff]",
    ],
)
def test_a_set_of_no_characters_is_refused(pattern: str) -> None:
    for grammar in (
        TextGrammar("regex", pattern),
        TextGrammar("lark", f"start: /{pattern}/"),
    ):
        with pytest.raises(GrammarError, match="no characters"):
            grammar.check()
