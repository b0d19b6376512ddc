"""The tenant of a request, whose share of the backends it takes: its API key, or, without
keys, its client's address. Fields that a client chooses freely do not change the tenant.

Behind a proxy, all clients have the proxy's address. If the proxy is trusted
(`--forwarded-allow-ips`), the client is the last address of X-Forwarded-For that is not a
trusted proxy's. Addresses to the left of that are ignored: a client can write them.
"""

from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

from attrs import frozen
from starlette.datastructures import Headers
from starlette.types import Scope

from minfer.effects.serving.access.authentication import caller_of
from minfer.values.checks import ConfigError

_FORWARDED_FOR: Final = "x-forwarded-for"
IpAddress = IPv4Address | IPv6Address


@frozen
class TrustedProxies:
    """The networks of proxies whose X-Forwarded-For is believed."""

    networks: Sequence[IPv4Network | IPv6Network] = ()

    def include(self, address: IpAddress) -> bool:
        """Whether an address is a trusted proxy's."""
        return any(address in network for network in self.networks)


def read_proxies(text: str) -> TrustedProxies:
    """Addresses and networks, with commas between them. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return TrustedProxies(tuple([ip_network(word) for word in words]))
    except ValueError as error:
        message = f"must be addresses or networks, as 10.0.0.0/8: {error}"
        raise ConfigError(f"--forwarded-allow-ips {message}") from None


def tenant_of(scope: Scope, proxies: TrustedProxies) -> str:
    """The tenant of a request whose key was checked."""
    caller = caller_of(scope)
    if caller.key is not None or not proxies.networks:
        return caller.name
    client = _read_address(caller.name)
    if client is None:
        return caller.name
    hops = ",".join(Headers(scope=scope).getlist(_FORWARDED_FOR)).split(",")
    while proxies.include(client) and hops:
        previous_hop = _read_address(hops.pop())
        if previous_hop is None:
            break
        client = previous_hop
    return str(client)


def _read_address(text: str) -> IpAddress | None:
    """An address from a text, in which a port may follow it; None, if it is invalid."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
