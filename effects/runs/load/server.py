"""What is asked of a server before any load: is it there, and what does it serve?"""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from minfer.effects.runs.load.client import Client
from minfer.effects.runs.load.http import Address, Connection, HttpError
from minfer.effects.runs.load.load import Load
from minfer.effects.runs.load.record import LoadError, Record
from minfer.effects.runs.load.reply import OK, Reply

_PATIENCE: Final = 30.0  # seconds for a list of models
_SHOWN: Final = 20  # models that an error names
_KEYLESS: Final = (401, 403)
_NO_LIST: Final = (404, 405, 501)


@frozen
class Served:
    """What a server says of the model that it is to be asked for."""

    model: str
    max_model_len: int | None = None  # tokens, if it says so


class _Get(Reply):
    """An answer that is JSON, whole."""

    def __init__(self) -> None:
        super().__init__(stream=False)

    def json(self) -> Any:
        """What it says; None if that is not JSON."""
        try:
            return json.loads(self.whole)
        except ValueError:
            return None


def find_model(address: Address, key: str, asked: str | None) -> Served:
    """The model that is asked for, or the first that there is. Raises LoadError."""
    try:
        reply = asyncio.run(_get(address, key))
    except TimeoutError:
        raise LoadError(
            f"{address.url} took the connection and did not answer within "
            f"{_PATIENCE:g} s; is it an OpenAI-compatible server?"
        ) from None
    except HttpError as error:
        raise LoadError(
            f"cannot reach {address.url}: {error}; start a server, or say where it is "
            "with --port or --base-url"
        ) from None
    if reply.status in _KEYLESS:
        had = "refuses this key" if key else "wants a key"
        raise LoadError(f"{address.url} {had} (HTTP {reply.status}); give it --api-key")
    if reply.status in _NO_LIST and asked:
        return Served(asked)  # it keeps no list
    return _chosen(address, reply, asked)


def _chosen(address: Address, reply: _Get, asked: str | None) -> Served:
    """The model of a server's list. Raises LoadError."""
    told = reply.json()
    listed = told.get("data") if isinstance(told, dict) else None
    cards = [one for one in listed or () if isinstance(one, dict) and "id" in one]
    if reply.status != OK or not cards:
        raise LoadError(
            f"{address.url}/v1/models names no model (HTTP {reply.status}); is it an "
            "OpenAI-compatible server? If it keeps no such list, name one with --model"
        )
    found = next((c for c in cards if asked in (None, c["id"])), None)
    if found is None:
        names = ", ".join(str(card["id"]) for card in cards[:_SHOWN])
        raise LoadError(f"--model {asked!r} is not served there; there is {names}")
    most = found.get("max_model_len")
    return Served(str(found["id"]), most if isinstance(most, int) else None)


async def _get(address: Address, key: str) -> _Get:
    reply = _Get()
    async with asyncio.timeout(_PATIENCE):
        connection = await Connection.open(address)
        try:
            await connection.exchange(address.head("GET", "/v1/models", key, 0), reply)
        finally:
            connection.close()
    return reply


def warm_up(load: Load, count: int) -> Sequence[Record]:
    """Send a few requests that are not measured, from this process.

    Raises LoadError if all of them fail: then the load would, too.
    """
    if not count:
        return ()
    numbers = itertools.count()
    few = load.warm_up(count)
    client = Client(few, few.max_concurrency, lambda: next(numbers), time.monotonic())
    records = asyncio.run(client.run())
    failures = [one.failure for one in records if one.failure is not None]
    if len(failures) == count:
        raise LoadError(
            f"the first request failed ({failures[0].kind}): {failures[0].message}"
        )
    return records
