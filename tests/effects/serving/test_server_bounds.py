"""What the command line says of bounds, and what it must not."""

import argparse
from pathlib import Path

import pytest

from minfer.effects.cli.serve import add_options
from minfer.effects.serving.access.server_bounds import ServerBounds, read_bounds
from minfer.values.checks import ConfigError


def parse(*arguments: str) -> ServerBounds:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(arguments)
    options.api_key = options.api_key or []
    return read_bounds(options)


def test_options_become_bounds(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "a"\nkey = "b"\n')
    bounds = parse(
        *("--api-key", "x", "--api-key", "y", "--api-keys-file", str(file)),
        *("--preparers", "3", "--body-timeout", "4", "--request-timeout", "5"),
        *("--enforce-deadlines", "--max-connections", "6", "--header-timeout", "7"),
    )
    assert [key.name for key in bounds.keys.known] == ["key-1", "key-2", "a"]
    assert (bounds.workers, bounds.body_timeout, bounds.request_timeout) == (3, 4, 5)
    assert bounds.enforce_deadlines
    assert (bounds.connection_limits.connections, bounds.connection_limits.header) == (
        6,
        7,
    )


def test_the_defaults() -> None:
    bounds = parse()
    assert bounds.keys.known == ()
    assert bounds.workers >= 1
    assert (bounds.body_timeout, bounds.request_timeout, bounds.enforce_deadlines) == (
        60,
        None,
        False,
    )
    assert bounds.connection_limits.header == 10


def test_servers_with_one_secret_find_what_the_others_have_cached() -> None:
    first, second = (parse("--api-key", "x", "--cache-secret", "s") for _ in range(2))
    third = parse("--api-key", "y", "--cache-secret", "s")
    different = [parse("--api-key", "x"), parse("--api-key", "x", "--cache-secret", "t")]
    salts = [
        bounds.tenants.salt(bounds.keys.known[0], b"")
        for bounds in (first, second, third, *different)
    ]
    assert salts[0] == salts[1] == salts[2]
    assert len(set(salts)) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--preparers", "-1"),
        ("--body-timeout", "0"),
        ("--max-connections", "0"),
    ],
)
def test_what_cannot_be_is_named(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be"):
        parse(option, value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--body-timeout", "inf"),
        ("--header-timeout", "nan"),
        ("--request-timeout", "-3"),
    ],
)
def test_what_is_no_time_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(option, value)
    error = capsys.readouterr().err
    assert f"argument {option}: '{value}' is not a number of seconds from 0" in error


def test_a_secret_has_one_key_of_reasoning_and_none_a_random_one() -> None:
    secret = parse("--cache-secret", "s").reasoning_key
    assert parse("--cache-secret", "s").reasoning_key == secret
    assert parse("--cache-secret", "t").reasoning_key != secret
    assert parse().reasoning_key != parse().reasoning_key


def test_options_of_responses_and_the_tokenizer() -> None:
    assert not parse().refuse_hosted_tools
    assert not parse().tokenizer_info
    bounds = parse("--refuse-hosted-tools", "--enable-tokenizer-info-endpoint")
    assert bounds.refuse_hosted_tools
    assert bounds.tokenizer_info


ADMIN = '[[keys]]\nname = "a"\nkey = "b"\nadmin = true\nadapters = ["x/*"]\n'
LOADS = ("--enable-lora", "--allow-runtime-lora-updating")


def test_adapters_come_from_where_the_operator_says(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(ADMIN)
    bounds = parse(
        *LOADS, "--api-keys-file", str(file), "--lora-folders", str(tmp_path), *HUB
    )
    sources = bounds.adapter_sources
    assert sources.folders == (tmp_path.resolve(),)
    assert sources.hub == {"sql": "org/sql@v1"}
    assert sources.runtime_updates
    (key,) = bounds.keys.known
    uses = [key.may_use(name) for name in ("x/1", "x/1/2", "x", "y/x/1", "X/1")]
    assert uses == [True, True, False, False, False]
    assert not parse("--enable-lora").adapter_sources.on_first_use


HUB = ("--lora-hub", "sql=org/sql@v1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lora-modules", "a=b"), "--lora-modules needs --enable-lora; add it"),
        (HUB, "--lora-hub needs --enable-lora; add it"),
        (("--lora-folders", "/"), "--lora-folders needs --enable-lora; add it"),
        (LOADS[1:], "--allow-runtime-lora-updating needs --enable-lora; add it"),
        ((*LOADS, *HUB), "needs a key with admin = true"),
        ((*LOADS, *HUB, "--api-key", "x"), "needs a key with admin = true"),
        ((*LOADS, "--api-keys-file", "KEYS"), "add one of them"),
    ],
)
def test_options_of_adapters_need_each_other(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "KEYS.toml"
    file.write_text(ADMIN)
    given = [str(file) if word == "KEYS" else word for word in words]
    with pytest.raises(ConfigError) as error:
        parse(*given)
    assert message in str(error.value)
