"""Pages of other addresses are told from programs, and from pages of this server's."""

import asyncio

import httpx
import pytest

from minfer.effects.serving.wire.origins import (
    ORIGINS_FIELD,
    AllowOrigins,
    is_cross_origin,
)
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
def test_which_origins_are_foreign(headers: dict[str, str], is_foreign: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert is_cross_origin({"type": "http", "headers": raw}) is is_foreign


@pytest.mark.parametrize(
    ("allowed", "is_foreign"), [(["http://a"], True), (["*"], False)]
)
def test_origins_that_are_not_allowed_are_foreign(
    allowed: list[str], is_foreign: bool
) -> None:
    scope = {
        "type": "http",
        "headers": [(b"origin", b"http://b")],
        ORIGINS_FIELD: allowed,
    }
    assert is_cross_origin(scope) is is_foreign
    scope["headers"] = [(b"origin", b"http://a")]
    assert not is_cross_origin(scope)


class Pages:
    """Web pages that ask a server which allows some origins."""

    def __init__(self, served: Serving, *origins: str) -> None:
        self.app = AllowOrigins(served.service, origins)

    def ask(self, origin: str, method: str, path: str, **headers: str) -> httpx.Response:
        """The answer to a page's request."""

        async def answer() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://here"
            ) as client:
                all_headers = {"origin": origin, **headers}
                return await client.request(method, path, headers=all_headers)

        return asyncio.run(answer())

    def preflight(self, origin: str) -> httpx.Response:
        """What a browser asks before a page may send JSON with a key."""
        headers = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        return self.ask(origin, "OPTIONS", "/v1/completions", **headers)


GOOD, EVIL = "https://good.example", "https://evil.example"


def test_pages_of_allowed_origins_are_let_in_without_credentials(
    bundled: Serving,
) -> None:
    pages = Pages(bundled, GOOD)
    response = pages.preflight(GOOD)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == GOOD
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert pages.preflight(EVIL).status_code == 400
    for origin, reported in ((GOOD, True), (EVIL, False)):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            answer = pages.ask(origin, method, path)  # of which one is an error
            assert ("access-control-allow-origin" in answer.headers) is reported
            assert "access-control-allow-credentials" not in answer.headers
    for origin, status in ((GOOD, 200), (EVIL, 403)):
        assert pages.ask(origin, "POST", "/reset_prefix_cache").status_code == status


def test_all_pages_are_let_in_without_credentials(bundled: Serving) -> None:
    response = Pages(bundled, "*").ask(EVIL, "GET", "/v1/models", cookie="a=b")
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers


def test_by_default_no_page_but_ones_own_is(bundled: Serving) -> None:
    headers = {"origin": GOOD}
    response = bundled.http.get(f"{bundled.url}/v1/models", headers=headers)
    assert "access-control-allow-origin" not in response.headers
