"""A server that stops ends its answers, and says so."""

import threading

import httpx
import pytest

from tests.effects.served import serving
from tests.effects.serving.raw_requests import SLOW


@pytest.mark.long
def test_a_server_that_stops_tells_its_clients_during_a_step(folder: str) -> None:
    with serving(folder, **{**SLOW, "step": 1.0}) as served:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                served.post("completions", prompt="x", max_tokens=99)
            )
        )
        thread.start()
        served.until(lambda: bool(served.turns))
        served.service.close()
        thread.join()
        assert len(served.turns) <= 2  # of 100
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is shutting down"
        assert served.get("/health").json() == {"status": "the server is shutting down"}
        assert served.post("completions", prompt="x").status_code == 503
        served.idle()
