"""The end of a JSON value: the same as the json module says."""

import json
import random

import pytest

from minfer.effects.text.tools.json_scanner import JsonScanner

VALUES = [
    "{}",
    "[]",
    '""',
    '{"a": [1, -2.5e+3, 0, {"b": null}], "ü🙂": true}',
    "[[], [[]], {}, [{}]]",
    '"\\u00e9\\"\\\\\\/\\b\\f\\n\\r\\t"',
    ' \r\n\t{ "a" :\n1 , "b" : false }',
]
WRONG = [
    "{,}",
    "[1,]",
    '{"a": 1,}',
    '{"a" 1}',
    "{a: 1}",
    "{1: 1}",
    "[1 2]",
    "{]",
    "[}",
    "[01]",
    "[1.]",
    "[.5]",
    "[+1]",
    "[1e]",
    "[NaN]",
    "[True]",
    "[--1]",
    "[nul]",
    "'a'",
    '"\\x"',
    '"\\u12g4"',
    '{"a": }',
    '{"a": 1]',
    "[" + "9" * 600 + "]",
]


def scanned(text: str, size: int = 10**6) -> tuple[JsonScanner, int]:
    scanner = JsonScanner()
    end = 0
    while end < len(text) and not (scanner.done or scanner.broken):
        end += scanner.feed(text[end : end + size])
    return scanner, end


@pytest.mark.parametrize("text", VALUES)
@pytest.mark.parametrize("size", [1, 2, 10**6])
def test_values(text: str, size: int) -> None:
    scanner, end = scanned(text + " ,", size)
    assert (scanner.done, scanner.broken, end) == (True, False, len(text))
    assert scanner.take_accepted() == text
    assert scanner.take_accepted() == ""


@pytest.mark.parametrize("text", [value[:-1] for value in VALUES])
def test_a_value_that_breaks_off(text: str) -> None:
    scanner, _ = scanned(text)
    assert not scanner.done
    scanner.end()
    assert scanner.broken


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("size", [1, 10**6])
def test_what_is_no_json(text: str, size: int) -> None:
    scanner, end = scanned(text, size)
    assert (scanner.done, scanner.broken) == (False, True)
    assert end < len(text)


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("[celsius]", "["),
        ('{"a": oops}', '{"a": '),
        ("[nulx]", "[nul"),
        ("[truer]", "[true"),
        ("[1.]", "[1."),
        ("[1e+]", "[1e+"),
        ("[01]", "[0"),
        ('["\\x"]', '["\\'),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_no_more_is_let_through_than_begins_json(
    text: str, beginning: str, size: int
) -> None:
    scanner, end = scanned(text, size)
    assert (scanner.take_accepted(), text[:end]) == (beginning, beginning)


@pytest.mark.parametrize("text", ["1", "-0.5e9", "true", "null"])
def test_words_end_with_what_follows_or_with_the_text(text: str) -> None:
    scanner, end = scanned(text + "}")
    assert (scanner.done, end) == (True, len(text))
    scanner, _ = scanned(text)
    assert not scanner.done
    scanner.end()
    assert scanner.done


def test_control_characters_in_strings_become_escapes() -> None:
    scanner, _ = scanned('{"a\n": "\x00\t"\n}')
    assert json.loads(scanner.take_accepted()) == {"a\n": "\x00\t"}


def test_it_agrees_with_the_json_module() -> None:
    """On mutations of good values."""
    draw = random.Random(5)
    for _ in range(3000):
        text = draw.choice(VALUES).strip()
        place = draw.randrange(len(text))
        text = (
            text[:place]
            + draw.choice('{}[]",:\\ 1ae-') * draw.randrange(2)
            + text[place + 1 :]
        )
        scanner, end = scanned(text)
        scanner.end()
        try:
            json.loads(text)
        except ValueError:
            assert not (scanner.done and end == len(text)), text
        else:
            assert scanner.done, text
            assert text[end:].strip() == "", text
