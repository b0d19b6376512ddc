"""What clients are told of what went wrong."""

import json
from functools import partial

import pytest
from starlette.exceptions import HTTPException

from minfer.effects.live.errors import (
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    TooLongError,
)
from minfer.effects.serving.client_errors import SHUTTING_DOWN, ApiError, to_api_error
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.records.request import ParameterError
from tests.effects.served import serving
from tests.effects.serving.raw_requests import SLOW, asking


@pytest.mark.long
def test_a_full_waiting_queue_is_503_with_retry_after(folder: str) -> None:
    with serving(folder, max_num_seqs=1, max_waiting=2, **SLOW) as served:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}

        def one_runs(line: int) -> bool:
            state = served.llm.worker.driver.state
            return (len(state.running), len(state.waiting)) == (1, line)

        links = []
        for count in range(3):
            links.append(asking(served, json.dumps(body).encode()))
            served.until(partial(one_runs, count))
        response = served.post("completions", **body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "overloaded"
        for link in links:
            link.close()
        served.idle()
        assert served.post("completions", prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (ApiError("x", "n", "a_code", 418), 418, "a_code", "n"),
        (HTTPException(404, "Not Found"), 404, None, None),
        (RequestError("x"), 400, None, "prompt"),
        (RequestError("x", param="logprobs"), 400, None, "logprobs"),
        (TooLongError("x"), 400, "context_length_exceeded", "prompt"),
        (ParameterError("top_p", "x"), 400, None, "top_p"),
        (ChatTemplateError("x"), 400, None, "prompt"),
        (OverloadedError("x"), 503, "overloaded", None),
        (EngineDeadError(SHUTTING_DOWN), 503, "engine_dead", None),
        (DrainingError("x"), 503, "engine_dead", None),
    ],
)
def test_public_errors_keep_their_text(
    error: Exception, status: int, code: str | None, param: str | None
) -> None:
    api_error = to_api_error(error, "prompt")
    assert (api_error.status, api_error.code, api_error.param) == (status, code, param)
    assert str(api_error) == getattr(error, "detail", str(error))
    assert api_error.retry_after == (1 if code == "overloaded" else None)


def test_what_broke_the_engine_is_not_reported() -> None:
    api_error = to_api_error(
        EngineDeadError("the engine broke: KeyError('secret')"), "prompt"
    )
    assert (api_error.status, api_error.code) == (503, "engine_dead")
    assert "secret" not in str(api_error)


@pytest.mark.parametrize("error", [KeyError("secret"), ValueError("secret")])
def test_unknown_errors_are_not_reported(error: Exception) -> None:
    api_error = to_api_error(error, "prompt")
    assert (api_error.status, api_error.code, api_error.param) == (500, None, None)
    assert str(api_error) == "internal error"
