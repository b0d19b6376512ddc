"""Answers that end early: clients leave or are slow, steps fail."""

import asyncio
import contextlib
import json
from functools import partial
from typing import Any

import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.application import LONG, Application
from minfer.runs.oracle import Oracle
from tests.effects.crowd import compared
from tests.effects.served import events, serving
from tests.effects.serving.wire import SLOW, asking


def test_steps_that_fail_are_a_server_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(
        folder, executor="oracle", num_gpu_blocks_override=64, max_model_len=99
    ) as served:
        broken = served.llm.worker.driver.executor
        assert isinstance(broken, Oracle)
        monkeypatch.setattr(
            broken, "collect", lambda: broken.fail("device error", halfway=False)
        )
        for stream in (False, True):
            found = served.post("completions", prompt="x", stream=stream)
            assert found.status_code == 500
            error = found.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "device error" in error["message"]
        monkeypatch.undo()
        assert served.post("completions", prompt="x").status_code == 200


def test_a_client_that_goes_away_is_cancelled(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        whole = served.available()
        body = json.dumps(
            {"prompt": "x" * 50, "max_tokens": 50_000, "ignore_eos": True}
        ).encode()
        streamed = body[:-1] + b', "stream": true, "n": 3}'

        def ran(turns: int) -> bool:
            return len(served.turns) > turns

        for data in (body, streamed, body, streamed):
            link = asking(served, data)
            before = len(served.turns)
            served.until(partial(ran, before + 10))
            assert served.available() < whole
            link.close()
            left = len(served.turns)
            served.idle()
            # Noticed at once, and gone from the engine at the turn after that.
            assert len(served.turns) - left < 1000
            assert served.turns[-1][1].state.blocks.available == whole
        assert served.cancelled() == [True] * 4


def test_a_client_that_goes_away_while_its_prompts_are_prepared(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        data = json.dumps({"prompt": "x" * (LONG + 1000), "max_tokens": 50_000}).encode()
        for sent in (None, 100, 0):
            asking(served, data, sent=sent).close()
        assert served.post("completions", prompt="x", max_tokens=2).status_code == 200
        served.idle()
        assert served.available() == 4000


def test_who_was_cancelled_by_other_hands_is_told(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        body = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
        url = f"{served.url}/v1/completions"
        with served.http.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            next(events(lines))
            asyncio.run(served.llm.abort(f"{answer.headers['x-request-id']}-0"))
            last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "the request was cancelled"
    assert error["code"] == "cancelled"


def test_half_of_a_crowd_leaves_and_the_others_do_not_notice(folder: str) -> None:
    found = compared(folder, clients=32, seed=4)
    assert found.differing == []
    assert found.leaving == 16
    # Each gave all back within two turns of its Cancel.
    assert found.cancelled == found.taken
    assert found.cancelled >= 5  # turns; several may leave in one
    assert found.left_over == 0


def test_prompts_of_one_answer_do_not_overtake_each_other_at_a_slow_client() -> None:
    sent: list[Any] = []
    body = json.dumps({"prompt": [[5], [6]], "stream": True, "max_tokens": 1}).encode()
    head = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": head,
        "query_string": b"",
        "root_path": "",
    }
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            # The last answer on the connection is still to be read.
            await asyncio.sleep(0.3)
        sent.append(message)

    with contextlib.closing(AsyncLLM(executor="dry", max_num_seqs=4)) as llm:
        asyncio.run(Application(llm, ["dry"])(scope, receive, send))
    assert [message["type"][14:] for message in sent] == ["start", "body", "body"]
    assert [message["more_body"] for message in sent[1:]] == [True, False]
    said = b"".join([message["body"] for message in sent[1:]])
    assert said.count(b'"finish_reason": "length"') == 2
