"""What answers look like, to the byte: clients may rely on the order of fields."""

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.completions import CompletionBody
from minfer.effects.serving.protocol import AnswerWriter
from minfer.effects.text.outputs import Logprob
from tests.effects.serving.openai.helpers import (
    chat,
    completion,
    delta,
    read,
    served,
    writer_of,
)


def test_whole_answers() -> None:
    writer = writer_of(chat())
    assert writer.write(1, delta("b", "stop")) == []
    assert writer.write(0, delta("a", "length")) == []
    (answer,) = read(writer.end(served(3, 2, 1)))
    assert [c["message"]["content"] for c in answer["choices"]] == ["a", "b"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["length", "stop"]
    assert answer["object"] == "chat.completion"
    writer = writer_of(completion())
    assert writer.write(0, delta("a", "stop")) == []
    (answer,) = read(writer.end(served(3, 2, 1)))
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["total_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


HEAD = '"created": 5, "model": "m", '
USAGE = (
    '"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, '
    '"prompt_tokens_details": {"cached_tokens": 1}}'
)
CHAT_USAGE = USAGE[:-1] + ', "completion_tokens_details": {"reasoning_tokens": 0}}'
TIMING = (
    '"timing": [{"queue_times": {}, "ttft": null, "tpot": null, "latency": null, '
    '"preemptions": 0, "cached_tokens": 1}]'
)
SCORES = [{7: Logprob(-1.0, 1)}]


def written_by(writer: AnswerWriter) -> list[str]:
    """The events of an answer that comes in three parts, or in one."""
    events = writer.write(0, delta("é"))
    events += writer.write(0, delta("b", None, SCORES))
    events += writer.write(0, delta("", "stop"))
    return [event.data for event in [*events, *writer.end(served(3, 2, 1))]]


def test_a_completion_to_the_byte() -> None:
    written = written_by(writer_of(completion(timing=True), echo=["p"]))
    assert written == [
        '{"id": "an-id", "object": "text_completion", ' + HEAD + '"choices": '
        '[{"index": 0, "logprobs": null, "text": "", "finish_reason": "stop"}], '
        + USAGE
        + ", "
        + TIMING
        + "}"
    ]


def test_chunks_of_a_completion_to_the_byte() -> None:
    begin = '{"id": "an-id", "object": "text_completion", ' + HEAD + '"choices": [{'
    written = written_by(writer_of(completion(stream=True, logprobs=0), echo=["p"]))
    assert written == [
        begin + '"index": 0, "logprobs": null, "text": "p\\u00e9", '
        '"finish_reason": null}]}',
        begin + '"index": 0, "logprobs": {"tokens": ["token_id:7"], '
        '"token_logprobs": [-1.0], "top_logprobs": [{"token_id:7": -1.0}], '
        '"text_offset": [0]}, "text": "b", "finish_reason": null}]}',
        begin + '"index": 0, "logprobs": null, "text": "", "finish_reason": "stop"}]}',
        "[DONE]",
    ]


def test_a_conversation_to_the_byte() -> None:
    written = written_by(writer_of(chat()))
    assert written == [
        '{"id": "an-id", "object": "chat.completion", ' + HEAD + '"choices": '
        '[{"index": 0, "logprobs": null, "message": {"role": "assistant", '
        '"content": "", "refusal": null}, "finish_reason": "stop"}], ' + CHAT_USAGE + "}"
    ]


def test_chunks_of_a_conversation_to_the_byte() -> None:
    begin = '{"id": "an-id", "object": "chat.completion.chunk", ' + HEAD
    before_scores = begin + '"usage": null, "choices": [{"index": 0, "logprobs": '
    end = '"finish_reason": null}]}'
    body = chat(stream=True, logprobs=True, stream_options={"include_usage": True})
    assert written_by(writer_of(body)) == [
        before_scores + 'null, "delta": {"role": "assistant", "content": ""}, ' + end,
        before_scores + 'null, "delta": {"content": "\\u00e9"}, ' + end,
        before_scores
        + '{"content": [{"token": "token_id:7", "logprob": -1.0, "bytes": null, '
        '"top_logprobs": []}], "refusal": null}, "delta": {"content": "b"}, ' + end,
        before_scores + 'null, "delta": {}, "finish_reason": "stop"}]}',
        begin + CHAT_USAGE + ', "choices": []}',
        "[DONE]",
    ]


@pytest.mark.parametrize("body", [chat(stream=True), completion(stream=True)])
def test_a_stream_without_usage_ends_at_once(
    body: ChatBody | CompletionBody,
) -> None:
    assert read(writer_of(body).end(served(1, 1, 0))) == ["[DONE]"]
