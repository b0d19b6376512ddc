"""OpenAI's SDK: what goes wrong arrives as the exception that it has for that."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from openai import OpenAI

from tests.effects.served import Serving
from tests.effects.serving.raw_requests import asking
from tests.effects.serving.sdk.openai_answers import TABLE, TALK, TEXT, to
from tests.effects.serving.sdk.servers import KEY, Servers

case: Final = TABLE
SHORT: Final[dict[str, Any]] = {"model": "tiny", "prompt": "x", "max_tokens": 2}
EVER: Final = {"ignore_eos": True}
LONG: Final[dict[str, Any]] = {**SHORT, "max_tokens": 90_000, "extra_body": EVER}


def client_of(servers: Servers, served: Serving, **overrides: Any) -> OpenAI:
    """A client of one of them that gives up at once unless told otherwise."""
    settings = {"api_key": "-", "max_retries": 0, **overrides}
    return servers.kept(OpenAI(base_url=f"{served.url}/v1", **settings))


@case("BadRequestError: a value that makes no sense, with its parameter")
def _(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        to(servers).chat.completions.create(**{**TALK, "temperature": -1})
    error = caught.value
    assert (error.status_code, error.param) == (400, "temperature")
    assert error.type == "invalid_request_error"
    assert "temperature" in error.message


@case("BadRequestError: an unknown field")
def _(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        to(servers).completions.create(**TEXT, extra_body={"colour": "red"})
    assert caught.value.param == "colour"


@case("BadRequestError: no messages")
def _(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        to(servers).chat.completions.create(**{**TALK, "messages": []})
    assert caught.value.param == "messages"


@case("BadRequestError: a prompt longer than the context, by its code")
def _(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        to(servers).completions.create(**{**TEXT, "prompt": "x = 1\n" * 4000})
    assert caught.value.code == "context_length_exceeded"


@case("BadRequestError before a stream begins")
def _(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError):
        to(servers).completions.create(**{**TEXT, "top_p": 7}, stream=True)


@case("NotFoundError: a model that is not served")
def _(servers: Servers) -> None:
    client = to(servers)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**TALK, "model": "gpt-9"})
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@case("NotFoundError: an endpoint that there is not")
def _(servers: Servers) -> None:
    with pytest.raises(openai.NotFoundError):
        to(servers).get("/nothing", cast_to=object)


@case("AuthenticationError: a wrong key; the right one is let in")
def _(servers: Servers) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client_of(servers, servers.locked, api_key="guess").completions.create(**SHORT)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert (
        client_of(servers, servers.locked, api_key=KEY)
        .completions.create(**SHORT)
        .choices
    )


@case("APIStatusError: a body that is too large")
def _(servers: Servers) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client_of(servers, servers.slow).completions.create(
            **{**SHORT, "prompt": "x" * 2**23}
        )
    assert caught.value.status_code == 413


@case("APITimeoutError: no answer in time; the request is cancelled")
def _(servers: Servers) -> None:
    client = client_of(servers, servers.slow, timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG)
    servers.slow.idle()


@case("APIConnectionError: no server listens")
def _(_: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with (
        OpenAI(base_url=url, api_key="-", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


@contextlib.contextmanager
def crowded(narrow: Serving) -> Iterator[list[socket.socket]]:
    """One request runs and one is in line, until their connections are closed."""
    body = {"prompt": "x", "max_tokens": 90_000, "stream": True, **EVER}
    data = json.dumps(body).encode()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(asking(narrow, data))]
        narrow.until(lambda: narrow.llm.client.snapshot().running == 1)
        links.append(stack.enter_context(asking(narrow, data)))
        narrow.until(lambda: narrow.llm.client.snapshot().waiting == 1)
        yield links
    narrow.idle()


@case("InternalServerError: 503 while the line is full")
def _(servers: Servers) -> None:
    with (
        crowded(servers.narrow),
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client_of(servers, servers.narrow).completions.create(**SHORT)
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
    assert caught.value.response.headers["retry-after"] == "1"


@case("max_retries: a 503 is tried again when the server says, and then answered")
def _(servers: Servers) -> None:
    with crowded(servers.narrow) as links:

        def leave() -> None:
            for link in links:
                link.close()

        timer = threading.Timer(0.3, leave)
        timer.start()
        client = client_of(servers, servers.narrow, max_retries=3)
        raw = client.completions.with_raw_response.create(**SHORT)
        timer.join()
    assert raw.retries_taken >= 1
    assert raw.parse().choices


@case("APIError in the middle of a stream: the server ends")
def _(servers: Servers) -> None:
    with servers.doomed() as served:
        chunks = iter(client_of(servers, served).completions.create(**LONG, stream=True))
        next(chunks)
        served.service.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
