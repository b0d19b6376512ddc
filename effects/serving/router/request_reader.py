"""Makes what the router must know of a request: prompt, tenant, session, length."""

from itertools import count
from typing import Final

from attrs import define, field, frozen
from starlette.datastructures import Headers
from starlette.types import Scope

from minfer.effects.serving.access.api_keys import digest
from minfer.effects.serving.access.authentication import caller_of
from minfer.effects.serving.router.prompt_bodies import PromptBody
from minfer.effects.serving.router.prompt_reader import PromptReader
from minfer.routing.messages import RoutingRequest
from minfer.values.checks import LARGEST_TOKEN

_EMBEDDINGS: Final = "/v1/embeddings"  # which have no output tokens
_TENANT: Final = 16  # hexadecimal digits of a key's digest


@frozen
class ReadRequest:
    """A request as the router sees it, and the response that it continues, if any."""

    routed: RoutingRequest
    previous: str = ""


@define(eq=False)
class RequestReader:
    """Reads bodies of up to `most` bytes, once decompressed."""

    most: int
    prompts: PromptReader
    _numbers: "count[int]" = field(factory=count, init=False)

    async def read(self, scope: Scope, body: bytes) -> ReadRequest:
        """Read a request. Raises ApiError."""
        path = scope["path"]
        codings = Headers(scope=scope).getlist("content-encoding")
        client = caller_of(scope).name
        prompt = await self.prompts.read(
            PromptBody(path=path, coding=", ".join(codings), most=self.most, data=body),
            client,
        )
        routed = RoutingRequest(
            id=str(next(self._numbers)),
            keys=prompt.keys,
            tokens=min(prompt.tokens, LARGEST_TOKEN),
            tenant=_key_digest(scope) or prompt.user or client,
            session=prompt.session,
            output=0 if path == _EMBEDDINGS else prompt.output,
        )
        return ReadRequest(routed, prompt.previous)


def _key_digest(scope: Scope) -> str:
    """The digest of the API key that a client sent, or nothing."""
    headers = dict(scope["headers"])
    key = headers.get(b"authorization") or headers.get(b"x-api-key")
    return digest(key).hex()[:_TENANT] if key else ""
