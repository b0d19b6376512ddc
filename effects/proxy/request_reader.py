"""Reads what the router needs of a request: prompt, tenant, session, length."""

from itertools import count
from typing import Final

from attrs import define, field, frozen
from starlette.types import Scope

from minfer.effects.proxy.prompt_bodies import prompt_body
from minfer.effects.proxy.prompt_reader import PromptReader
from minfer.effects.proxy.tenants import TrustedProxies, tenant_of
from minfer.routing.messages import RoutingRequest
from minfer.values.checks import LARGEST_TOKEN

_EMBEDDINGS_PATH: Final = "/v1/embeddings"  # which have no output tokens


@frozen
class ReadRequest:
    """A request as the router sees it; its user, and the response that it continues, if
    any.
    """

    routed: RoutingRequest
    user: str = ""  # within its tenant
    previous: str = ""
    model: str = ""  # that is requested


@define(eq=False)
class RequestReader:
    """Reads bodies of up to `max_bytes`, once decompressed."""

    max_bytes: int
    prompts: PromptReader
    proxies: TrustedProxies = field(factory=TrustedProxies)
    _numbers: "count[int]" = field(factory=count, init=False)

    async def read(self, scope: Scope, body: bytes) -> ReadRequest:
        """Read a request. Raises ApiError."""
        path = scope["path"]
        tenant = tenant_of(scope, self.proxies)
        prompt = await self.prompts.read(prompt_body(scope, body, self.max_bytes), tenant)
        routed = RoutingRequest(
            id=str(next(self._numbers)),
            keys=prompt.keys,
            tokens=min(prompt.tokens, LARGEST_TOKEN),
            tenant=tenant,
            session=prompt.session,
            output=0 if path == _EMBEDDINGS_PATH else prompt.output,
        )
        return ReadRequest(routed, prompt.user, prompt.previous, prompt.model)
