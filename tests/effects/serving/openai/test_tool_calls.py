"""Answers with calls and reasoning, from a server whose model says what we want."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.effects.scripted import TEMPLATE, hermes, say, write_talker
from tests.effects.served import Serving, events, serving

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"default": None}}},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
HI: Any = [{"role": "user", "content": "hi"}]
REQUESTED: dict[str, Any] = {"model": "tiny", "messages": HI, "temperature": 0}
TWO = hermes(("add", {"a": "é</tool_call>"}), ("now", {}))
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|other|>")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """In Hermes' format, with reasoning."""
    template = TEMPLATE + "{% if thinks %}<think>\n{% endif %}"
    path = write_talker(tmp_path_factory.mktemp("talker") / "m", template)
    with serving(path, executor="dry", num_gpu_blocks_override=400) as server:
        yield server


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """In Mistral's format, whose markers are special tokens."""
    path = write_talker(tmp_path_factory.mktemp("mistral") / "m", special=MARKS)
    settings: dict[str, Any] = {"tool_call_parser": "mistral", "executor": "dry"}
    with serving(path, num_gpu_blocks_override=400, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(talker: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{talker.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def whole(server: Serving, **fields: Any) -> dict[str, Any]:
    answer = server.post("chat/completions", **{**REQUESTED, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def chunks(server: Serving, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream."""
    answer = server.post("chat/completions", **{**REQUESTED, "stream": True, **fields})
    chunk_list = events(iter(answer.text.split("\n")))
    return [choice for chunk in chunk_list for choice in chunk["choices"]]


def test_calls_in_one_piece(talker: Serving) -> None:
    say(talker.llm, f"<think>\nHm.\n</think>\n\nI call.\n{TWO}")
    choice = whole(talker, tools=[ADD, NOW])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "I call.")
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert (first["type"], first["function"]["name"]) == ("function", "add")
    assert json.loads(first["function"]["arguments"]) == {"a": "é</tool_call>"}
    assert second["function"] == {"name": "now", "arguments": "{}"}


def test_an_answer_of_calls_only_has_no_content(talker: Serving) -> None:
    say(talker.llm, TWO)
    message = whole(talker, tools=[ADD])["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2
    assert "reasoning" not in message


@pytest.mark.long
def test_a_stream_adds_up_to_the_whole(talker: Serving, client: OpenAI) -> None:
    say(talker.llm, f"<think>Hm.</think>I call.\n{TWO}")
    request_fields = {**REQUESTED, "tools": [ADD, NOW]}
    choice = client.chat.completions.create(**request_fields).choices[0]
    state = ChatCompletionStreamState[None](input_tools=[ADD, NOW])
    with client.chat.completions.create(**request_fields, stream=True) as stream:
        for chunk in stream:
            state.handle_chunk(chunk)
    two = state.get_final_completion().choices[0]
    assert two.finish_reason == choice.finish_reason == "tool_calls"
    assert two.message.content == choice.message.content == "I call."
    streamed_calls, calls = two.message.tool_calls or [], choice.message.tool_calls or []
    assert len(streamed_calls) == 2
    for streamed_call, call in zip(streamed_calls, calls, strict=True):
        assert streamed_call.type == call.type == "function"
        assert streamed_call.function.name == call.function.name
        assert streamed_call.function.arguments == call.function.arguments


def test_deltas_of_a_call(talker: Serving) -> None:
    say(talker.llm, "x " + hermes(("add", {"a": 1})))
    choices = chunks(talker, tools=[ADD])
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "x"}
    (start,) = deltas[2]["tool_calls"]
    assert start.pop("id").startswith("call_")
    function = {"name": "add", "arguments": ""}
    assert start == {"index": 0, "type": "function", "function": function}
    fragments = [call for delta in deltas[3:-1] for call in delta["tool_calls"]]
    assert all(fragment.keys() == {"index", "function"} for fragment in fragments)
    assert (
        "".join(fragment["function"]["arguments"] for fragment in fragments) == '{"a": 1}'
    )
    assert deltas[-1] == {}
    ends = [choice["finish_reason"] for choice in choices]
    assert ends == [None] * (len(choices) - 1) + ["tool_calls"]


@pytest.mark.long
def test_a_choice_of_none_shows_no_tools_and_looks_for_no_calls(talker: Serving) -> None:
    say(talker.llm, TWO)
    none = whole(talker, tools=[ADD], tool_choice="none")
    assert none["message"]["content"] == TWO
    assert none["finish_reason"] == "stop"
    counts = [
        talker.post("chat/completions", **REQUESTED, **fields).json()["usage"][
            "prompt_tokens"
        ]
        for fields in ({}, {"tools": [ADD], "tool_choice": "none"}, {"tools": [ADD]})
    ]
    assert counts[0] == counts[1] < counts[2]


def test_one_call_at_most_if_so_wanted(talker: Serving) -> None:
    say(talker.llm, TWO)
    request_fields = {"tools": [ADD], "parallel_tool_calls": False}
    assert len(whole(talker, **request_fields)["message"]["tool_calls"]) == 1
    calls = [
        call
        for choice in chunks(talker, **request_fields)
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert {call["index"] for call in calls} == {0}


def test_an_answer_that_is_cut_off_says_so(talker: Serving) -> None:
    say(talker.llm, hermes(("add", {"a": "long " * 9})))
    choice = whole(talker, tools=[ADD], max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert '"arguments": {"a": "lo' in choice["message"]["content"]
    choices = chunks(talker, tools=[ADD], max_tokens=60)
    assert choices[-1]["finish_reason"] == "length"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments.startswith('{"a": "lo')
    say(talker.llm, "a <tool_call>\nno")
    assert whole(talker, tools=[ADD])["message"]["content"] == "a <tool_call>\nno"


def test_reasoning_that_the_template_opened(talker: Serving) -> None:
    say(talker.llm, "Hm.\n</think>\nYes.")
    thinks = {"chat_template_kwargs": {"thinks": True}}
    message = whole(talker, **thinks)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    deltas = [choice["delta"] for choice in chunks(talker, **thinks)]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert whole(talker)["message"]["content"] == "Hm.\n</think>\nYes."


def test_a_constraint_begins_behind_reasoning(talker: Serving) -> None:
    say(talker.llm, 'Hm {"b": 2}.\n</think>\n{"a": 1}')
    request_fields: dict[str, Any] = {
        "chat_template_kwargs": {"thinks": True},
        "response_format": {"type": "json_object"},
    }
    message = whole(talker, **request_fields)["message"]
    assert message["reasoning"] == 'Hm {"b": 2}.'
    assert json.loads(message["content"]) == {"a": 1}
    cut = whole(talker, **request_fields, max_tokens=8)
    assert cut["finish_reason"] == "length"
    assert (cut["message"]["content"], cut["message"]["reasoning"]) == (None, 'Hm {"b":')
    back = [*HI, cut["message"], {"role": "user", "content": "go on"}]
    assert whole(talker, messages=back)["message"]["role"] == "assistant"


def test_every_choice_has_its_own_calls(talker: Serving) -> None:
    say(talker.llm, TWO)
    answer = talker.post("chat/completions", **REQUESTED, tools=[ADD], n=2).json()
    ids = [
        call["id"]
        for choice in answer["choices"]
        for call in choice["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 4


def test_the_prompt_has_tools_calls_and_answers(talker: Serving) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    url = talker.url.removesuffix("/v1")
    body = {"messages": messages, "tools": [ADD]}
    ids = talker.http.post(f"{url}/tokenize", json=body).json()["tokens"]
    assert talker.llm.tokenizer is not None
    text = talker.llm.tokenizer.decode(ids)
    assert text == (
        f"<tools>{json.dumps([ADD])}</tools><user>hi<assistant><think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        "<tool>5<assistant>"
    )
    counted = talker.post("chat/completions", **{**REQUESTED, **body}).json()["usage"]
    assert counted["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_are_seen_and_others_hidden(
    mistral: Serving, stream: bool
) -> None:
    say(mistral.llm, 'Well<|other|>, [TOOL_CALLS]add[ARGS]{"a": "<|other|>1"}')
    if stream:
        deltas = [choice["delta"] for choice in chunks(mistral, tools=[ADD])]
        content = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
    else:
        message = whole(mistral, tools=[ADD])["message"]
        content, calls = message["content"], message["tool_calls"]
        arguments = calls[0]["function"]["arguments"]
    assert (content, arguments) == ("Well,", '{"a": "1"}')
    assert len(calls[0]["id"]) == 9


def test_markers_that_are_special_tokens_are_written_where_a_call_must_be(
    mistral: Serving,
) -> None:
    say(mistral.llm, 'Well, [TOOL_CALLS]sub[ARGS]{"a": 1}')
    choice = whole(mistral, tools=[ADD], tool_choice="required", max_tokens=400)
    assert choice["message"]["content"] is None
    first = choice["message"]["tool_calls"][0]["function"]
    assert (first["name"], first["arguments"][0]) == ("add", "{")


def test_special_tokens_are_hidden_without_a_parser(mistral: Serving) -> None:
    say(mistral.llm, "[TOOL_CALLS]x[ARGS]<|other|>y")
    assert whole(mistral)["message"]["content"] == "xy"


def test_stop_strings_end_calls_too(talker: Serving) -> None:
    say(talker.llm, hermes(("add", {"a": 1})) + "END more")
    choice = whole(talker, tools=[ADD], stop=["END"])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
