"""Answers that end early: clients leave or are slow, steps fail."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.errors import OverloadedError
from minfer.effects.serving import answer_task as answer
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.application import Application
from minfer.effects.serving.request_receiver import LONG_BODY_BYTES
from minfer.effects.text.outputs import RequestOutput
from minfer.simulation.oracle import Oracle
from tests.effects.crowd import compared
from tests.effects.served import Serving, events, serving
from tests.effects.serving.raw_requests import SLOW, asking


@pytest.mark.long
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
            response = served.post("completions", prompt="x", stream=stream)
            assert response.status_code == 500
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "device error" not in error["message"]  # the log has it
        monkeypatch.undo()
        assert served.post("completions", prompt="x").status_code == 200


@pytest.mark.long
def test_a_client_that_goes_away_is_cancelled(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        all_blocks = served.available()
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
            assert served.available() < all_blocks
            link.close()
            left = len(served.turns)
            served.idle()
            # Noticed at once, and gone from the engine at the turn after that.
            assert len(served.turns) - left < 1000
            assert served.turns[-1][1].state.blocks.available == all_blocks
        assert served.cancelled() == [True] * 4


@pytest.mark.long
def test_a_client_that_goes_away_while_its_prompts_are_prepared(folder: str) -> None:
    with serving(folder, **SLOW) as served:
        data = json.dumps(
            {"prompt": "x" * (LONG_BODY_BYTES + 1000), "max_tokens": 50_000}
        ).encode()
        for sent in (None, 100, 0):
            asking(served, data, sent=sent).close()
        assert served.post("completions", prompt="x", max_tokens=2).status_code == 200
        served.idle()
        assert served.available() == 4000


@pytest.mark.long
def test_a_request_cancelled_elsewhere_gets_an_error(folder: str) -> None:
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


@pytest.mark.long
def test_half_of_a_crowd_leaves_and_the_others_do_not_notice(folder: str) -> None:
    comparison = compared(folder, clients=32, seed=4)
    assert comparison.differing == []
    assert comparison.leaving == 16
    # Each gave all back within two turns of its Cancel.
    assert comparison.cancelled == comparison.taken
    assert comparison.cancelled >= 5  # turns; several may leave in one
    assert comparison.left_over == 0


@pytest.mark.long
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
    stream_text = b"".join([message["body"] for message in sent[1:]])
    assert stream_text.count(b'"finish_reason": "length"') == 2


SLOWLY: dict[str, Any] = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}


def limited(folder: str, **bounds: Any) -> contextlib.AbstractContextManager[Serving]:
    return serving(folder, service={"bounds": ServerBounds(**bounds)}, **SLOW)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_too_late_is_cut(folder: str, stream: bool) -> None:
    with limited(folder, request_timeout=1.0) as served:
        response = served.post("completions", **SLOWLY, stream=stream, n=2)
        assert response.status_code == 200
        record = (
            list(events(iter(response.text.split("\n")))) if stream else [response.json()]
        )
        choices = [choice for answer_json in record for choice in answer_json["choices"]]
        assert sum(len(choice["text"]) for choice in choices) > 10
        ends = [choice["finish_reason"] for choice in choices]
        assert [end for end in ends if end] == ["length"] * 2
        served.idle()
        # Who is in time does not notice.
        assert served.post("completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_only_waited_until_its_timeout_gets_an_error(
    folder: str, stream: bool
) -> None:
    service = {"bounds": ServerBounds(enforce_deadlines=True)}
    with serving(folder, service=service, max_num_seqs=1, **SLOW) as served:
        link = asking(served, json.dumps(SLOWLY).encode())
        served.until(lambda: len(served.llm.worker.driver.state.running) == 1)
        response = served.post("completions", **SLOWLY, stream=stream, deadline=0.1)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        link.close()


@pytest.mark.long
def test_an_engine_that_does_nothing_is_a_timeout(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "CANCEL_GRACE_SECONDS", 0.1)
    with limited(folder, request_timeout=0.2) as served:
        with served.after(steps=0):
            response = served.post("completions", **SLOWLY)
        assert response.status_code == 504
        assert response.json()["error"] == {
            "message": "the answer was not there after 0.2 s: that is its time limit",
            "type": "server_error",
            "param": None,
            "code": "timeout",
        }


@pytest.mark.long
def test_a_requests_own_deadline_ends_it_if_enforced(folder: str) -> None:
    with limited(folder, enforce_deadlines=True) as served:
        response = served.post("completions", **SLOWLY, deadline=0.2)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        response = served.post("completions", prompt="x", max_tokens=3, deadline=60)
        assert response.status_code == 200
    with limited(folder) as served:
        body = {**SLOWLY, "max_tokens": 200, "deadline": 0.05}
        response = served.post("completions", **body)
        assert response.json()["usage"]["completion_tokens"] == 200


@pytest.mark.long
def test_one_request_of_many_prompts_leaves_seats_free(folder: str) -> None:
    with serving(folder, max_num_seqs=16, **SLOW) as served:
        many_prompts = {"prompt": [[i + 1] for i in range(100)], "max_tokens": 50}
        link = asking(served, json.dumps({**many_prompts, "ignore_eos": True}).encode())
        served.until(lambda: len(served.llm.worker.driver.state.running) == 14)
        response = served.post("completions", prompt="x", max_tokens=2)
        assert response.status_code == 200
        max_sequences = max(
            len(t.state.running) + len(t.state.waiting) for _, t in served.turns
        )
        assert max_sequences <= 15
        link.close()
        served.idle()


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 2])
def test_prompts_behind_others_are_tried_again(
    folder: str, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    monkeypatch.setattr(answer, "QUEUE_RETRY_SECONDS", 0.01)
    with serving(folder, max_num_seqs=2, **SLOW) as served:
        generate = served.llm.generate_deltas
        refused: list[str] = []

        async def full() -> AsyncGenerator[RequestOutput]:
            nothing: tuple[RequestOutput, ...] = ()
            for output in nothing:
                yield output
            raise OverloadedError("the line is full")

        def sometimes(*prompt: Any, request_id: str, **options: Any) -> Any:
            if request_id.endswith(f"-{which}") and len(refused) < 2:
                refused.append(request_id)
                return full()
            return generate(*prompt, request_id=request_id, **options)

        monkeypatch.setattr(served.llm, "generate_deltas", sometimes)
        many_prompts = {
            "prompt": [[5], [6], [7], [8]],
            "max_tokens": 3,
            "ignore_eos": True,
        }
        response = served.post("completions", **many_prompts)
        if which:
            assert response.status_code == 200
            assert len(response.json()["choices"]) == 4
            assert len(refused) == 2
        else:  # none of it had been let in
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "overloaded"
