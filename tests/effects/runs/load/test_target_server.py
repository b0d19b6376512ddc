"""What is found out before a load: is there a server, a model, and a first answer."""

import pytest

from minfer.effects.runs.load import target_server as requested
from minfer.effects.runs.load.request_record import LoadError
from minfer.effects.runs.load.target_server import first_model, read_url, warm_up
from tests.effects.runs.load.stub import (
    MODELS,
    NEVER,
    WHOLE,
    Step,
    load_on,
    plain,
    stream,
    stub,
)


def found(models: list[Step]) -> str:
    with stub(models=models) as server:
        return first_model(server.url, "key")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://x/y/v1/", "https://x/y"),
        ("gpu.local:9000", "http://gpu.local:9000"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_are_read(given: str, url: str) -> None:
    assert read_url(given) == url


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x?y=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LoadError, match=r"--base-url .* is no address of a server"):
        read_url(url)


def test_the_first_model_of_the_list() -> None:
    assert found(plain(200, MODELS)) == "one"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (plain(401, b""), r"\(HTTP 401\): name one with --model; set OPENAI_API_KEY"),
        (plain(404, b""), "names no model .*: name one with --model"),
        (plain(200, b"<html>"), "names no model"),
        (plain(200, b'{"data": [1]}'), "names no model"),
        (plain(200, b'{"data": []}'), "names no model"),
        ([b"SSH-2.0\r\n\r\n"], "not HTTP"),
    ],
)
def test_what_is_wrong_is_reported(models: list[Step], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        found(models)


def test_no_server() -> None:
    with stub() as server:
        pass
    with pytest.raises(LoadError, match=r"cannot reach .*: connection refused; start a"):
        first_model(server.url, "")


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requested, "_PATIENCE", 0.05)
    with pytest.raises(LoadError, match=r"timed out\): the answer did not end in time"):
        found([NEVER])


def test_the_warm_up_has_a_prompt_of_its_own_and_must_not_fail() -> None:
    with stub(stream(*WHOLE)) as server:
        load = load_on(server.url, 2)
        warm_up(load)
        assert len(server.requested) == 1
        assert server.requested[0] not in [load.request(0), load.request(1)]
    full = plain(503, b'{"error": {"message": "full"}}')
    with stub(full) as server, pytest.raises(LoadError, match=r"\(HTTP 503\): full"):
        warm_up(load_on(server.url))
    wrong = stream(b"data: no\n\n")
    with stub(wrong) as server, pytest.raises(LoadError, match="'no' is no JSON object"):
        warm_up(load_on(server.url))
