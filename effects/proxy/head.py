"""Heads of requests and responses on their way through a router.

Headers that are of one connection (RFC 9110, 7.6.1) are not passed on, nor is Host, which
is the backend's own; the body's length is written anew. The client's address is appended
to X-Forwarded-For; X-Forwarded-Host and X-Forwarded-Proto say what the client used here,
whatever it sent in them.
"""

import re
from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

RawHeaders = list[tuple[bytes, bytes]]
_HOP_BY_HOP_HEADERS: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_DROPPED_REQUEST_HEADERS: Final = _HOP_BY_HOP_HEADERS | {
    b"host",
    b"content-length",
    b"expect",
}
# Control characters, besides tabs: HTTP has none in headers (RFC 9110, 5.5).
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FORWARDED_FOR, _FORWARDED_HOST, _FORWARDED_PROTO = (
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
)


def request_headers(scope: Scope) -> list[tuple[str, str]]:
    """The headers of a client's request for a backend. They are in UTF-8
    (`unreadable_header`), in which aiohttp writes them.
    """
    headers: RawHeaders = scope["headers"]
    dropped = (
        _DROPPED_REQUEST_HEADERS
        | _named_by_connection(headers)
        | {_FORWARDED_FOR, _FORWARDED_HOST, _FORWARDED_PROTO}
    )
    forwarded = [(name, value) for name, value in headers if name not in dropped]
    chain = [value for name, value in headers if name == _FORWARDED_FOR]
    client = scope.get("client")
    if client:
        chain.append(client[0].encode())
    if chain:
        forwarded.append((_FORWARDED_FOR, b", ".join(chain)))
    forwarded += [(_FORWARDED_HOST, value) for name, value in headers if name == b"host"]
    forwarded.append((_FORWARDED_PROTO, scope.get("scheme", "http").encode()))
    return [(name.decode("ascii"), value.decode("utf-8")) for name, value in forwarded]


def response_headers(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The headers of a backend's response for a client."""
    lowercased = [(name.lower(), value) for name, value in headers]
    dropped = (
        _HOP_BY_HOP_HEADERS | _named_by_connection(lowercased) | {b"date"}
    )  # uvicorn has one
    return [(name, value) for name, value in lowercased if name not in dropped]


def unreadable_header(headers: RawHeaders) -> str:
    """The name of the first header whose value is not UTF-8, and cannot be forwarded;
    empty, if there is none.
    """
    for name, value in headers:
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            return name.decode("latin-1")
    return ""


def broken_header(headers: RawHeaders) -> str:
    """The name of a header whose value cannot be passed on, or nothing."""
    broken = (name for name, value in headers if _CONTROL.search(value))
    return next(broken, b"").decode("latin-1")


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    """Headers that the header Connection names as its own."""
    named = [value for name, value in headers if name == b"connection"]
    words = b",".join(named).lower().split(b",")
    return frozenset(word.strip() for word in words)
