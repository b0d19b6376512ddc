"""One event loop of clients: what it sends when, and what becomes of each failure."""

import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

import pytest

from minfer.effects.runs.load.client import Client, Counts
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.record import INTERRUPTED, Record
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


def client_of(load: Load) -> Client:
    numbers = itertools.count()
    return Client(load, load.max_concurrency, lambda: next(numbers), time.monotonic())


def sent(load: Load) -> list[Record]:
    return asyncio.run(client_of(load).run())


def test_an_answer_becomes_a_record() -> None:
    with stub(stream(0.02, *WHOLE[:2], 0.02, *WHOLE[2:])) as server:
        (one,) = sent(load_on(server.url))
    assert one.good
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
        prompts = {tuple(json.loads(body)["prompt"]) for body in server.asked}
    assert [one.number for one in records if one.good] == sorted(range(12))
    assert len(prompts) == 12
    at_once = max(
        sum(one.sent <= other.sent < one.ended for one in records) for other in records
    )
    assert at_once == 3


def test_an_open_loop_sends_when_due_whether_or_not_others_are_answered() -> None:
    with stub(stream(0.2, *WHOLE)) as server:
        due = (0.0, 0.05, 0.1)
        records = sent(load_on(server.url, 3, due=due))
    assert [one.due for one in records] == [*due]
    assert all(one.due <= one.sent for one in records)
    assert records[-1].sent < records[0].ended


def test_nothing_is_sent_after_the_duration_and_what_was_sent_is_waited_for() -> None:
    with stub(stream(0.04, *WHOLE)) as server:
        records = sent(load_on(server.url, None, max_concurrency=2, duration=0.1))
    assert 2 <= len(records) <= 6
    assert all(one.good and one.sent < 0.1 for one in records)
    assert records[-1].ended > 0.1


FAILURES: list[tuple[list[Step], str, str]] = [
    (plain(503, b'{"error": {"message": "full"}}'), "HTTP 503", "full"),
    (plain(200, b"{}"), "malformed", "no stream"),
    (stream(token("a"), ended=False), "cut off", "before its answer had ended"),
    (stream(token("a")), "cut off", "the stream has no end"),
    (stream(token("a"), event("{")), "malformed", "no JSON object"),
    (stream(event({"error": {"message": "oom"}})), "error in the answer", "oom"),
    ([b"garbage\r\n\r\n"], "malformed", "not HTTP"),
    ([CLOSE], "cut off", "closed the connection"),
    (stream(token("a"), NEVER), "timed out", "no end within 0.3 s"),
    ([NEVER], "timed out", "no end within 0.3 s"),
]


@pytest.mark.parametrize(("steps", "kind", "message"), FAILURES)
def test_a_failure_is_told_and_harms_no_other(
    steps: list[Step], kind: str, message: str
) -> None:
    with stub(steps, stream(*WHOLE)) as server:
        records = sent(load_on(server.url, 3, max_concurrency=1, timeout=0.3))
    failed, *others = records
    assert failed.failure is not None
    assert failed.failure.kind == kind
    assert message in failed.failure.message
    assert [one.good for one in others] == [True, True]


def test_nobody_there() -> None:
    with stub() as server:
        url = server.url
    records = sent(load_on(url, 5, max_concurrency=2))
    kinds = Counter(one.failure.kind for one in records if one.failure)
    assert kinds == {"not connected": 5}


def test_a_connection_that_the_server_has_closed_is_opened_anew() -> None:
    quits = [*stream(*WHOLE), 0.001, CLOSE]
    with stub(quits) as server:
        records = sent(load_on(server.url, 6, max_concurrency=1, due=(0, 0.01) * 3))
        assert server.connections > 1
    assert all(one.good for one in records)


def test_what_is_stopped_is_given_up_and_no_failure() -> None:
    async def run(url: str) -> tuple[list[Record], Counts]:
        client = client_of(load_on(url, None, max_concurrency=2))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.1)
        client.stop()
        return await running, client.counts

    with stub(stream(token("a"), token("b"), NEVER)) as server:
        records, counts = asyncio.run(asyncio.wait_for(run(server.url), 5))
    kinds = [one.failure and one.failure.kind for one in records]
    assert kinds == [INTERRUPTED, INTERRUPTED]
    assert [one.output_tokens for one in records] == [2, 2]
    assert counts == Counts(sent=2, ended=2, failed=0, events=4)


def test_a_fault_of_ours_is_not_hidden() -> None:
    class Broken(Load):
        def request(self, number: int) -> bytes:
            raise ZeroDivisionError(number)

    with stub() as server:
        plain_load = load_on(server.url, 3)
        settings: dict[str, Any] = {"target": plain_load.target, "count": 3}
        with pytest.raises(ZeroDivisionError):
            sent(Broken(prompts=plain_load.prompts, **settings))
