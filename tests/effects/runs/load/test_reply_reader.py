"""Which events bring tokens, how many there were, and what is no answer."""

from typing import Any

import pytest

from minfer.effects.runs.load import reply_reader as reply_module
from minfer.effects.runs.load.reply_reader import ReplyReader
from minfer.effects.runs.load.request_record import ReplyError, RequestFailure
from tests.effects.runs.load.stub import DONE, event, token, usage


def streamed(*parts: bytes) -> ReplyReader:
    """A stream whose parts come a second apart."""
    reply = ReplyReader()
    reply.begin(200, "text/event-stream")
    for second, part in enumerate(parts):
        reply.feed(part, float(second))
    return reply


def delta(end: str | None = None, **emitted: Any) -> bytes:
    return event({"choices": [{"delta": emitted, "finish_reason": end}]})


def test_events_with_text_are_counted_and_usage_has_the_tokens() -> None:
    reply = streamed(token("a"), token("b"), token("c", "stop"), usage(), DONE)
    assert reply.failure() is None
    assert [*reply.events] == [0, 1, 2]
    assert (reply.prompt_tokens, reply.output_tokens) == (7, 4)
    assert reply.has_usage


def test_several_events_in_one_part_come_at_one_time() -> None:
    reply = streamed(token("a"), token("b") + token("c"), token("", "stop"), DONE)
    assert [*reply.events] == [0, 1, 1]
    assert not reply.has_usage


def test_events_may_come_in_any_pieces() -> None:
    whole = (
        token("a")
        + b": a comment\r\n"
        + b'data: {"choices":\r\ndata:  []}\r\n\r\n'
        + DONE
    )
    reply = streamed(*(whole[i : i + 1] for i in range(len(whole))))
    assert reply.failure() is None
    assert [*reply.events] == [len(token("a")) - 1]


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_module, "_LONGEST", 10)
    with pytest.raises(ReplyError, match="a line of more than 10 bytes"):
        streamed(b"data: " + b"x" * 9)


def test_a_token_may_be_part_of_a_character_but_an_end_brings_none() -> None:
    reply = streamed(token("a"), token(""), token("", "length"), DONE)
    assert [*reply.events] == [0, 1]
    only_a_stop_token = streamed(token("", "stop"), DONE)
    assert [*only_a_stop_token.events] == [0]


def test_the_role_of_a_chat_brings_no_token_and_thoughts_do() -> None:
    reply = streamed(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="yes"),
        delta(content=""),
        delta(tool_calls=[{}]),
        delta("stop"),
        DONE,
    )
    assert reply.failure() is None
    assert [*reply.events] == [1, 2, 3, 4]


def test_a_stream_without_an_end_is_cut_off() -> None:
    assert streamed(token("a")).failure() == RequestFailure(
        "cut off", "the stream has no end"
    )
    assert streamed(token("a", "stop")).failure() is None  # some send no [DONE]


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (event("{no"), "malformed", "'{no' is no JSON object"),
        (event("[1]"), "malformed", "no JSON object"),
        (event("[" * 100_000), "malformed", "no JSON object"),
        (event({"choices": [7]}), "malformed", "an event is"),
        (event({"choices": [{}]}), "malformed", "an event is"),
        (event({"choices": 7}), "malformed", "an event is"),
        (event({"usage": {"prompt_tokens": "x"}}), "malformed", "an event is"),
        (event({"error": {"message": "bro\x1bken"}}), "error in the answer", "bro.ken"),
        (event({"error": "broken"}), "error in the answer", "broken"),
    ],
)
def test_what_is_no_event_is_reported(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(ReplyError, match=message) as caught:
        streamed(token("a"), data)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable()


def test_no_stream_where_one_was_requested() -> None:
    with pytest.raises(ReplyError, match="the answer is text/html, not a stream"):
        ReplyReader().begin(200, "text/html")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "not found"}', "not found"),
        (b'{"object": "error", "message": "no"}', "no"),
        (b"<html>\n bad gateway", "<html> bad gateway"),
        (b"", "no message"),
        (b"{}", "{}"),
    ],
)
def test_a_refusal_is_reported_in_the_servers_words(body: bytes, message: str) -> None:
    reply = ReplyReader()
    reply.begin(503, "application/json")
    reply.feed(body, 1.0)
    assert reply.failure() == RequestFailure("HTTP 503", message)
