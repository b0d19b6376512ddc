"""A body that is no object of known fields is refused, in time, by its field's name."""

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.completions import CompletionBody
from tests.effects.serving.openai.helpers import refused
from tests.quick import at_most

BAD_JSON = {
    "nothing": b"",
    "half": b'{"prompt": "x"',
    "two values": b"{} {}",
    "a list": b"[]",
    "a number": b"5",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "too large a float": b'{"prompt": "x", "temperature": 1e999}',
    "too long an integer": b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "a control character": b'{"prompt": "\x00"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep, in a field": b'{"prompt": "x", "logit_bias": '
    + b"[" * 199
    + b"]" * 199
    + b"}",
}


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_is_none(data: bytes) -> None:
    refused(CompletionBody, data)


def test_a_lone_surrogate_is_called_so() -> None:
    for kind, data in (
        (CompletionBody, BAD_JSON["lone surrogate"]),
        (ChatBody, b'{"messages": [{"role": "user", "content": "x\\udc00"}]}'),
    ):
        assert "the body has a lone surrogate" in str(refused(kind, data))
    assert "not valid JSON" in str(refused(CompletionBody, BAD_JSON["half"]))


LARGE = {
    "fields": b'{"prompt": "x", '
    + b",".join(b'"k%d":1' % i for i in range(300_000))
    + b"}",
    "messages": b'{"messages": ['
    + b",".join([b'{"role":"user","content":""}'] * 100_000)
    + b"]}",
    "nulls": b'{"messages": [' + b",".join([b"null"] * 500_000) + b"]}",
    "parts": b'{"messages": [{"role": "user", "content": ['
    + b",".join([b"1"] * 10**6)
    + b"]}]}",
    "prompts": b'{"prompt": [' + b",".join([b"[0]"] * 500_000) + b"]}",
    "stops": b'{"prompt": "x", "stop": [' + b",".join([b"0"] * 10**6) + b"]}",
    "a name": b'{"prompt": "x", "' + b"a" * 2_000_000 + b'": 1}',
    "a value": b'{"prompt": "x", "n": "' + b"a" * 2_000_000 + b'"}',
}


@pytest.mark.long
@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE)
def test_a_large_body_is_refused_in_time(data: bytes) -> None:
    with at_most(3):  # 0.3 s on an idle machine
        refused(ChatBody if b'"messages"' in data else CompletionBody, data)
