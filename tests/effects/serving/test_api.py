"""What clients may send is checked field by field, and every refusal names its field."""

import json
import math
import time
from typing import Any

import pytest

from minfer.effects.serving.api import MAX_ITEMS, ApiError, Body, Chat, Completion, Writer
from minfer.effects.setup.options import bundled_folder
from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Completion:
    return Completion.read(json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> Chat:
    return Chat.read(json.dumps({"messages": HI, **fields}).encode())


def message(**fields: Any) -> Chat:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


def refused(kind: type[Body], data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind.read(data)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([], [[]]),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_sampling_parameters_are_those_that_were_given() -> None:
    assert completion().sampling() == {"n": 1}
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -1,
        "max_tokens": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    assert completion(**fields).sampling() == fields
    assert completion(stop="a").sampling()["stop"] == ["a"]
    assert chat().sampling() == {"n": 1}
    assert chat(max_tokens=4).sampling()["max_tokens"] == 4
    assert chat(max_completion_tokens=4).sampling()["max_tokens"] == 4


def test_null_is_absent() -> None:
    names = [*Completion.model_fields, *Completion.neutral]
    assert (
        completion(**{name: None for name in names if name != "prompt"}) == completion()
    )
    names = [*Chat.model_fields, *Chat.neutral]
    assert chat(**{name: None for name in names if name != "messages"}) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1},
        {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}},
        {
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "functions": [],
        },
        {
            "tool_choice": "auto",
            "modalities": ["text"],
            "store": False,
            "metadata": {"a": "b"},
        },
        {"service_tier": "auto", "prompt_cache_key": "k", "reasoning_effort": "none"},
        {"service_tier": "default", "verbosity": "medium", "suffix": ""},
        {"repetition_penalty": 1, "min_tokens": 0, "skip_special_tokens": True},
        {
            "stream": True,
            "stream_options": {"include_usage": False, "include_obfuscation": False},
        },
    ],
)
def test_what_asks_for_nothing_is_ignored(fields: dict[str, Any]) -> None:
    assert completion(**fields).sampling() == {"n": 1}
    fields.pop("best_of", None)
    assert chat(**fields).sampling() == {"n": 1}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": "1"}, "n", 'must be a valid integer, not "1"'),
        ({"n": 1.0}, "n", "must be a valid integer"),
        ({"n": True}, "n", "must be a valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"temperature": "hot"}, "temperature", "must be a valid number"),
        ({"temperature": 10**400}, "temperature", "must be a valid number"),
        ({"max_tokens": 10**400}, "max_tokens", "less than"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": 5}, "stop", "must be a valid list, not 5"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a valid string, not 5"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "must be a valid integer"),
        ({"stream": 1}, "stream", "must be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "not a field here",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "must be False",
        ),
        ({"deadline": 0}, "deadline", "greater than 0"),
        ({"priority": 2**60}, "priority", "less than"),
        ({"user": "u" * 257}, "user", "at most 256"),
        ({"user": 5}, "user", "must be a valid string"),
        ({"foo": 1}, "foo", "is not a field here; leave it out"),
        ({"foo": None}, "foo", "is not a field here"),
        ({"max_token": 1}, "max_token", "did you mean max_tokens?"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"presence_penalty": False}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"logprobs": -1}, "logprobs", "must be"),
        ({"logprobs": "a"}, "logprobs", "must be a valid"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"store": True}, "store", "not supported"),
        ({"service_tier": "flex"}, "service_tier", "not supported"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ],
)
def test_a_refused_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    for kind, needed in ((Completion, {"prompt": "x"}), (Chat, {"messages": HI})):
        error = refused(kind, json.dumps({**needed, **fields}).encode())
        assert (error.param, str(error).split(":")[0]) == (param, param)
        assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * (MAX_ITEMS + 1)}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "b"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"messages": HI}, "messages"),
    ],
)
def test_a_completion_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    error = refused(Completion, json.dumps({"prompt": "x", **fields}).encode())
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [*HI, 5]}, "messages[1]"),
        ({"messages": HI * (MAX_ITEMS + 1)}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
def test_a_conversation_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    error = refused(Chat, json.dumps({"messages": HI, **fields}).encode())
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": 5}, "content"),
        ({"content": ["x"]}, "content.type"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content.type"),
        ({"content": [{"type": "text", "text": 5}]}, "content.text"),
        ({"content": [{"type": "text", "text": "a", "x": 1}]}, "content.text"),
        ({"tool_calls": [{"id": "a"}]}, "tool_calls"),
        ({"colour": "red"}, "colour"),
        ({"name": 5}, "name"),
    ],
)
def test_a_message_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        message(**fields)
    assert caught.value.param == f"messages[0].{param}"


def test_messages_become_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message(content=parts, name="me").messages[0].model_dump(
        exclude_none=True
    ) == {"role": "user", "content": "a\nb", "name": "me"}
    assert message(role="developer").messages[0].role == "system"
    answer: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    assert message(**answer).messages[0].content == "hi"
    assert message(role="tool", tool_call_id="7").messages[0].tool_call_id == "7"


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
    refused(Completion, data)


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


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE)
def test_a_large_body_is_refused_in_time(data: bytes) -> None:
    started = time.process_time()
    refused(Chat if b'"messages"' in data else Completion, data)
    assert time.process_time() - started < 3  # 0.3 s on an idle machine


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    for k in (0, 3, 20):
        assert completion(logprobs=k).sampling()["logprobs"] == k
        assert chat(logprobs=True, top_logprobs=k).sampling()["logprobs"] == k
    assert chat(logprobs=True).sampling()["logprobs"] == 0
    for fields, param, words in (
        ({"logprobs": True}, "logprobs", "must be a valid integer, not true"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": 1, "echo": True}, "logprobs", "not supported with echo"),
        ({"top_logprobs": 1}, "top_logprobs", "not supported"),
    ):
        error = refused(Completion, json.dumps({"prompt": "x", **fields}).encode())
        assert error.param == param
        assert words in str(error)
    for fields, param, words in (
        ({"logprobs": 0}, "logprobs", "must be a valid boolean, not 0"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "less than or equal to 20",
        ),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs to be true"),
        (
            {"logprobs": False, "top_logprobs": 1},
            "top_logprobs",
            "needs logprobs to be true",
        ),
    ):
        error = refused(Chat, json.dumps({"messages": HI, **fields}).encode())
        assert error.param == param
        assert words in str(error)


def chunks(text: str) -> list[Any]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def test_chunks_of_a_chat() -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    writer = Writer("chatcmpl-1", "m", body, None)
    first, second = chunks(writer.write(1, 'h"é\u2028', None))
    assert first["choices"] == [
        {
            "index": 1,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert second["choices"][0]["delta"] == {"content": 'h"é\u2028'}
    assert {c["object"] for c in (first, second)} == {"chat.completion.chunk"}
    assert (first["usage"], second["usage"]) == (None, None)
    assert writer.write(1, "", None) == ""
    last, usage, done = chunks(writer.write(1, "", "stop") + writer.last(1, 2, 0))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    counted = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert usage["choices"] == []
    assert usage["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}
    assert done == "[DONE]"


def test_chunks_of_a_completion() -> None:
    writer = Writer("cmpl-1", "m", completion(stream=True), None)
    (only,) = chunks(writer.write(0, "text", "length"))
    assert only["object"] == "text_completion"
    assert "usage" not in only
    assert only["choices"] == [
        {"index": 0, "text": "text", "logprobs": None, "finish_reason": "length"}
    ]
    assert chunks(writer.last(1, 1, 0)) == ["[DONE]"]


def test_whole_answers() -> None:
    writer = Writer("c", "m", chat(), None)
    assert writer.write(1, "b", "stop") + writer.write(0, "a", "length") == ""
    found = json.loads(writer.last(3, 2, 1))
    assert [c["message"]["content"] for c in found["choices"]] == ["a", "b"]
    assert [c["finish_reason"] for c in found["choices"]] == ["length", "stop"]
    assert found["object"] == "chat.completion"
    writer = Writer("c", "m", completion(), None)
    assert writer.write(0, "a", "stop") == ""
    found = json.loads(writer.last(3, 2, 1))
    assert found["choices"][0]["text"] == "a"
    assert found["usage"]["total_tokens"] == 5
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def spelled() -> tuple[Tokenizer, list[dict[int, Logprob]]]:
    """The two tokens of a character whose bytes they share, and one whose rivals are
    impossible.
    """
    tokenizer = Tokenizer(bundled_folder())
    snow = tokenizer.encode("x\u2603y", add_special_tokens=False)
    assert len(snow) > 3
    scores = []
    for place, token in enumerate(snow):
        own = Logprob(
            -0.5 - place, 3, tokenizer.token_bytes(token).decode(errors="replace")
        )
        rivals = {i: Logprob(-0.1 * i, i, str(i)) for i in (1, 2)}
        scores.append({token: own, **rivals, 300: Logprob(-math.inf, 4, "\ufffd")})
    return tokenizer, scores


def test_log_probabilities_of_a_completion() -> None:
    tokenizer, scores = spelled()
    writer = Writer("c", "m", completion(logprobs=3, stream=True), tokenizer)
    first, second = chunks(
        writer.write(0, "x", None, scores[:1])
        + writer.write(0, "\u2603y", "stop", scores[1:])
    )
    parts = [chunk["choices"][0]["logprobs"] for chunk in (first, second)]
    joined = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert joined["token_logprobs"] == [-0.5 - i for i in range(len(scores))]
    assert joined["tokens"] == ["x", *["\ufffd"] * (len(scores) - 2), "y"]
    assert joined["text_offset"] == [
        0,
        1,
        *[2] * (len(scores) - 2),
    ]  # bytes that go on, too
    assert joined["top_logprobs"][0] == {
        "x": -0.5,
        "1": -0.1,
        "2": -0.2,
        "\ufffd": -9999.0,
    }
    # Where a rival is spelled as the token itself is, the token itself is told of.
    assert joined["top_logprobs"][1] == {"\ufffd": -1.5, "1": -0.1, "2": -0.2}
    assert chunks(writer.write(0, "", None, ()))[0]["choices"][0]["logprobs"] is None


def test_log_probabilities_of_a_conversation() -> None:
    tokenizer, scores = spelled()
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    writer = Writer("c", "m", chat(**asked), tokenizer)
    writer.write(0, "x\u2603y", "stop", scores)
    found = json.loads(writer.last(1, 1, 0))["choices"][0]["logprobs"]
    content = found["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "x\u2603y"
    assert [one["token"] for one in content] == [
        "x",
        *["\ufffd"] * (len(scores) - 2),
        "y",
    ]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["1", "2", "x"]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.1, -0.2, -0.5]
    writer = Writer("c", "m", chat(**asked, stream=True), tokenizer)
    events = chunks(
        writer.write(0, "x", None, scores[:1]) + writer.write(0, "", "stop", scores[1:])
    )
    told = [event["choices"][0]["logprobs"] for event in events]
    assert [len(one["content"]) if one else 0 for one in told] == [
        0,
        1,
        len(scores) - 1,
        0,
    ]
    assert [item for one in told if one for item in one["content"]] == content
    assert events[2]["choices"][0]["delta"] == {"content": ""}


def test_tokens_without_a_tokenizer_are_named_by_their_ids() -> None:
    writer = Writer("c", "m", completion(logprobs=1), None)
    writer.write(0, "", "stop", [{7: Logprob(-1.0, 2), 9: Logprob(-0.5, 1)}])
    found = json.loads(writer.last(1, 1, 0))["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"token_id:7": -1.0, "token_id:9": -0.5}]
