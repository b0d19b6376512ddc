"""Requests that killed engines of a backend, which a router forwards to no backend for a
while: they would kill the engines of the next one.

The router has no token ids, so it knows a request by its tenant and the digest of its
body, but for the fields that change nothing of its work.
"""

import asyncio
import re
import time
from hashlib import sha256
from typing import Any, Final

import msgspec
from attrs import evolve
from starlette.types import Message

from minfer.effects.live.link.killers import WHY_REFUSED, Killer, Killers
from minfer.effects.serving.client_errors import KILLED_ENGINE, ApiError
from minfer.effects.serving.router.body import Bodies
from minfer.effects.serving.router.forwarding import ClientRequest
from minfer.effects.serving.router.prompt_bodies import decode, prompt_body

# A backend's error, whole or as an event. No text of a model can be this: there, quotes
# have a backslash before them. An answer may repeat fields of its request with such a
# code (`metadata`, `tools`), but has no status of an error, and no event that begins so.
_CODE: Final = KILLED_ENGINE.encode()
_KILLED: Final = re.compile(rb'"code": ?"%b"' % _CODE)
_EVENT: Final = re.compile(
    rb'data: ?\{(?:"type": ?"error", ?)?"error": ?\{[^{}]*"code": ?"%b"' % _CODE
)
_TAIL: Final = 1024  # bytes of a part that may be the beginning of an error
_ERRORS: Final = 400  # statuses from here on
_LEFT_OUT: Final = (
    "cache_salt",
    "deadline",
    "metadata",
    "priority",
    "prompt_cache_key",
    "request_id",
    "safety_identifier",
    "seed",
    "stream",
    "stream_options",
    "timing",
    "user",
)


class KillerBodies:
    """The bodies that killed engines; the limit of `bodies` holds once decompressed."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._killers = Killers(time.monotonic)

    async def check(self, tenant: str, request: ClientRequest) -> None:
        """Raise ApiError for a request that killed engines a while ago."""
        if not self._killers.has(tenant):  # nearly always: nothing is parsed
            return
        digest = await asyncio.to_thread(self._digest, request)
        if self._killers.knows(tenant, digest):
            raise ApiError(WHY_REFUSED, None, KILLED_ENGINE)

    def watch(self, tenant: str, request: ClientRequest) -> ClientRequest:
        """Returns a request whose answer is searched for the error of one that killed
        engines.
        """
        tail, killed = b"", _EVENT

        async def send(message: Message) -> None:
            nonlocal tail, killed
            if message.get("status", 0) >= _ERRORS:
                killed = _KILLED
            data: bytes = tail + message.get("body", b"")
            tail = data[-_TAIL:]
            if _CODE in data and killed.search(data):
                digest = await asyncio.to_thread(self._digest, request)
                self._killers.add([Killer(tenant, digest, 1)])
            await request.send(message)

        return evolve(request, send=send)

    def _digest(self, request: ClientRequest) -> bytes:
        body = decode(prompt_body(request.scope, request.body, self._bodies.most))
        fields = _read(body)
        if fields is not None:
            for name in _LEFT_OUT:
                fields.pop(name, None)
            body = msgspec.json.encode(fields, order="deterministic")
        return sha256(request.scope["path"].encode() + b"\0" + body).digest()


def _read(body: bytes) -> dict[str, Any] | None:
    """The fields of a body, if it has any."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
