"""Conversations: which messages may be sent, and answers as OpenAI's SDK reads them."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.fields import MAX_ITEMS
from tests.effects.served import Serving
from tests.effects.serving.openai.helpers import (
    GREEDY,
    HI,
    chat,
    delta,
    message,
    read,
    refused,
    served,
    writer_of,
)


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
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
def test_a_conversation_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    error = refused(ChatBody, json.dumps({"messages": HI, **fields}).encode())
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": 5}, "content"),
        ({"content": ["x"]}, "content[0]"),
        ({"content": [{"type": "image_url", "image_url": 5}]}, "content[0].type"),
        ({"content": [{"type": "text", "text": 5}]}, "content[0].text"),
        ({"content": [{"type": "text", "text": "a", "x": 1}]}, "content[0].x"),
        ({"role": "tool", "reasoning": "x", "content": None}, "content"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({"colour": "red"}, "colour"),
        ({"name": 5}, "name"),
        ({"role": "function", "name": "f"}, "role"),
    ],
)
def test_a_message_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        message(**fields)
    assert caught.value.param == f"messages[0].{param}"


def test_messages_become_plain() -> None:
    text_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    cached = [{**text_parts[0], "cache_control": {"type": "ephemeral"}}, text_parts[1]]
    turn = message(content=cached, name="me").messages[0].to_turn()
    assert turn == {"role": "user", "content": text_parts, "name": "me"}
    assert message(role="developer").messages[0].role == "system"
    answer: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    assert message(**answer).messages[0].content == "hi"


def test_chunks_of_a_chat() -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    writer = writer_of(body)
    first, second = read(writer.write(1, delta('h"é\u2028')))
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
    assert writer.write(1, delta("")) == []
    ended = writer.write(1, delta("", "stop"))
    last, usage, end_mark = read([*ended, *writer.end(served(1, 2, 0))])
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    counted = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert usage["choices"] == []
    details = {"completion_tokens_details": {"reasoning_tokens": 0}}
    details |= {"prompt_tokens_details": {"cached_tokens": 0}}
    assert usage["usage"] == {**counted, **details}
    assert end_mark == "[DONE]"


def content(client: OpenAI, messages: list[Any], **fields: Any) -> list[str | None]:
    completion = client.chat.completions.create(
        model="bundled", messages=messages, **{"seed": 5, "max_tokens": 12, **fields}
    )
    assert completion.object == "chat.completion"
    assert all(c.message.role == "assistant" for c in completion.choices)
    return [c.message.content for c in completion.choices]


@pytest.mark.long
def test_conversations(client: OpenAI) -> None:
    system, hello = "You write Python.", {"role": "user", "content": "def add(a, b):"}
    messages: list[Any] = [{"role": "system", "content": system}, hello]
    expected = content(client, messages)
    assert expected == content(client, messages)
    assert expected == content(client, [{"role": "developer", "content": system}, hello])
    content_parts = [{"type": "text", "text": "def add(a, b):"}]
    assert expected == content(
        client, [messages[0], {"role": "user", "content": content_parts}]
    )
    unknown = {"role": "user", "content": "Name a word."}  # nothing known by heart
    two = content(client, [messages[0], unknown], n=2, temperature=2, top_p=1)
    assert len(set(two)) == 2
    answer = client.chat.completions.create(
        model="bundled", messages=messages, max_tokens=5
    )
    turns = [
        *messages,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "more"},
    ]
    assert content(client, turns) != expected
    assert answer._request_id == answer.id
    text = content(client, messages, temperature=0)[0]
    assert text
    assert content(client, messages, temperature=0, stop=[text[3:6]]) == [
        text[: text.index(text[3:6])]
    ]


def test_a_streamed_answer_joins_to_the_whole(client: OpenAI) -> None:
    request_fields: dict[str, Any] = {
        "model": "bundled",
        "seed": 3,
        "max_completion_tokens": 15,
        "n": 2,
        "messages": [{"role": "user", "content": "def f("}],
    }
    completion = client.chat.completions.create(**request_fields)
    texts, ends, roles, usage = ["", ""], ["", ""], ["", ""], None
    with client.chat.completions.create(
        **request_fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                assert not ends[choice.index]
                assert roles[choice.index] or choice.delta.role
                roles[choice.index] += choice.delta.role or ""
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason or ""
    assert texts == [c.message.content for c in completion.choices]
    assert ends == [c.finish_reason for c in completion.choices]
    assert roles == ["assistant"] * 2
    assert usage is not None
    assert completion.usage is not None
    assert usage.completion_tokens == completion.usage.completion_tokens
    assert usage.total_tokens == completion.usage.total_tokens


def test_an_answer_may_be_begun_for_the_model(bundled: Serving) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "def add(a"},
    ]
    body = {"messages": messages, "continue_final_message": True, **GREEDY}
    first = bundled.post("chat/completions", **body).json()
    assert first["choices"][0]["message"]["content"]
    ids = bundled.llm.render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert first["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_parts_that_are_no_text_are_refused_by_name(client: OpenAI, kind: str) -> None:
    part: Any = {"type": kind, kind: {"url": "http://x"}}
    text = {"type": "text", "text": "What is this?"}
    with pytest.raises(openai.BadRequestError) as caught:
        content(client, [{"role": "user", "content": [text, part]}])
    assert caught.value.param == "messages[0].content[1].type"
    words = f'"{kind}" is not supported: models read text here, multimodal ones too'
    assert words in caught.value.message.replace("\\", "")


def test_errors_of_conversations(client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    for messages, param, code in (
        ([{"role": "user", "content": [image]}], "messages[0].content[0].type", None),
        (
            [{"role": "user", "content": "a " * 3000}],
            "messages",
            "context_length_exceeded",
        ),
        ([], "messages", None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            content(client, messages)
        assert (caught.value.param, caught.value.code) == (param, code)
    hello: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=hello)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for", "{{ 1 / 0 }}", "{{ x.y.z }}"]
)
def test_a_chat_template_that_fails(
    bundled: Serving, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled.llm.tokenizer, "chat_template", template)
    response = bundled.post(
        "chat/completions", messages=[{"role": "user", "content": "x"}]
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "template" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_template_arguments_cannot_take_the_place_of_ours(
    bundled: Serving, name: str
) -> None:
    response = bundled.post(
        "chat/completions", messages=HI, chat_template_kwargs={name: "x"}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "chat_template_kwargs"
    assert f"cannot set '{name}'" in error["message"]


@pytest.mark.parametrize("name", ["template", "special_tokens", "add_generation_prompt"])
def test_template_arguments_named_as_ours_elsewhere_are_variables(
    bundled: Serving, name: str
) -> None:
    fields = {"messages": HI, **GREEDY}
    plain, named = (
        bundled.post("chat/completions", **fields, chat_template_kwargs=variables).json()
        for variables in ({}, {name: "x"})
    )
    assert named["choices"] == plain["choices"]
    assert named["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
