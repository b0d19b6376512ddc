"""The tables: which endpoints there are, and over what each of them can be reached.

A protocol is one more module with an `Endpoint` and a row here, as OpenAI's responses
(`openai/responses.py`) and Anthropic's messages (`anthropic/messages.py`) would be; a
transport is one more module with a `RouteMaker` and a row, as a WebSocket would be.
"""

from typing import Final

from minfer.effects.serving.openai import chat, completions
from minfer.effects.serving.protocol import Endpoint
from minfer.effects.serving.transports.post import post_route
from minfer.effects.serving.transports.transport import RouteMaker

ENDPOINTS: Final[tuple[Endpoint, ...]] = (completions.ENDPOINT, chat.ENDPOINT)
ROUTES: Final[tuple[RouteMaker, ...]] = (post_route,)
