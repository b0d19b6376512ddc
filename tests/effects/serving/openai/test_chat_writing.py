"""Chunks and objects of chats in which calls and reasoning are told apart."""

from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tools.formats import Parsing
from tests.effects.serving.openai.helpers import chat, delta, read, served, writer_of

PARSING = Parsing(tools="hermes", reasoning="think", names=("add",))
TEXT = '<think>So</think>Yes<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCORES = [{5: Logprob(-0.5, 1, "x")}]


def test_fragments_of_arguments_are_chunks() -> None:
    writer = writer_of(chat(stream=True), parsing=PARSING)
    payload = [one for text in TEXT for one in read(writer.write(0, delta(text)))]
    (last,) = read(writer.write(0, delta("", "stop")))
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    parsed = [one["choices"][0]["delta"] for one in payload]
    thought = [one["reasoning"] for one in parsed if "reasoning" in one]
    assert thought == ["S", "o"]
    assert [one["content"] for one in parsed if "content" in one] == ["", *"Yes"]
    calls = [call for one in parsed for call in one.get("tool_calls", [])]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "add")
    assert [one["function"]["arguments"] for one in calls] == ["", *'{"a": 1}']
    assert all(one.keys() == {"index", "function"} for one in calls[1:])


def test_scores_come_with_new_tokens_even_if_text_is_withheld() -> None:
    writer = writer_of(chat(stream=True, logprobs=True), parsing=PARSING)
    texts = ["<think>", "a", "</think>b<tool", '_call>{"name": "add", "arguments": {"a"']
    payload = [
        one for t in texts for one in read(writer.write(0, delta(t, None, SCORES)))
    ]
    scored = [one["choices"][0] for one in payload if one["choices"][0]["logprobs"]]
    assert len(scored) == len(texts)
    assert [list(one["delta"]) for one in scored] == [
        ["content"],
        ["reasoning_content", "reasoning"],
        ["content"],
        ["tool_calls"],
    ]
    assert scored[0]["delta"]["content"] == ""


def test_an_object() -> None:
    writer = writer_of(chat(), parsing=PARSING)
    assert writer.write(0, delta(TEXT, "stop")) == []
    (payload,) = read(writer.end(served(1, 2, 0)))
    message = payload["choices"][0]["message"]
    (call,) = message.pop("tool_calls")
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert call == {"id": call["id"], "type": "function", "function": function}
    thought = {"reasoning_content": "So", "reasoning": "So"}
    plain = {"role": "assistant", "content": "Yes", "refusal": None}
    assert message == {**plain, **thought}


def test_a_call_that_is_none() -> None:
    """In one piece it is content; of a stream it broke off before what is wrong."""
    text = 'Yes <tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    writer = writer_of(chat(), parsing=PARSING)
    writer.write(0, delta(text, "stop"))
    (payload,) = read(writer.end(served(1, 2, 0)))
    plain = {"role": "assistant", "content": text, "refusal": None}
    assert payload["choices"][0]["message"] == plain
    assert payload["choices"][0]["finish_reason"] == "stop"
    writer = writer_of(chat(stream=True), parsing=PARSING)
    chunks = [one for char in text for one in read(writer.write(0, delta(char)))]
    (last,) = read(writer.write(0, delta("", "stop")))
    assert last["choices"][0]["finish_reason"] == "stop"
    parsed = [one["choices"][0]["delta"] for one in chunks]
    calls = [call for one in parsed for call in one.get("tool_calls", [])]
    assert "".join(one["function"]["arguments"] for one in calls) == '{"a": '
    content = "".join(one.get("content", "") for one in parsed)
    assert content == "Yes\n\noops}}"


def test_why_it_ended() -> None:
    for text, end, payload in (
        (TEXT, "stop", "tool_calls"),
        (TEXT, "length", "length"),
        ("<think>So</think>Yes", "stop", "stop"),
    ):
        writer = writer_of(chat(), parsing=PARSING)
        writer.write(0, delta(text, end))
        (whole,) = read(writer.end(served(1, 2, 0)))
        assert whole["choices"][0]["finish_reason"] == payload
