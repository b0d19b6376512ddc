"""The names under which a server may be addressed, if it is local and needs no key.

A web page may have its own name's address changed to 127.0.0.1 (DNS rebinding): its
browser then treats this server as the page's own, origin and all, and only the header
Host still has the page's name. So without keys, at a loopback address, a request has to
name this machine, or a host that the operator allows.

    Host: localhost:8000, anything.localhost, 127.0.0.1, [::1]    served
    Host: a name of --allowed-host, or any, if one is *           served
    no Host                                                       served: no browser's
    Host: evil.example                                            403

At other addresses, names are compared only if some are allowed: then as above. /health is
answered for any name, as probes use many.
"""

import argparse
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen
from starlette.types import ASGIApp, Receive, Scope, Send

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.connections import LIVENESS_PATHS
from minfer.values.checks import ConfigError

ANY_HOST: Final = "*"
_LOCALHOST: Final = "localhost"
_HOST_HEADER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@/]+)(?::\d*)?")
_HOST_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)


@frozen
class Hosts:
    """The names that requests may have as their Host, besides this machine's own."""

    names: Sequence[str] = ()

    def allows(self, header: str) -> bool:
        """Whether a request may have this as its Host."""
        if ANY_HOST in self.names:
            return True
        match = _HOST_HEADER.fullmatch(header.strip())
        name = "" if match is None else _normalize(match[1])
        return _is_local(name) or name in self.names


def read_hosts(options: argparse.Namespace, *, has_keys: bool) -> Hosts | None:
    """The allowed hosts, by the command line; None: any. Raises ConfigError."""
    names = tuple(_normalize(host) for host in options.allowed_host)
    for host, name in zip(options.allowed_host, names, strict=True):
        if (
            name != ANY_HOST
            and not _HOST_NAME.fullmatch(name)
            and _parse_address(name) is None
        ):
            expected = "a host name or address without scheme, port or path, or *"
            raise ConfigError(f"--allowed-host must be {expected}, not {host!r}")
    needed = not has_keys and _binds_loopback(options.host)
    return Hosts(names) if needed or names else None


class CheckHost:
    """Middleware: a request for another name is answered with what `refuse` returns."""

    def __init__(
        self, app: ASGIApp, hosts: Hosts, refuse: Callable[[Exception, Scope], ASGIApp]
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        header = dict(scope.get("headers", ())).get(b"host")
        if header is not None and scope["path"] not in LIVENESS_PATHS:
            host = header.decode("latin-1")
            if not self._hosts.allows(host):
                await self._refuse(_wrong_host(host), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _wrong_host(host: str) -> ApiError:
    match = _HOST_HEADER.fullmatch(host)
    name = host if match is None else match[1]
    reason = f"this server does not go by the name {name[:256]!r} (the header Host)"
    remedy = f"if it should, start it with --allowed-host {name[:256]}"
    return ApiError(f"{reason}; {remedy}", None, "host_not_allowed", 403)


def _normalize(name: str) -> str:
    """A name in the form for comparison; of an address, its usual form."""
    text = name.lower().removesuffix(".")
    address = _parse_address(text.removeprefix("[").removesuffix("]"))
    return text if address is None else str(address)


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(name: str) -> bool:
    address = _parse_address(name)
    if address is not None:
        return address.is_loopback
    return name == _LOCALHOST or name.endswith(f".{_LOCALHOST}")


def _binds_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        first = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, IndexError):
        return False  # the server cannot listen there, which is reported later
    address = _parse_address(str(first[4][0]))
    return address is not None and address.is_loopback
