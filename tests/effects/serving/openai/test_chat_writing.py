"""Chunks and objects of chats in which calls and reasoning are told apart."""

from minfer.effects.text.outputs import Logprob
from minfer.effects.text.tools.formats import Parsing
from tests.effects.serving.openai.helpers import chat, delta, read, served, writer_of

PARSING = Parsing(tools="hermes", reasoning="think", names=("add",))
TEXT = '<think>So</think>Yes<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCORES = [{5: Logprob(-0.5, 1, "x")}]


def test_fragments_of_arguments_are_chunks() -> None:
    writer = writer_of(chat(stream=True), parsing=PARSING)
    chunks = [chunk for text in TEXT for chunk in read(writer.write(0, delta(text)))]
    (last,) = read(writer.write(0, delta("", "stop")))
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    parsed = [chunk["choices"][0]["delta"] for chunk in chunks]
    thought = [delta["reasoning"] for delta in parsed if "reasoning" in delta]
    assert thought == ["S", "o"]
    assert [delta["content"] for delta in parsed if "content" in delta] == ["", *"Yes"]
    calls = [call for delta in parsed for call in delta.get("tool_calls", [])]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "add")
    assert [call["function"]["arguments"] for call in calls] == ["", *'{"a": 1}']
    assert all(call.keys() == {"index", "function"} for call in calls[1:])


def test_scores_come_with_new_tokens_even_if_text_is_withheld() -> None:
    writer = writer_of(chat(stream=True, logprobs=True), parsing=PARSING)
    texts = ["<think>", "a", "</think>b<tool", '_call>{"name": "add", "arguments": {"a"']
    chunks = [
        chunk for t in texts for chunk in read(writer.write(0, delta(t, None, SCORES)))
    ]
    scored = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert len(scored) == len(texts)
    assert [list(choice["delta"]) for choice in scored] == [
        ["content"],
        ["reasoning_content", "reasoning"],
        ["content"],
        ["tool_calls"],
    ]
    assert scored[0]["delta"]["content"] == ""


def test_an_object() -> None:
    writer = writer_of(chat(), parsing=PARSING)
    assert writer.write(0, delta(TEXT, "stop")) == []
    (answer,) = read(writer.end(served(1, 2, 0)))
    message = answer["choices"][0]["message"]
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
    (answer,) = read(writer.end(served(1, 2, 0)))
    plain = {"role": "assistant", "content": text, "refusal": None}
    assert answer["choices"][0]["message"] == plain
    assert answer["choices"][0]["finish_reason"] == "stop"
    writer = writer_of(chat(stream=True), parsing=PARSING)
    chunks = [chunk for char in text for chunk in read(writer.write(0, delta(char)))]
    (last,) = read(writer.write(0, delta("", "stop")))
    assert last["choices"][0]["finish_reason"] == "stop"
    parsed = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in parsed for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": '
    content = "".join(delta.get("content", "") for delta in parsed)
    assert content == "Yes\n\noops}}"


def test_why_it_ended() -> None:
    for text, end, reason in (
        (TEXT, "stop", "tool_calls"),
        (TEXT, "length", "length"),
        ("<think>So</think>Yes", "stop", "stop"),
    ):
        writer = writer_of(chat(), parsing=PARSING)
        writer.write(0, delta(text, end))
        (answer,) = read(writer.end(served(1, 2, 0)))
        assert answer["choices"][0]["finish_reason"] == reason
