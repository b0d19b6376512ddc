"""Who asks at a wrong address is told the right one, in the words of its API."""

from typing import Any

import anthropic
import openai
import pytest

from minfer.effects.serving.addresses import (
    Suggestion,
    suggest_address,
    wrong_address,
    wrong_method,
)
from minfer.effects.serving.description import description
from tests.effects.served import Serving

WRONG = {  # what was asked for, and what was meant
    "/chat/completions": "/v1/chat/completions",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/v1/messages": "/v1/messages",
    "/v1/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/chat/completions/chat/completions": "/v1/chat/completions",
    "/openai/deployments/any/embeddings": "/v1/embeddings",
    "/models/bundled": "/v1/models/bundled",
    "/v1/health": "/health",
    "/v1/tokenize": "/tokenize",
}
SLIPS = {
    "/v1/chat/completions/": "/v1/chat/completions",
    "/v1//completions": "/v1/completions",
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/message": "/v1/messages",
    "/metric": "/metrics",
}


@pytest.mark.parametrize(("address", "right"), WRONG.items())
def test_behind_a_wrong_base_the_end_decides_the_suggestion(
    address: str, right: str
) -> None:
    assert suggest_address(address) == Suggestion(right, rebased=True)


@pytest.mark.parametrize(("address", "right"), SLIPS.items())
def test_a_typo_is_corrected(address: str, right: str) -> None:
    assert suggest_address(address) == Suggestion(right, rebased=False)


@pytest.mark.parametrize(
    "address", ["/docs", "/v1", "/v1/nothing", "/v1/messages/other", "/metrics" * 999]
)
def test_an_unclear_address_has_no_suggestion(address: str) -> None:
    assert suggest_address(address) is None
    message = str(wrong_address("GET", address))
    assert message.endswith("GET /openapi.json describes all endpoints")
    assert len(message) < 200


def test_what_is_meant_is_an_address() -> None:
    addresses = description()["paths"].keys() | {"/v1/models/bundled"}
    assert set(WRONG.values()) | set(SLIPS.values()) <= addresses


def test_the_error_names_the_base_url_to_set() -> None:
    message = str(wrong_address("POST", "/chat/completions"))
    assert "there is nothing at POST /chat/completions; did you mean" in message
    right = "/v1/chat/completions? The base URL of clients of OpenAI's API ends in /v1"
    assert message.endswith(right)
    message = str(wrong_address("POST", "/v1/v1/messages"))
    assert message.endswith("of Anthropic's API does not end in /v1")
    assert str(wrong_address("GET", "/v1/message")).endswith("mean /v1/messages?")
    assert str(wrong_method("GET", "/v1/messages", "POST")).startswith(
        "/v1/messages takes POST, not GET;"
    )


SDK: dict[str, Any] = {"api_key": "-", "max_retries": 0}
REQUESTED: dict[str, Any] = {
    "model": "bundled",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "x"}],
}


@pytest.mark.long
def test_openais_sdk_hears_of_a_wrong_base_url(bundled: Serving) -> None:
    for base in ("", "/v1/v1", "/v1/chat/completions"):
        with (
            openai.OpenAI(base_url=bundled.url + base, **SDK) as client,
            pytest.raises(openai.NotFoundError, match="ends in /v1") as caught,
        ):
            client.chat.completions.create(**REQUESTED)
        assert caught.value.code == "not_found"
        assert "did you mean /v1/chat/completions?" in caught.value.message


def test_anthropics_sdk_hears_of_it_in_anthropics_shape(bundled: Serving) -> None:
    with (
        anthropic.Anthropic(base_url=bundled.url + "/v1", **SDK) as client,
        pytest.raises(anthropic.NotFoundError, match="does not end in /v1") as caught,
    ):
        client.messages.create(**REQUESTED)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_anthropics_header_selects_the_error_format(
    bundled: Serving,
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    response = bundled.http.get(f"{bundled.url}/v1/files", headers=headers)
    assert (response.status_code, response.json()["type"]) == (404, "error")
    assert "type" not in bundled.get("/v1/files").json()


def test_a_wrong_method_gets_the_allowed_ones(bundled: Serving) -> None:
    response = bundled.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "takes POST, not GET" in response.json()["error"]["message"]


def test_the_page_of_the_description_is_gone_and_says_what_is_left(
    bundled: Serving,
) -> None:
    response = bundled.get("/docs")
    assert response.status_code == 404
    message = "there is nothing at GET /docs; GET /openapi.json describes all endpoints"
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/rerank", "reranking is not supported"),
        ("POST", "/rerank", "reranking is not supported"),
        ("POST", "/v1/score", "scoring pairs of texts is not supported"),
        ("POST", "/v1/files", "files are not supported"),
        ("GET", "/v1/files/file-1/content", "files are not supported"),
        ("POST", "/v1/batches", "batches are not supported"),
        ("GET", "/v1/batches/batch_1", "batches are not supported"),
        ("POST", "/v1/audio/transcriptions", "audio is not supported"),
        ("POST", "/v1/images/generations", "images are not supported"),
        ("GET", "/v1/responses/resp-1", "stored responses are not supported"),
        ("POST", "/v1/messages/batches", "batches are not supported"),
    ],
)
def test_an_endpoint_that_stays_out_is_named(
    bundled: Serving, method: str, path: str, words: str
) -> None:
    response = bundled.http.request(method, f"{bundled.url}{path}", json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert words in error["message"]
    assert "/v1/chat/completions, /v1/responses" in error["message"]
    assert ("code" not in error) is path.startswith("/v1/messages")


def test_the_sdk_does_not_retry_an_endpoint_that_stays_out(bundled: Serving) -> None:
    with (
        openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="-") as client,
        pytest.raises(openai.NotFoundError, match="images are not supported"),
    ):
        client.images.generate(prompt="x")
