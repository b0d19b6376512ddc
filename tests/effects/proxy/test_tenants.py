"""Tenants of a router: no client can make itself several."""

from typing import Any

import pytest

from minfer.effects.proxy.tenants import TrustedProxies, read_proxies, tenant_of
from minfer.routing.messages import RoutingRequest
from minfer.values.checks import ConfigError
from tests.effects.proxy.fakes import TEAMS, Routing, routing, run


def noted(harness: Routing, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The tenants and users of requests that are placed from now on."""
    placed = list[tuple[str, str]]()
    place = harness.router.dispatcher.place

    async def note(request: RoutingRequest, user: str = "") -> str:
        placed.append((request.tenant, user))
        return await place(request, user)

    monkeypatch.setattr(harness.router.dispatcher, "place", note)
    return placed


def test_a_tenant_is_the_name_of_its_key_however_that_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @run
    async def _() -> None:
        async with routing(1, keys=TEAMS) as harness:
            placed = noted(harness, monkeypatch)
            for headers in (
                {"authorization": "Bearer a"},
                {"authorization": "bEARER   a"},
                {"x-api-key": "a"},
                {"x-api-key": "a", "authorization": "Bearer 1"},
                {"x-api-key": "a", "authorization": "Bearer 2"},
                {"x-api-key": "a", "authorization": "Basic 3"},
                {"x-api-key": "a", "x-forwarded-for": "10.9.9.9"},
            ):
                answer = await harness.chat("x", headers=headers, user="u")
                assert answer.status_code == 200
            assert {*placed} == {("team-a", "u")}
            await harness.chat("x", headers={"x-api-key": "b"})
            assert placed[-1] == ("team-b", "")


def test_without_keys_a_tenant_is_its_address_whatever_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @run
    async def _() -> None:
        async with routing(1) as harness:
            placed = noted(harness, monkeypatch)
            for i in range(3):
                headers = {
                    "authorization": f"Bearer {i}",
                    "x-api-key": f"{i}",
                    "x-forwarded-for": f"10.0.0.{i}",
                }
                await harness.chat("x", headers=headers, user=f"user-{i}")
            assert placed == [("127.0.0.1", f"user-{i}") for i in range(3)]


def test_a_trusted_proxy_names_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    @run
    async def _() -> None:
        async with routing(1, proxies=read_proxies("127.0.0.1")) as harness:
            placed = noted(harness, monkeypatch)
            await harness.chat("x", headers={"x-forwarded-for": "1.2.3.4, 10.0.0.7"})
            assert placed == [("10.0.0.7", "")]


@pytest.mark.parametrize(
    ("forwarded", "tenant"),
    [
        ([], "10.0.0.1"),
        (["5.6.7.8"], "5.6.7.8"),
        (["1.1.1.1, 5.6.7.8"], "5.6.7.8"),  # the client wrote what is left of it
        (["1.1.1.1", "5.6.7.8, 10.0.0.2"], "5.6.7.8"),  # two proxies
        (["5.6.7.8:443"], "5.6.7.8"),
        (["[2001:DB8::1]:443"], "2001:db8::1"),
        (["2001:db8:0::1"], "2001:db8::1"),
        (["::ffff:5.6.7.8"], "5.6.7.8"),
        (["nonsense"], "10.0.0.1"),
        (["nonsense, 10.0.0.2"], "10.0.0.2"),
        ([""], "10.0.0.1"),
        ([b"\xff"], "10.0.0.1"),
    ],
)
def test_the_address_before_the_trusted_proxies(
    forwarded: list[str | bytes], tenant: str
) -> None:
    values = [
        value if isinstance(value, bytes) else value.encode() for value in forwarded
    ]
    headers = [(b"x-forwarded-for", value) for value in values]
    scope: Any = {"type": "http", "client": ("10.0.0.1", 9), "headers": headers}
    assert tenant_of(scope, read_proxies("10.0.0.0/8, ::1")) == tenant
    assert tenant_of(scope, TrustedProxies()) == "10.0.0.1"
    assert tenant_of({**scope, "client": ("9.9.9.9", 9)}, read_proxies("10.0.0.1")) == (
        "9.9.9.9"
    )


@pytest.mark.parametrize("text", ["proxy.example", "10.0.0.1/8", "*", "10.0.0.1:80"])
def test_proxies_are_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
        read_proxies(text)
