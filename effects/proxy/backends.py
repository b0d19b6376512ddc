"""The servers behind a router: their addresses, which are their names too, and those of
their KV events.
"""

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from attrs import frozen

from minfer.values.checks import ConfigError

_SCHEMES: Final = ("http", "https")
_API_PATH: Final = "/v1"  # the end of base URLs of OpenAI's clients
_NO_ADDRESS: Final = "-"  # in place of an address


def read_backends(urls: Sequence[str]) -> tuple[str, ...]:
    """The base URLs of backends, without a slash or /v1 at their ends. Raises
    ConfigError.
    """
    backends = tuple([_base_url(url) for url in urls])
    if not backends:
        raise ConfigError("name at least one server: --backend http://HOST:PORT")
    for url in backends:
        if backends.count(url) > 1:
            raise ConfigError(f"--backend {url} was given twice; leave one out")
    return backends


def _base_url(url: str) -> str:
    try:
        split_url = urlsplit(url)
        host, port = split_url.hostname, split_url.port
    except ValueError as error:
        raise ConfigError(f"--backend {url!r} is no URL: {error}") from None
    if split_url.scheme not in _SCHEMES or not host or port == 0:
        raise ConfigError(f"--backend {url!r} must be like http://HOST:PORT")
    if split_url.username is not None or split_url.query or split_url.fragment:
        reason = "must have no user, query or fragment; clients send their own keys"
        raise ConfigError(f"--backend {url!r} {reason}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"--backend {url!r} has characters that a URL must not have")
    path = split_url.path.rstrip("/").removesuffix(_API_PATH)
    return f"{split_url.scheme}://{split_url.netloc.lower()}{path}"


@frozen
class KvSource:
    """Where a server publishes its KV events; `replay`: where batches are sent again, if
    anywhere.
    """

    events: str
    replay: str = ""


def read_sources(texts: Sequence[str], backends: Sequence[str]) -> Mapping[str, KvSource]:
    """The sources of servers, given in their order: `EVENTS` or `EVENTS,REPLAY`, or `-`
    for a server without. Raises ConfigError.
    """
    if len(texts) not in (0, len(backends)):
        reason = f"as often as --backend, in the same order ({_NO_ADDRESS}: no events)"
        raise ConfigError(f"--kv-events must be given {reason}, or never")
    pairs = zip(backends, texts, strict=False)
    return {name: _source(text) for name, text in pairs if text != _NO_ADDRESS}


def _source(text: str) -> KvSource:
    events, comma, replay = text.partition(",")
    for address in (events, replay) if comma else (events,):
        if not address.startswith(("tcp://", "ipc://")) or address.endswith("://"):
            reason = (
                "must be like tcp://HOST:PORT or tcp://HOST:PORT,tcp://HOST:REPLAY_PORT"
            )
            raise ConfigError(f"--kv-events {text!r} {reason}")
    return KvSource(events, replay)
