"""Requests that begin alike have equal keys, as far as they do."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.proxy.assumed_cache import AssumedCache
from minfer.effects.proxy.prompt_keys import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MAX_KEYED_BYTES,
    PromptKeys,
    read_fields,
    text_keys,
)

LONG = "x" * 3 * BLOCK_BYTES


def keys_of(**body: Any) -> PromptKeys:
    data = json.dumps(body).encode()
    return text_keys(read_fields(data), data)


def turn(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


@pytest.mark.parametrize("field", ["messages", "input"])
def test_the_next_turn_begins_with_the_blocks_of_this_one(field: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [turn("system", "s" * 700), turn("user", "u" * 700)]
    first = keys_of(**{field: messages}, tools=tools, model="m")
    messages += [turn("assistant", "a" * 300), turn("user", "v")]
    second = keys_of(**{field: messages}, tools=tools, model="m", temperature=1)
    assert len(first.keys) == 1500 // BLOCK_BYTES
    assert second.keys[: len(first.keys)] == first.keys
    assert second.tokens > first.tokens >= len(first.keys) * BLOCK_TOKENS


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"cache_salt": "salt"},
        {"tools": [{"name": "f"}]},
        {"system": "be brief"},
        {"prompt": "y" + LONG},
    ],
)
def test_what_changes_the_beginning_changes_all_keys(changed: dict[str, Any]) -> None:
    base = {"model": "m", "prompt": LONG}
    assert not {*keys_of(**base).keys} & {*keys_of(**{**base, **changed}).keys}


def test_marks_of_caching_and_the_order_of_fields_change_nothing() -> None:
    content = {"type": "text", "text": LONG}
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = keys_of(messages=[turn("user", "a"), {"role": "user", "content": [content]}])
    marked = {"content": [{**mark, **content}], "role": "user"}
    assert keys_of(messages=[turn("user", "a", **mark), marked]) == plain
    assert len(plain.keys) >= 3


def test_token_ids_are_blocks_of_ids() -> None:
    ids = [*range(3 * BLOCK_TOKENS + 5)]
    prompt = keys_of(prompt=ids)
    assert (len(prompt.keys), prompt.tokens) == (3, len(ids))
    assert keys_of(input=[ids[:70], [1, 2]]) == PromptKeys(prompt.keys[:1], 72)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [-1, 99999999999999999999999999]}',
        b'{"prompt": [[], "a"], "tools": 3}',
        b'{"messages": "a", "input": []}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b', "x": "cache_control"}',
        b'{"user": 5, "metadata": [], "max_tokens": "a", "prompt": {"a": 1e999}}',
        b'{"prompt": "\xff\xfe"}',
    ],
)
def test_what_is_no_request_has_no_keys_and_does_no_harm(body: bytes) -> None:
    fields = read_fields(body)
    assert text_keys(fields, body).keys == ()
    assert (fields.user_id, fields.session, fields.output) == ("", "", None)


def test_a_very_long_text_has_keys_for_its_beginning() -> None:
    prompt = keys_of(messages=[turn("user", "x" * 1000)] * 1500)
    assert len(prompt.keys) == MAX_KEYED_BYTES // BLOCK_BYTES
    assert prompt.tokens > 1500 * 1000 // 4


def test_whose_request_it_is_and_how_much_it_may_write() -> None:
    fields = read_fields(b'{"metadata": {"user_id": "u"}, "max_tokens": 5}')
    assert (fields.user_id, fields.session, fields.output) == ("u", "u", 5)
    fields = read_fields(b'{"user": "u", "prompt_cache_key": "k", "max_tokens": 4096}')
    assert (fields.user_id, fields.session, fields.output) == ("u", "k", None)
    fields = read_fields(b'{"safety_identifier": "s", "previous_response_id": "p"}')
    assert (fields.user_id, fields.previous) == ("s", "p")


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=20), st.integers(1, 8))
def test_an_assumed_cache_holds_prefixes_without_gaps(
    prompts: list[list[int]], max_blocks: int
) -> None:
    """The index of the router wants that; what was used last stays."""
    cache, cached = AssumedCache(max_blocks), set[bytes]()
    for prompt in prompts:
        chain = tuple([bytes(prompt[: i + 1]) for i in range(len(prompt))])
        use = cache.use(chain)
        assert not {*use.published} & cached
        cached |= {*use.published}
        assert {*use.evicted} <= cached
        cached -= {*use.evicted}
        assert len(cached) == len(cache) <= max_blocks
        assert {*chain[:max_blocks]} <= cached
        assert all(key[:-1] in cached or len(key) == 1 for key in cached)
