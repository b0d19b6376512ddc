"""Look-aheads are translated: Python's `re`, which knows them, says what they mean."""

import re
from random import Random

import pytest

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.lookaheads import (
    as_one_pattern,
    matches,
    without_lookaheads,
)
from tests.effects.text.grammars.bundled import takes_value
from tests.quick import at_most

DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
PATTERNS = [
    DURATION,
    r"(?=a.*x)[a-z0-9]+$",
    r"^(?!a|.*9)",
    r"x(?!0)",
    r"^(?:a(?=1|P)|W)?.*$",
    r"^(?=.{2,4}$)(?!.*(?:0{2}|9))[^W]*$",
    r"^(?!$)a*$",
    r"^(?=(?!a)[a-x]).",
    r"^(?!^[-+.]*$)[+-]?1*\.?9*$",
    r"^(?=.*\d)(?=.*[A-Z])[\w.]{3,}$",
    r"(?!a)",
]


def texts(count: int, alphabet: str = "aPT01WYMS.,x9+-") -> list[str]:
    random = Random(0)
    return [
        "".join(random.choices(alphabet, k=random.randint(0, 6))) for _ in range(count)
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_texts_match(pattern: str) -> None:
    patterns = without_lookaheads(pattern)
    joined = as_one_pattern(pattern)
    assert not any(
        "(?=" in translated or "(?!" in translated for translated in (*patterns, joined)
    )
    for text in texts(3000):
        right = re.search(pattern, text) is not None
        assert all(re.search(translated, text) for translated in patterns) == right
        assert bool(re.search(joined, text)) == right


def test_a_translation_is_the_same_in_each_process() -> None:
    first = without_lookaheads(DURATION)
    without_lookaheads.cache_clear()
    assert without_lookaheads(DURATION) == first


def test_several_patterns_become_one() -> None:
    joined = as_one_pattern("^[a-z]+", "[0-9]$", "^(?s:.{2,3})$")
    for text in texts(3000, "ab1é"):
        right = re.match("[a-z]", text) and text[-1:] in "1" and 2 <= len(text) <= 3
        assert bool(re.search(joined, text)) == bool(right)


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, "^(?:a|P.)*$", r"^$|^\w+$", "W", r"a(?:b|$)", "[^a]1"]
)
def test_a_name_is_matched_without_backtracking(pattern: str) -> None:
    for text in texts(300):
        assert matches(pattern, text) == (re.search(pattern, text) is not None)


def test_matching_takes_no_exponential_time() -> None:
    with at_most(1):
        assert not matches("^(a+)+$", "a" * 64 + "b")


def test_characters_that_are_not_of_ascii() -> None:
    assert takes_value({"pattern": "^(?!a)é$", "type": "string"}, "é")
    (translated,) = without_lookaheads("^(?=.{1,2}$)[^a]+$")[:1]
    assert re.search(translated, "éé")
    for text, right in (("é1", True), ("a", False), ("ééé", False)):
        assert takes_value({"pattern": "^(?=.{1,2}$)[^a]+$", "type": "string"}, text) == (
            right
        )


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(?:a(?=b))*$", "repetition"),
        ("a(?=^b)", "anchor"),
        (r"(?=a)\bc", "escape"),
        (r"(?=a)\1", "escape"),
        ("(?=a", "bracket"),
        ("(?=a))", "bracket"),
        ("(?=[b-a])", "range"),
        ("(?=*)", "repetition"),
        ("(?=a)b" + "{1}" * 4000, "repetition"),
        ("(?=a)b{2}{2}", "repetition"),
        ("(?=a)b{" + "9" * 5000 + "}", "too large"),
        ("(?=a)b{1," + "9" * 5000 + "}", "too large"),
        (f"(?=a){'(' * 40}a{')' * 40}", "too large"),
        ("(?=a)" + "b" * 20_000, "too large"),
        (r"a(?!b\p{L})c", "look-ahead beside"),
        ("^x(?=b)a$", "matches nothing"),
    ],
)
def test_what_cannot_be_translated_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        without_lookaheads(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!.*a.{12})b*c*$|^(?!(?:.*x.{14}y))[a-z]*$",
        "^x(?=" + "a?" * 1500 + "$)" + "a?" * 1500,
        "^x(?=" + "(?:a|b|c)*" * 500 + ")(?!" + "(a*b*)*" * 300 + ")",
        "^x" + "".join(f"(?=.{{0,{size}}}a)" for size in range(400, 500)),
    ],
)
def test_a_hard_one_is_refused_soon(pattern: str) -> None:
    with at_most(4), pytest.raises(GrammarError, match="look-aheads"):
        without_lookaheads(pattern)
