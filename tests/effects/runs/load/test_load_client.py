"""One event loop of clients: what it sends when, and what becomes of each failure."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import pytest

from minfer.effects.runs.load import load_client as client
from minfer.effects.runs.load.load_client import Client, LoadPlan
from minfer.effects.runs.load.load_prompts import LoadPrompt
from minfer.effects.runs.load.request_record import INTERRUPTED, RequestRecord
from tests.effects.runs.load.stub import (
    CLOSE,
    NEVER,
    WHOLE,
    Step,
    event,
    load_on,
    plain,
    stream,
    stub,
    token,
)


def sent(load: LoadPlan) -> Sequence[RequestRecord]:
    return Client(load).run().records


def test_an_answer_becomes_a_record() -> None:
    with stub(stream(0.02, *WHOLE[:2], 0.02, *WHOLE[2:])) as server:
        (one,) = sent(load_on(server.url))
    assert one.completed
    assert (one.prompt_tokens, one.output_tokens, one.counted) == (7, 4, False)
    assert len(one.events) == 4
    assert one.ttft is not None
    assert 0.02 <= one.ttft < 1
    assert one.events[2] - one.events[1] >= 0.01
    assert one.sent < one.events[0] <= one.events[3] == one.ended


def test_a_closed_loop_keeps_its_lanes_and_connections() -> None:
    with stub(stream(0.01, *WHOLE)) as server:
        records = sent(load_on(server.url, 12, max_concurrency=3))
        assert server.connections == 3
        prompts = {tuple(json.loads(body)["prompt"]) for body in server.requested}
    assert [one.number for one in records if one.completed] == sorted(range(12))
    assert len(prompts) == 12
    at_once = max(
        sum(one.sent <= other.sent < one.ended for one in records) for other in records
    )
    assert at_once == 3


@pytest.mark.long
def test_an_open_loop_sends_when_due_whether_or_not_others_are_answered() -> None:
    with stub(stream(0.2, *WHOLE)) as server:
        due = (0.0, 0.05, 0.1)
        records = sent(load_on(server.url, 3, due=due))
    assert [one.due for one in records] == [*due]
    assert all(one.due <= one.sent for one in records)
    assert records[-1].sent < records[0].ended


FAILURES: list[tuple[list[Step], str, str]] = [
    (plain(503, b'{"error": {"message": "full"}}'), "HTTP 503", "full"),
    (plain(200, b"{}"), "malformed", "not a stream"),
    (stream(token("a"), ended=False), "cut off", "before the answer had ended"),
    (stream(token("a")), "cut off", "the stream has no end"),
    (stream(token("a"), event("{")), "malformed", "no JSON object"),
    (stream(event({"error": {"message": "oom"}})), "error in the answer", "oom"),
    ([b"garbage\r\n\r\n"], "malformed", "not HTTP"),
    ([CLOSE], "cut off", "the connection closed"),
    (stream(token("a"), NEVER), "timed out", "did not end in time"),
    ([NEVER], "timed out", "did not end in time"),
]


@pytest.mark.long
@pytest.mark.parametrize(("steps", "kind", "message"), FAILURES)
def test_a_failure_is_recorded_and_harms_no_other(
    steps: list[Step], kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LONGEST", 0.3)
    with stub(steps, stream(*WHOLE)) as server:
        records = sent(load_on(server.url, 3, max_concurrency=1))
        assert len(server.requested) == 3  # none was sent again
    failed, *others = records
    assert failed.failure is not None
    assert failed.failure.kind == kind
    assert message in failed.failure.message
    assert [one.completed for one in others] == [True, True]


def test_no_server() -> None:
    with stub() as server:
        url = server.url
    records = sent(load_on(url, 5, max_concurrency=2))
    kinds = Counter(one.failure.kind for one in records if one.failure)
    assert kinds == {"not connected": 5}


@pytest.mark.long
def test_a_connection_that_the_server_has_closed_is_opened_anew() -> None:
    quits = [*stream(*WHOLE), 0.001, CLOSE]
    with stub(quits) as server:
        records = sent(load_on(server.url, 3, due=(0, 0.1, 0.2)))
        assert server.connections > 1
    assert all(one.completed for one in records)


def test_what_is_stopped_is_interrupted_and_no_failure() -> None:
    async def run(client: Client) -> None:
        running = asyncio.create_task(client.send_all())
        await asyncio.sleep(0.1)
        client.stop()
        await asyncio.wait_for(running, 5)

    with stub(stream(token("a"), token("b"), NEVER)) as server:
        client = Client(load_on(server.url, 9, max_concurrency=2))
        asyncio.run(run(client))
    kinds = [one.failure and one.failure.kind for one in client.records]
    assert kinds == [INTERRUPTED, INTERRUPTED]
    assert [one.output_tokens for one in client.records] == [2, 2]
    assert (client.sent, client.failed) == (2, 0)


def test_an_error_of_the_client_is_not_hidden() -> None:
    class Broken:
        def prompt(self, number: int) -> LoadPrompt:
            raise ZeroDivisionError(number)

    with stub() as server, pytest.raises(ExceptionGroup) as caught:
        sent(load_on(server.url, 3, prompts=Broken()))
    assert caught.value.subgroup(ZeroDivisionError) is not None


def test_a_key_is_sent_and_not_shown() -> None:
    with stub() as server:
        load = load_on(server.url, key="secret")
        assert "secret" not in repr(load)
        sent(load)
    assert b"Authorization: Bearer secret\r\n" in server.heads[0]


def test_fields_of_a_request() -> None:
    load = load_on("http://x", body={"temperature": 0.5, "ignore_eos": True})
    fields = json.loads(load.request(0))
    assert len(fields.pop("prompt")) == 4
    assert fields == {
        "model": "one",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
    }
