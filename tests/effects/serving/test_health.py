"""Health tells the truth: an engine that broke or makes no progress is not ready."""

import json
import threading
from typing import Any

import pytest

from minfer.effects.serving.client_errors import ENGINE_STOPPED
from tests.effects.served import events, serving
from tests.effects.serving.raw_requests import SLOW
from tests.effects.waiting import until


@pytest.mark.long
def test_a_broken_engine_is_reported_and_unhealthy(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(folder, **SLOW) as served:
        stream = served.http.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True},
        )
        with stream as answer:
            lines = answer.iter_lines()
            next(events(lines))
            monkeypatch.setattr(served.llm.worker.driver, "turn", lambda _: 1 / 0)
            lines_left = [line for line in lines if line]
        error = json.loads(lines_left[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        health = served.get("/healthz")
        assert health.status_code == 503
        assert health.json() == {"status": ENGINE_STOPPED}, (
            "no exception's text leaves the server"
        )
        # Another thread's: clients may hear of it first.
        until(lambda: "the engine broke: ZeroDivisionError" in caplog.text)
        assert caplog.text.count("the engine broke: ZeroDivisionError") == 1
        assert caplog.text.count("Traceback") == 1, "the log says where"
        refused = served.post("completions", prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "engine_dead",
        )


@pytest.mark.long
def test_an_engine_that_makes_no_progress_is_unhealthy(folder: str) -> None:
    with serving(folder, service={"stall": 0.2}, **SLOW) as served:
        executor: Any = served.llm.worker.driver.executor
        assert served.post("completions", prompt="x", max_tokens=3).status_code == 200
        executor.seconds = 0.5
        thread = threading.Thread(
            target=served.post,
            args=("completions",),
            kwargs={"prompt": "x", "max_tokens": 2},
        )
        thread.start()
        statuses = set()
        while thread.is_alive():
            statuses.add(served.get("/health").status_code)
        thread.join()
        assert statuses == {200, 503}
        assert served.get("/health").status_code == 200
