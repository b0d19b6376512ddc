"""The denylist of a router: requests that crashed engines of a backend are forwarded to
no backend for a while, as they would crash the engines of the next one, too.

The router has no token ids. An entry is a tenant and the digest of a body without the
fields that do not change a request's work.
"""

import asyncio
import re
import time
from hashlib import sha256
from typing import Any, Final

import msgspec
from attrs import evolve
from starlette.types import Message

from minfer.effects.cluster.link.crash_denylist import CrashDenylist, CrashingRequest
from minfer.effects.cluster.link.crash_rule import REFUSAL_MESSAGE
from minfer.effects.proxy.body import Bodies
from minfer.effects.proxy.forwarding import FIRST_ERROR_STATUS, ClientRequest
from minfer.effects.proxy.prompt_bodies import decode, prompt_body
from minfer.effects.serving.client_errors import KILLED_ENGINE, ApiError

# A backend's error, as a whole body or as an event. A model's text cannot match: in JSON,
# its quotes have a backslash before them. An answer may repeat fields of its request with
# such a code (`metadata`, `tools`), but its status is no error, and no event begins so.
_CODE: Final = KILLED_ENGINE.encode()
_ERROR_BODY: Final = re.compile(rb'"code": ?"%b"' % _CODE)
_ERROR_EVENT: Final = re.compile(
    rb'data: ?\{(?:"type": ?"error", ?)?"error": ?\{[^{}]*"code": ?"%b"' % _CODE
)
_TAIL_BYTES: Final = 1024  # of a part: they may be the beginning of an error
_FIELDS_WITHOUT_WORK: Final = (  # which the digest leaves out
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


class DeniedBodies:
    """The bodies that crashed engines; `bodies` bounds their decompressed size."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._denylist = CrashDenylist(time.monotonic)

    async def check(self, tenant: str, request: ClientRequest) -> None:
        """Raise ApiError for a request that crashed engines a while ago."""
        if not self._denylist.has_client(tenant):  # nearly always: nothing is parsed
            return
        digest = await asyncio.to_thread(self._digest, request)
        if self._denylist.contains(tenant, digest):
            raise ApiError(REFUSAL_MESSAGE, None, KILLED_ENGINE)

    def watch(self, tenant: str, request: ClientRequest) -> ClientRequest:
        """Returns the request with a `send` that searches the answer for the error of a
        request that crashed engines, and then adds it to the denylist.
        """
        tail, pattern = b"", _ERROR_EVENT

        async def send(message: Message) -> None:
            nonlocal tail, pattern
            if message.get("status", 0) >= FIRST_ERROR_STATUS:
                pattern = _ERROR_BODY
            data: bytes = tail + message.get("body", b"")
            tail = data[-_TAIL_BYTES:]
            if _CODE in data and pattern.search(data):
                digest = await asyncio.to_thread(self._digest, request)
                self._denylist.add([CrashingRequest(tenant, digest, 1)])
            await request.send(message)

        return evolve(request, send=send)

    def _digest(self, request: ClientRequest) -> bytes:
        body = decode(prompt_body(request.scope, request.body, self._bodies.max_bytes))
        fields = _read(body)
        if fields is not None:
            for name in _FIELDS_WITHOUT_WORK:
                fields.pop(name, None)
            body = msgspec.json.encode(fields, order="deterministic")
        return sha256(request.scope["path"].encode() + b"\0" + body).digest()


def _read(body: bytes) -> dict[str, Any] | None:
    """The fields of a body, if it has any."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
