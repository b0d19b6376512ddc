"""No output breaks the pattern that it was held to, however much it is led to."""

import contextlib
import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.patterns import rewrite_pattern
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.forms import Calling, arguments_schema, grammar
from tests.circles import claimed, long
from tests.effects.text.grammars.bundled import (
    ENDS,
    allowed,
    matcher,
    refusal,
    takes,
    takes_value,
    tokenizer,
    vocab,
)

LONGEST = 24  # tokens, after which an output is led to its end
BEYOND = "é¡Ωж中﻿ \x85\u2028٣ª̈🙂\u200d"
OUTSIDE = ["a", "b", '"', r"\\", r"\x01", r"\n", ".", r"\W", r"\S", r"\D", r"\d", r"\."]
Random = random.Random


@cache
def texts() -> list[str]:
    """What each token adds to an output, as far as it can be seen."""
    decode = tokenizer().decode
    return [decode([i], skip_special_tokens=False) for i in range(vocab())]


@cache
def tempting() -> frozenset[int]:
    """Tokens that outputs are led to: quotes, backslashes, controls and escapes."""
    odd = re.compile(r'["\\\x00-\x1f\x7f]|u00|[^\x00-\x7f]')
    return frozenset(i for i, text in enumerate(texts()) if odd.search(text))


def written(rng: Random, requested: dict[str, Any], start: str = "") -> str | None:
    """An output under a constraint that is led astray; None: it did not end."""
    walk = matcher(**requested)
    tokens = tokenizer().encode(start, add_special_tokens=False)
    walk.advance(tokens)
    for count in range(4 * LONGEST):
        allowed_tokens = allowed(walk.mask())
        if allowed_tokens & ENDS and (
            allowed_tokens <= ENDS or count > LONGEST or rng.random() < 0.2
        ):
            return tokenizer().decode(tokens, skip_special_tokens=False)
        may = sorted(allowed_tokens - ENDS)
        candidates = [token for token in may if token in tempting()] or may
        if count > LONGEST:
            closing = [token for token in may if texts()[token][:1] in '"}]>']
            candidates = closing or may
        tokens.append(rng.choice(candidates if rng.random() < 0.8 else may))
        walk.advance(tokens[-1:])
    return None


def any_set(rng: Random) -> str:
    """A set of characters, in one of the ways in which sets are written."""
    small = rng.random() < 0.5
    codes = rng.sample(range(128), rng.randint(1, 6) if small else rng.randint(90, 127))
    if rng.random() < 0.5:  # all controls, or nearly
        codes = [*{*codes, *range(32)} - {*rng.sample(range(32), rng.randint(0, 2))}]
    if rng.random() < 0.3:
        codes = [*{*codes} - {34, 92, rng.randrange(128)}]
    members = [one_of(rng, number) for number in codes or [97]]
    members += rng.sample(BEYOND, rng.randint(0, 3))
    members += rng.sample([r"\d", r"\w", r"\s", r"\W", r"\S", r"\D"], rng.random() < 0.3)
    if rng.random() < 0.5:
        low, high = sorted(rng.sample(range(128), 2))
        members.append(f"\\x{low:02x}-\\x{high:02x}")
    rng.shuffle(members)
    if rng.random() < 0.2:
        members.insert(0, "]")
    if rng.random() < 0.2:
        members.append(rng.choice(["&&a", "--b", "~~c", "[", "[:alpha:", "-"]))
    return f"[{'^' if rng.random() < 0.6 else ''}{''.join(members)}]"


def one_of(rng: Random, number: int) -> str:
    """A character within a set."""
    plain = chr(number)
    if plain.isalnum() or (plain not in "\\]^-[&~|" and rng.random() < 0.4):
        return plain
    return rng.choice([f"\\x{number:02x}", f"\\u{number:04X}"])


def any_pattern(rng: Random) -> str:
    """A regular expression that `re` takes."""
    while True:
        pattern = maybe_pattern(rng)
        with contextlib.suppress(re.error):
            re.compile(pattern)
            return pattern


def maybe_pattern(rng: Random) -> str:
    atoms = [
        any_set(rng) if rng.random() < 0.8 else rng.choice(OUTSIDE)
        for _ in range(rng.randint(1, 3))
    ]
    atoms = [atom + rng.choice(["", "", "+", "*", "?", "{1,3}", "+?"]) for atom in atoms]
    body = "".join(atoms)
    if rng.random() < 0.3:
        body = f"({body}|{any_set(rng)})"
    if rng.random() < 0.1:
        body = f"(?i:{body})"
    return f"^{body}$" if rng.random() < 0.8 else body


def value_of(pattern: str) -> Any:
    return {"type": "string", "pattern": pattern}


def object_of(pattern: str, other_properties: Any) -> Any:
    return {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}},
        "additionalProperties": other_properties,
    }


def as_value(rng: Random, pattern: str) -> bool:
    text = written(rng, {"json": value_of(pattern)}, '"')
    if text is not None:
        check(json.loads(text), value_of(pattern), pattern)
    return text is not None


def as_name(rng: Random, pattern: str) -> bool:
    schema = object_of(pattern, rng.choice([False, {"type": "boolean"}]))
    text = written(rng, {"json": schema}, '{"')
    if text is None:
        return False
    # What `json.loads` makes of two equal names is the last one's alone.
    for name, value in json.loads(text, object_pairs_hook=list):
        jsonschema.validate({name: value}, schema)
        if value is not True and value is not False:
            assert re.search(pattern, name), (pattern, name)
    return True


def as_argument(rng: Random, pattern: str) -> bool:
    schema = {
        "type": "object",
        "properties": {"a": value_of(pattern)},
        "required": ["a"],
        "additionalProperties": False,
    }
    calling = Calling(
        format="hermes",
        callees=(Callee("f", arguments_schema(schema, "tools[0]")),),
        must=True,
        several=False,
        token=tokenizer().added_token_id,
    )
    start = '<tool_call>\n{"name": "f", "arguments": {"a": "'
    text = written(rng, {"grammar": grammar(calling)}, start)
    if text is not None:
        body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        arguments = json.loads(body)["arguments"]
        check(arguments["a"], value_of(pattern), pattern)
    return text is not None


def as_regex(rng: Random, pattern: str) -> bool:
    text = written(rng, {"regex": pattern})
    if text is not None:
        assert re.fullmatch(pattern, text), (pattern, text)
    return text is not None


def check(text: str, schema: Any, pattern: str) -> None:
    assert re.search(pattern, text), (pattern, text)
    jsonschema.validate(text, schema)


@pytest.mark.filterwarnings("ignore:Possible")  # sets, of which others have operations
@pytest.mark.parametrize(
    "numbers", [*long([range(24)]), *claimed([range(24, 2024)])], ids=str
)
def test_outputs_are_as_their_patterns_say(numbers: range) -> None:
    ended = refused = 0
    for number in numbers:
        rng = Random(number)
        pattern = any_pattern(rng)
        for form in (as_value, as_name, as_argument, as_regex):
            try:
                ended += form(rng, pattern)
            except GrammarError:  # there is no text, or none that goes on as it began
                refused += 1
    assert ended > 2 * len(numbers)
    assert refused < len(numbers) / 4


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]+$', ["a\n\x00é", "\\"], ['"', 'a"']),
        (r"^[^\\]+$", ['a"\x1f'], ["\\"]),
        (r"^[\x00-\x1f]+$", ["\x00\n\x1f"], ['"', "\\", "a"]),
        (r"^[\x00-\x09\x0b-\x1f]$", ["\x02", "\x1f"], ['"', "\\", "\n"]),
        (r"^([\x00-\x0f]|[\x10-\x1f])$", ["\x00"], ['"', "\\"]),
        (r"^\p{Cc}$", ["\x00"], ['"', "\\"]),
        (r"^[\s\S]+$", ['a"\\\n\x01'], []),
        ("^.$", ['"', "\\", "\x01"], ["\n", "\r", "\u2028", "\u2029"]),
        ("^(?s:.)$", ["\n", "\r", "\u2028"], []),
        ("^[^a&&b]+$", ["c"], ["a", "&", "b"]),
        ("^[a[b]+$", ["[ab"], ["]"]),
        (r"^[]\-x]+$", ["]-x"], ["\\"]),
        (r"^\S+$", ["é中"], ["\x1c", "\ufeff", " "]),
        (r"^[\W\d]+$", ["! 5"], ["é", "a", "_"]),
        (r"^[^\W]+$", ["aZ_9"], ["é", " "]),
        (r"^\D\s$", ["x\n"], ["٣ ", "x\x1c"]),
        (r"^\<a{2}/\x41\u0042\t$", ["<aa/AB\t"], ["aa/AB\t"]),
        ("^{x}]$", ["{x}]"], ["x"]),
        (r"^[\ud800-\udfffa]$", ["a"], ["b"]),
        (r"^[^\ud800-\udfff]$", ["a"], []),
        (r"^[^b-\U0010ffff]$", ["a"], ["\ud7ff", "\ue000"]),
        (r"^[^\ud7ff\ue000]$", ["\ue001"], ["\ud7ff", "\ue000"]),
        (r"^[^\p{Cn}\p{Co}]$", ["a"], ["\ud7ff", "\ue000"]),
        (r"^(?P<a>b)(?:c|d)*?$", ["bcd"], ["b|"]),
        ("^(?i:[^ik])$", ["x"], ["k", "K", "\u212a", "\u0130", "\u0131"]),
        (r"^\p{L}+$", ["aé"], ["1"]),
        (r"^[^\p{P}]+$", ["a\n\x02"], ['"', "\\", "!"]),
        (r"^[^a\p{P}]+$", ["b\n\x02"], ['"', "\\", "a"]),
    ],
)
def test_a_pattern_means_what_it_says(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert takes_value(value_of(pattern), text)
    for text in wrong:
        assert not takes_value(value_of(pattern), text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\bx", r"the escape '\\b'"),
        (r"^\Ax\Z", r"the escape '\\A'"),
        (r"(a)\1", r"the escape '\\1'"),
        (r"\012", r"the escape '\\012'"),
        (r"\cA", r"the escape '\\c'"),
        ("(?x)a b", "the flag '(?x)'"),
        ("^a*+$", "the repetition '*+'"),
        ("[b-a]", "the range 'b-a'"),
        ("[a", "a bracket is not closed"),
        ('^[^"]$|\x01', "leave U+0001 out"),
        ("a\\", "single backslash"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(pattern: str, reason: str) -> None:
    for schema in (value_of(pattern), object_of(pattern, other_properties=False)):
        error = refusal(json={"items": schema})
        assert reason in str(error)
        assert "(at /items)" in str(error)


def test_patterns_that_references_lead_to_are_rewritten() -> None:
    for place in ("$defs", "default", "x-parts"):
        definitions = {"a/b": value_of('^[^"]$')}
        schema = {"$ref": f"#/{place}/a~1b", place: definitions}
        assert takes_value(schema, "x")
        assert not takes_value(schema, '"')
    loops = {"type": "array", "items": {"$ref": "#"}}
    assert takes_value(loops, [[], [[]]])


def test_a_name_has_one_spelling_where_patterns_decide_about_names() -> None:
    schema = object_of("^a", {"type": "string"})
    assert takes('{"a": 1, "b": "x"}', json=schema)
    assert not takes('{"a": "x"}', json=schema)
    assert not takes(r'{"\u0061": "x"}', json=schema)
    for odd in ("a\x01", "[\x01]b", "[\x02-\x04]b", "\x7f"):
        error = refusal(json=object_of(odd, {"type": "string"}))
        assert "beside patternProperties" in str(error)
        assert refusal_or_none(object_of(odd, other_properties=False)) is None
    texts: Any
    for texts in ({"const": "\x01"}, {"enum": [{"a\x7f": 1}]}, {"required": ["\x00"]}):
        assert "U+00" in str(refusal(json={**schema, "items": texts}))
    assert takes('{"b": "\\n"}', json=schema)


def refusal_or_none(schema: Any) -> str | None:
    try:
        matcher(json=schema)
    except GrammarError as error:
        return str(error)
    return None


def test_two_patterns_that_are_the_same_are_refused() -> None:
    named = {"patternProperties": {"^a": {"type": "integer"}, r"^\x61": {}}}
    assert "mean the same" in str(refusal(json=named))


def test_sets_are_left_whole_where_that_is_safe() -> None:
    assert rewrite_pattern("^[^a]$") == "^[^a]$"
    assert rewrite_pattern('^[^"]$') == r"^[[^\x{22}]--\x{1}]$"
    assert rewrite_pattern('^[^"\x05]$') == r"^[^\x{22}\x{5}]$"
