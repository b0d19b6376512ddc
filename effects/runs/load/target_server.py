"""Checks of a server before any load: whether it answers, and its model."""

import asyncio
import json
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from minfer.effects.runs.load.load_client import LoadPlan, exchange, failure_of, session
from minfer.effects.runs.load.reply_reader import ReplyReader
from minfer.effects.runs.load.request_record import LoadError, ReplyError, RequestFailure

_PATIENCE: Final = 30.0  # seconds for a list of models
_REMEDIES: Final = {
    "not connected": "start a server, or give its address with --base-url",
    "HTTP 401": "set OPENAI_API_KEY in the environment to its key",
    "HTTP 403": "set OPENAI_API_KEY in the environment to its key",
}


def read_url(url: str) -> str:
    """A base URL without its /v1. Raises LoadError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        fine = parts.scheme in ("http", "https") and parts.hostname and not parts.query
        fine = fine and parts.port != 0  # raises ValueError for an invalid port
    except ValueError:
        fine = False
    if not fine:
        raise LoadError(
            f"--base-url {url!r} is no address of a server; it is as in "
            "http://127.0.0.1:8000"
        )
    return parts.geturl().rstrip("/").removesuffix("/v1")


def first_model(base: str, key: str) -> str:
    """The first model that a server lists. Raises LoadError."""
    url = f"{base}/v1/models"
    try:
        status, body = asyncio.run(_get(url, key))
    except (aiohttp.ClientError, OSError) as error:
        raise _load_error(f"cannot reach {url}", failure_of(error)) from None
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        failure = RequestFailure(f"HTTP {status}", "name one with --model")
        raise _load_error(f"{url} names no model", failure) from None


async def _get(url: str, key: str) -> tuple[int, bytes]:
    async with session(key, _PATIENCE) as http, http.get(url) as answer:
        return answer.status, await answer.read()


def warm_up(load: LoadPlan) -> None:
    """Send one request that is not measured. Raises LoadError if it fails, as the load
    then would.
    """
    reply = ReplyReader()

    async def send() -> None:
        async with session(load.key) as http:
            await exchange(http, load.url, load.request(-1), reply)

    try:
        asyncio.run(send())
        failure = reply.failure()
    except (aiohttp.ClientError, OSError, ReplyError) as error:
        failure = failure_of(error)
    if failure is not None:
        raise _load_error(f"the first request to {load.url} failed", failure)


def _load_error(what: str, failure: RequestFailure) -> LoadError:
    remedy = _REMEDIES.get(failure.kind)
    more = f"; {remedy}" if remedy else ""
    return LoadError(f"{what} ({failure.kind}): {failure.message}{more}")
