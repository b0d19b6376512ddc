"""Makes what the router must know of a request: prompt, tenant, session, length."""

import asyncio
from itertools import count
from typing import Final

from attrs import define, field, frozen
from starlette.types import Scope

from minfer.effects.serving.access.api_keys import digest
from minfer.effects.serving.access.authentication import caller_of
from minfer.effects.serving.router.body import decoded
from minfer.effects.serving.router.prompt_keys import read_fields, text_keys
from minfer.effects.serving.router.token_keys import TokenKeys
from minfer.routing.messages import RoutingRequest
from minfer.values.checks import LARGEST_TOKEN

_EMBEDDINGS: Final = "/v1/embeddings"  # which have no output tokens
_TENANT: Final = 16  # hexadecimal digits of a key's digest


@frozen
class ReadRequest:
    """A request as the router sees it, and the response that it continues, if any."""

    routed: RoutingRequest
    previous: str = ""
    model: object = None  # that is requested


@define(eq=False)
class RequestReader:
    """Reads bodies of up to `most` bytes, once decompressed. Keys are those of token ids,
    by `tokens`, if there is a tokenizer, else of text.
    """

    most: int
    tokens: TokenKeys | None = None
    _numbers: "count[int]" = field(factory=count, init=False)

    async def read(self, scope: Scope, body: bytes) -> ReadRequest:
        """Read a request. What is no request has no keys: its backend refuses it."""
        path = scope["path"]
        body = decoded(body, scope, self.most)
        fields = read_fields(body)
        if self.tokens is None:
            prompt = text_keys(fields, body)
        else:
            prompt = await asyncio.to_thread(self.tokens.read, path, body)
        routed = RoutingRequest(
            id=str(next(self._numbers)),
            keys=prompt.keys,
            tokens=min(prompt.tokens, LARGEST_TOKEN),
            tenant=_key_digest(scope) or fields.whose or caller_of(scope).name,
            session=fields.session,
            output=0 if path == _EMBEDDINGS else fields.output,
        )
        return ReadRequest(routed, fields.previous, fields.model)

    def model_of(self, scope: Scope, body: bytes) -> object:
        """The model that a body requests, of any type."""
        return read_fields(decoded(body, scope, self.most)).model


def _key_digest(scope: Scope) -> str:
    """The digest of the API key that a client sent, or nothing."""
    headers = dict(scope["headers"])
    key = headers.get(b"authorization") or headers.get(b"x-api-key")
    return digest(key).hex()[:_TENANT] if key else ""
