"""Pages of other addresses are told from programs, and from pages of this server's."""

import httpx
import pytest
from starlette.testclient import TestClient

from minfer.effects.serving.origins import ALLOWED, AllowOrigins, foreign
from tests.effects.served import Serving


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"host": "127.0.0.1:8000"}, False),  # a program
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "https://evil.example"}, True),
        ({"host": "127.0.0.1:8000", "origin": "null"}, True),  # a file, or a sandbox
        ({"origin": "https://evil.example"}, True),
    ],
)
def test_foreign(headers: dict[str, str], is_foreign: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert foreign({"type": "http", "headers": raw}) is is_foreign


@pytest.mark.parametrize(
    ("allowed", "is_foreign"), [(["http://a"], True), (["*"], False)]
)
def test_foreign_is_who_is_not_allowed(allowed: list[str], is_foreign: bool) -> None:
    scope = {"type": "http", "headers": [(b"origin", b"http://b")], ALLOWED: allowed}
    assert foreign(scope) is is_foreign
    scope["headers"] = [(b"origin", b"http://a")]
    assert not foreign(scope)


def allowing(served: Serving, *origins: str) -> TestClient:
    return TestClient(
        AllowOrigins(served.service, origins), raise_server_exceptions=False
    )


def preflight(client: TestClient, origin: str) -> httpx.Response:
    wanted = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    found: httpx.Response = client.options(
        "/v1/completions", headers={"origin": origin, **wanted}
    )
    return found


def test_pages_of_allowed_origins_are_let_in_without_credentials(
    bundled: Serving,
) -> None:
    client = allowing(bundled, "https://good.example")
    found = preflight(client, "https://good.example")
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in found.headers["access-control-allow-headers"]
    assert preflight(client, "https://evil.example").status_code == 400
    for origin, told in (("https://good.example", True), ("https://evil.example", False)):
        asked = {"origin": origin}
        for answer in (
            client.get("/v1/models", headers=asked),
            client.post("/v1/completions", json={}, headers=asked),  # which is an error
        ):
            assert ("access-control-allow-origin" in answer.headers) is told
            assert "access-control-allow-credentials" not in answer.headers
    reset = "/reset_prefix_cache"
    for origin, status in (("https://good.example", 200), ("https://evil.example", 403)):
        assert client.post(reset, headers={"origin": origin}).status_code == status


def test_all_pages_are_let_in_without_credentials(bundled: Serving) -> None:
    client = allowing(bundled, "*")
    found = client.get("/v1/models", headers={"origin": "https://any.example"})
    assert found.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in found.headers


def test_by_default_no_page_but_ones_own_is(bundled: Serving) -> None:
    asked = {"origin": "https://good.example"}
    found = bundled.http.get(f"{bundled.url}/v1/models", headers=asked)
    assert "access-control-allow-origin" not in found.headers
