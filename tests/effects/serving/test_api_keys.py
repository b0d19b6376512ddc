"""Keys are read from where they are written."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.serving.access.api_keys import ApiKeys, digest, read_keys
from minfer.values.checks import ConfigError


def test_keys_of_the_command_line() -> None:
    assert read_keys(["", ""], None) == ApiKeys()
    (key,) = read_keys(["secret"], None).known
    assert (key.name, key.digest) == ("key", digest(b"secret"))
    assert "secret" not in repr(key)
    assert str(key.digest) not in repr(key)
    two = read_keys(["a", "b"], None)
    assert [key.name for key in two.known] == ["key-1", "key-2"]
    assert two.owner(b"b") is two.known[1]
    assert two.owner(b"") is None
    assert two.owner(b"c") is None


ENTRY = {"name": "team", "key": "sk-1", "priority": -2}
TOML = """
[[keys]]
name = "team"
key = "sk-1"
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
    first, second = read_keys(["plain"], path).known
    assert first.name == "key"
    assert (second.name, second.digest, second.priority) == ("team", digest(b"sk-1"), -2)


SHARING = [({}, False), ({"share": "tenant"}, False), ({"share": "all"}, True)]


@pytest.mark.parametrize(("cache", "shared"), SHARING)
def test_tenants_of_a_file(tmp_path: Path, cache: Any, shared: bool) -> None:
    path = tmp_path / "keys.json"
    entry_b = {"name": "b", "key": "b", "tenant": "of both", "admin": True}
    path.write_text(json.dumps({"keys": [ENTRY, entry_b], "cache": cache}))
    keys = read_keys([], path)
    entries = [(key.name, key.tenant, key.admin) for key in keys.known]
    assert entries == [("team", "team", False), ("b", "of both", True)]
    assert keys.share_all is shared


BAD: dict[str, tuple[Any, str]] = {
    "no list": ({}, "a list of API keys"),
    "an empty list": ([], "a list of API keys"),
    "no table": (["sk"], "key 1 must be a table"),
    "no name": ([{"key": "x"}], "key 1: name must be"),
    "no key": ([ENTRY, {"name": "x", "key": ""}], "key 2: key must be"),
    "a long name": ([{"name": "x" * 513, "key": "x"}], "at most 512 characters"),
    "an unknown field": ([{**ENTRY, "limit": 5}], "no field 'limit'"),
    "no number": ([{**ENTRY, "priority": True}], "priority must be a whole number"),
    "a limit of requests": (
        [{**ENTRY, "requests_per_minute": 6}],
        "requests_per_minute: rate limits were removed; a gateway",
    ),
    "a limit of tokens": (
        [{**ENTRY, "tokens_per_minute": None}],
        "tokens_per_minute: rate limits were removed; a gateway",
    ),
    "no tenant": ([{**ENTRY, "tenant": ""}], "key 1: tenant must be a text"),
    "no patterns": ([{**ENTRY, "adapters": "a"}], "key 1: adapters must be a list of"),
    "no pattern": ([{**ENTRY, "adapters": [""]}], "key 1: adapters must be a list of"),
    "no truth": ([{**ENTRY, "admin": 1}], "key 1: admin must be true or false"),
    "another table": ({"keys": [ENTRY], "cahe": {}}, "no table 'cahe'; it has keys and"),
    "no cache": ({"keys": [ENTRY], "cache": "all"}, "cache must be a table"),
    "what caches have not": (
        {"keys": [ENTRY], "cache": {"size": 1}},
        "field share alone",
    ),
    "no sharing": ({"keys": [ENTRY], "cache": {"share": True}}, "share of cache must be"),
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
