"""Keys are read from where they are written, and their limits are buckets."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.serving.keys import Bucket, Key, Keys, digest, read_keys
from minfer.setting import ConfigError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_a_minutes_worth_and_fills_evenly() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0
    assert bucket.wait(1) == 1
    clock.now += 10
    assert bucket.level == 10
    assert bucket.wait(10) == 0
    bucket.take(40)  # overdrawn, by what was not known before
    assert bucket.level == -30
    assert bucket.wait(1) == 31
    assert bucket.full() == 90
    clock.now += 1000
    assert bucket.level == 60
    assert bucket.wait(10**9) == 0  # more than there ever is needs a full one


@pytest.mark.parametrize("size", [1, 7, 600, 10**7 + 19])
def test_a_minutes_worth_is_there_to_the_last_whatever_a_clock_says(size: int) -> None:
    clock = Clock()
    clock.now = 12345678.9  # half a year; of its nanoseconds a float keeps none
    bucket = Bucket(size, clock)
    for _ in range(7):
        assert bucket.take_if_there(size / 7) == 0
    assert bucket.take_if_there(1) == pytest.approx(60 / size, rel=0.01)
    assert bucket.level == pytest.approx(0, abs=size / 10**8)


def test_what_is_not_there_is_not_taken() -> None:
    bucket = Bucket(60, Clock())
    assert bucket.take_if_there(50) == 0
    assert bucket.take_if_there(20) == 10
    assert bucket.level == 10


def test_keys_of_a_file_have_numbers_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limits = {"requests_per_minute": 6, "tokens_per_minute": 600}
    entries = [{"name": name, "key": name, **limits} for name in "ab"]
    path.write_text(json.dumps(entries))
    first, second = read_keys([], path).known
    assert first.requests is not None
    assert first.tokens is not None
    first.requests.take(3)
    first.tokens.take(400)
    assert round(first.requests.level) == 3
    assert round(first.tokens.level) == 200
    for bucket in (second.requests, second.tokens):
        assert bucket is not None
        assert bucket.level == bucket.size


def test_headers_are_openais() -> None:
    clock = Clock()
    key = Key("a", b"", Bucket(60, clock), Bucket(600, clock))
    assert key.tokens is not None
    key.tokens.take(700)
    told = {name.decode(): said.decode() for name, said in key.headers()}
    assert told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "70.000s",
    }
    assert Key("b", b"").headers() == []


def test_keys_of_the_command_line() -> None:
    assert read_keys(["", ""], None) == Keys()
    (one,) = read_keys(["secret"], None).known
    assert (one.name, one.digest) == ("key", digest(b"secret"))
    assert "secret" not in repr(one)
    assert str(one.digest) not in repr(one)
    two = read_keys(["a", "b"], None)
    assert [key.name for key in two.known] == ["key-1", "key-2"]
    assert two.owner(b"b") is two.known[1]
    assert two.owner(b"") is None
    assert two.owner(b"c") is None


ENTRY = {"name": "team", "key": "sk-1", "requests_per_minute": 6, "priority": -2}
TOML = """
[[keys]]
name = "team"
key = "sk-1"
requests_per_minute = 6
priority = -2
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("k.toml", TOML),
        ("k.json", json.dumps({"keys": [ENTRY]})),
        ("k", json.dumps([ENTRY])),
    ],
)
def test_keys_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    first, found = read_keys(["plain"], path).known
    assert first.name == "key"
    assert (found.name, found.digest, found.priority) == ("team", digest(b"sk-1"), -2)
    assert found.requests is not None
    assert (found.requests.size, found.tokens) == (6, None)


BAD: dict[str, tuple[Any, str]] = {
    "no list": ({}, "a list of API keys"),
    "an empty list": ([], "a list of API keys"),
    "no table": (["sk"], "key 1 must be a table"),
    "no name": ([{"key": "x"}], "key 1: name must be"),
    "no key": ([ENTRY, {"name": "x", "key": ""}], "key 2: key must be"),
    "a long name": ([{"name": "x" * 257, "key": "x"}], "at most 256 characters"),
    "an unknown field": ([{**ENTRY, "limit": 5}], "no field 'limit'"),
    "no number": ([{**ENTRY, "tokens_per_minute": True}], "tokens_per_minute must be"),
    "no room": ([{**ENTRY, "requests_per_minute": 0}], "whole number from 1"),
    "twice": ([ENTRY, ENTRY], "names of API keys must differ"),
    "the same key": ([ENTRY, {**ENTRY, "name": "b"}], "keys of API keys must differ"),
}


@pytest.mark.parametrize(("entries", "words"), BAD.values(), ids=BAD)
def test_a_file_that_is_wrong(tmp_path: Path, entries: Any, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=words):
        read_keys([], path)


@pytest.mark.parametrize("text", ["{", "[" * 10**5, "[[keys]"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    for path in (tmp_path / "keys.json", tmp_path / "keys.toml"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no API keys can be read"):
            read_keys([], path)
    with pytest.raises(ConfigError, match="no API keys can be read"):
        read_keys([], tmp_path / "missing")
