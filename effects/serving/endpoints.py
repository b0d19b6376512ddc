"""The tables of endpoints, and of the transports that reach each of them.

A protocol is one more module with an `Endpoint` and a row here, a question one with a
`QueryEndpoint`; a transport is one more module with a `RouteMaker` and a row. The
WebSocket (`wire/websocket.py`) is no row: one path of its own reaches all endpoints.
"""

from typing import Final

from minfer.effects.serving.anthropic import count_tokens, create_message
from minfer.effects.serving.openai import (
    chat_completions,
    completions,
    embeddings,
    responses,
)
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.tokens import detokenize, tokenize
from minfer.effects.serving.wire.post import post_route
from minfer.effects.serving.wire.transport import RouteMaker

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    completions.ENDPOINT,
    chat_completions.ENDPOINT,
    responses.ENDPOINT,
    embeddings.ENDPOINT,
    create_message.ENDPOINT,
)
QUERY_ENDPOINTS: Final[tuple[QueryEndpoint, ...]] = (
    count_tokens.QUERY_ENDPOINT,
    tokenize.QUERY_ENDPOINT,
    detokenize.QUERY_ENDPOINT,
)
ROUTES: Final[tuple[RouteMaker, ...]] = (post_route,)
