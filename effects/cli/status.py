"""`minfer status`: the state of a running server or router, and of its replicas.

Both answer `/ready` without a key. A server's answer has all that is shown; a router's
backends are at `/router`, for which it may require a key.
"""

import argparse
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from attrs import frozen

from minfer.values.checks import ConfigError

DESCRIPTION: Final = (
    "Show how a running server is: whether it takes requests, how many run and wait, and "
    "each of its replicas, with its machine. URL is that of minfer serve or of a "
    "router. Exit code 0 if it is ready, 1 if it is not, 2 if it cannot be asked."
)
UNREADY: Final = 1  # the exit code
_URL: Final = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS: Final = 10.0  # seconds for all answers together
_MAX_ANSWER_BYTES: Final = 2**20  # bytes, at most, that are read of an answer
_REFUSED: Final = (401, 403)
_READY: Final = "ready"
_COLUMNS: Final = {  # titles, and the names of what is below them
    "replica": "replica",
    "role": "role",
    "machine": "machine",
    "state": "status",
    "running": "running",
    "waiting": "waiting",
    "KV cache": "kv_cache_usage",
}
_ADAPTER_COUNTS: Final = ("named", "running", "waiting", "slots")
_NUMBERS: Final = ("running", "waiting", "KV cache")  # columns that are aligned right


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer status`."""
    parser.add_argument(
        "url",
        nargs="?",
        default=_URL,
        metavar="URL",
        help="the address of the server (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="sent to a server that needs one (default: the environment's "
        "MINFER_API_KEY)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the status; returns the exit code. Raises ConfigError if the server cannot be
    reached, refuses the key, or is not minfer.
    """
    key = options.api_key
    if key is None:
        key = os.environ.get("MINFER_API_KEY", "")
    if not (key.isascii() and key.isprintable()):  # an error later would quote it
        raise ConfigError(
            "the API key (--api-key, or MINFER_API_KEY) has a line break or another "
            "character that no key has"
        )
    server = _Server(_address(options.url), key)
    status = _status_in_time(server)
    print("\n".join(_lines(server.base, status)))
    return 0 if status["status"] == _READY else UNREADY


@frozen
class _Server:
    """The server or router whose status is shown."""

    base: str  # its URL, without /v1
    key: str  # API key; empty: none is sent

    def ask(self, path: str) -> dict[str, Any]:
        """GET `path`; returns the JSON object, with a string `status`. Raises ConfigError
        for any other answer.
        """
        status, body = self.get(path)
        if status in _REFUSED:
            raise ConfigError(
                f"{self.base} needs an API key, or another one (HTTP {status}): give it "
                "with --api-key or MINFER_API_KEY"
            )
        try:
            answer = json.loads(body)
            if isinstance(answer, dict) and isinstance(answer["status"], str):
                return answer
        except (ValueError, KeyError, RecursionError):
            pass
        raise ConfigError(
            f"{self.base} is no server of minfer: it answers {path} with HTTP {status} "
            f"and {body[:60]!r}"
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """GET `path`; returns the HTTP status and the body. Raises ConfigError."""
        head = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            request = Request(self.base + path, headers=head)  # noqa: S310 - see `_address`
            try:
                answer = build_opener(_NoRedirects).open(
                    request, timeout=_TIMEOUT_SECONDS
                )
            except HTTPError as error:  # a status of 300 or more
                answer = error
            with answer:
                return answer.status, answer.read(_MAX_ANSWER_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            text = _word(cause) or type(error).__name__  # may have text of the server
            raise self.error(text) from None

    def error(self, reason: str) -> ConfigError:
        """The error for a server that cannot be asked."""
        return ConfigError(
            f"{self.base} cannot be asked: {reason}; is a server running there? "
            "minfer serve starts one"
        )


def _status_in_time(server: _Server) -> dict[str, Any]:
    """Ask a server or router for its status. Raises ConfigError, also if all answers
    together take longer than _TIMEOUT_SECONDS: a socket's timeout is for each read, and a
    server may send a byte now and then for ever.
    """
    status = Future[dict[str, Any]]()

    def ask() -> None:
        try:
            status.set_result(_status_of(server))
        except BaseException as error:
            status.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return status.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise server.error(f"it did not answer within {_TIMEOUT_SECONDS:g} s") from None


def _status_of(server: _Server) -> dict[str, Any]:
    """The status of a server or router. Raises ConfigError."""
    status = server.ask("/ready")
    if "version" in status:
        return status
    # It may also be a server that still loads its model.
    return {**status, **_router_status(server)}


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _address(url: str) -> str:
    """The address of a server, without /v1. Raises ConfigError."""
    try:
        address = urlsplit(url if "://" in url else f"http://{url}")
        is_http = address.scheme in ("http", "https") and address.hostname is not None
        bare = not address.query and not address.fragment
        fine = (
            is_http and bare and address.port != 0
        )  # raises ValueError for an invalid one
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(f"{url!r} is no address of a server; it is as in {_URL}")
    return address.geturl().rstrip("/").removesuffix("/v1")


def _router_status(server: _Server) -> Mapping[str, Any]:
    """A router's figures, under the names that a server has; empty if it is no router.
    Raises ConfigError.
    """
    status, body = server.get("/router")
    if status in _REFUSED:
        server.ask("/router")  # raises: the key is missing or wrong
    try:
        router = json.loads(body)
        backends = [
            {
                "replica": number,
                "machine": backend["url"],
                "status": backend["health"],
                "running": backend["requests"],
            }
            for number, backend in enumerate(router["backends"])
        ]
        return {
            "model": f"router, policy {router['policy']}",
            "running": sum(backend["running"] for backend in backends),
            "waiting": router["waiting"],
            "replicas": backends,
        }
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


def _lines(base: str, status: Mapping[str, Any]) -> Iterator[str]:
    names = [_word(status["model"])] if "model" in status else []
    names += [f"minfer {_word(status['version'])}"] if "version" in status else []
    ready = status["status"] == _READY
    state = _READY if ready else f"not ready: {_word(status['status'])}"
    detail = f" ({_word(status['ready'])})" if "ready" in status else ""
    yield f"{', '.join([base, *names])}: {state}{detail}"
    if "running" in status:
        waiting = _cell(status.get("waiting"))
        yield f"{_word(status['running'])} running, {waiting} waiting"
    if isinstance(adapters := status.get("adapters"), dict):
        cells = [_cell(adapters.get(name)) for name in _ADAPTER_COUNTS]
        pairs = zip(cells, _ADAPTER_COUNTS, strict=True)
        yield f"adapters: {', '.join(f'{cell} {name}' for cell, name in pairs)}"
    replicas = status.get("replicas")
    if isinstance(replicas, list) and replicas:
        yield from _table(replica for replica in replicas if isinstance(replica, dict))


def _table(replicas: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rows = [dict(zip(_COLUMNS, _COLUMNS, strict=True))]
    rows += [
        {title: _cell(replica.get(name)) for title, name in _COLUMNS.items()}
        for replica in replicas
    ]
    widths = {title: max(len(row[title]) for row in rows) for title in _COLUMNS}
    for row in rows:
        cells = [
            text.rjust(widths[title]) if title in _NUMBERS else text.ljust(widths[title])
            for title, text in row.items()
        ]
        yield "  ".join(cells).rstrip()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0%}"
    return "-" if value in (None, "") else _word(value)


def _word(value: Any) -> str:
    """A server's value as text, without control characters, which a terminal obeys."""
    text = str(value)
    return text if text.isprintable() else ascii(text)
