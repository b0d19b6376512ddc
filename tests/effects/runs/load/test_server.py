"""What is found out before a load: who is there, what is served, what fails at once."""

import pytest

from minfer.effects.runs.load import server as asked
from minfer.effects.runs.load.http import read_address
from minfer.effects.runs.load.record import LoadError
from minfer.effects.runs.load.server import Served, find_model, warm_up
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


def found(models: list[Step], model: str | None = None, key: str = "") -> Served:
    with stub(models=models) as server:
        return find_model(read_address(server.url), key, model)


def test_the_model_is_the_one_asked_for_or_the_first() -> None:
    models = plain(200, MODELS)
    assert found(models) == Served("one", 512)
    assert found(models, "two") == Served("two", None)
    assert found(plain(404, b""), "any") == Served("any")


@pytest.mark.parametrize(
    ("models", "model", "key", "message"),
    [
        (
            plain(200, MODELS),
            "three",
            "",
            "'three' is not served there; there is one, two",
        ),
        (plain(401, b""), None, "", r"wants a key \(HTTP 401\); give it --api-key"),
        (plain(401, b""), None, "x", "refuses this key"),
        (plain(404, b""), None, "", "names no model .* --model"),
        (plain(200, b"<html>"), None, "", "names no model"),
        (plain(200, b'{"data": [1]}'), "x", "", "names no model"),
        ([b"SSH-2.0\r\n\r\n"], None, "", "not HTTP"),
    ],
)
def test_what_is_wrong_is_told(
    models: list[Step], model: str | None, key: str, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        found(models, model, key)


def test_nobody_there() -> None:
    with stub() as server:
        gone = read_address(server.url)
    with pytest.raises(LoadError, match=r"cannot reach .*: connection refused; start a"):
        find_model(gone, "", None)


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "_PATIENCE", 0.05)
    with pytest.raises(LoadError, match=r"did not answer within 0\.05 s"):
        found([NEVER])


def test_warming_up_fails_only_if_all_of_it_does() -> None:
    full = plain(503, b'{"error": {"message": "full"}}')
    with stub(full, stream(*WHOLE)) as server:
        assert len(warm_up(load_on(server.url, 9), 2)) == 2
        assert len(server.asked) == 2
    with stub(full) as server:
        assert warm_up(load_on(server.url, 9), 0) == ()
        with pytest.raises(
            LoadError, match=r"the first request failed \(HTTP 503\): full"
        ):
            warm_up(load_on(server.url, 9, max_concurrency=1), 2)
        assert len(server.asked) == 2
