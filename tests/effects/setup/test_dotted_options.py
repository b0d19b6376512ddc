"""Options that are given by the keys of their objects, and vLLM's levels."""

import pytest

from minfer import FlexibleArgumentParser
from minfer.effects.setup.dotted_options import with_objects
from minfer.values.checks import ConfigError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--a.b 1 --c d --a.e=x", '--a={"b":1,"e":"x"} --c d'),
        ("--a.b.c true --a.b.d [1]", '--a={"b":{"c":true,"d":[1]}}'),
        ("--a.b+ 1 --a.b+ x", '--a={"b":[1,"x"]}'),
        ("-cc.mode=3 -O.level 2", '-cc={"mode":3} --compilation-config={"level":2}'),
        (
            "-O3 -O=1 -O 2",
            "--optimization-level=3 --optimization-level=1 --optimization-level 2",
        ),
        ("--c -0.5 -ofile.html x.y -- --a.b 1", "--c -0.5 -ofile.html x.y -- --a.b 1"),
        ("--a. 1 --.b --a.b(c 1", "--a. 1 --.b --a.b(c 1"),
    ],
)
def test_keys_become_one_object(words: str, expected: str) -> None:
    assert with_objects(words.split()) == expected.split()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--a.b", "--a.b needs a value"),
        ("--a.b --c", "--a.b needs a value"),
        ("--a.b 1 --a {}", "as a whole and by keys"),
        ("--a={} --a.b 1", "as a whole and by keys"),
        ("--a.b 1 --a.b.c 2", "'b' has a value, and no keys"),
        ("--a.b 1 --a.b+ 2", "is no list; leave the [+] out"),
    ],
)
def test_keys_that_contradict_are_refused(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_objects(words.split())


def test_a_text_with_blanks_is_no_option() -> None:
    assert with_objects(["--a.b c"]) == ["--a.b c"]


def test_underscores_of_keys_stay() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--some-config")
    parsed = parser.parse_args(["--some_config.a_b", "1"])
    assert parsed.some_config == '{"a_b":1}'
