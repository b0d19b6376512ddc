"""The ASGI application: what is served at which path, and who is let in."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import minfer
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.answer import Answer
from minfer.effects.serving.authentication import RequireKey
from minfer.effects.serving.backend import Backend
from minfer.effects.serving.endpoints import ENDPOINTS, ROUTES
from minfer.effects.serving.errors import ApiError, told_of
from minfer.effects.serving.health import Health
from minfer.effects.serving.live_view import LiveView
from minfer.effects.serving.metrics import Metrics
from minfer.effects.serving.openai import errors as openai_errors
from minfer.effects.serving.openai.models import Models
from minfer.effects.serving.page.files import page_routes
from minfer.effects.serving.protocol import Endpoint
from minfer.effects.serving.stamp import new_stamp
from minfer.effects.serving.transports.http import failure_response
from minfer.effects.serving.transports.transport import Connection

LONG: Final = 4096  # bytes of a body whose prompts are prepared in a thread


class Application:
    """An AsyncLLM over HTTP, under its `names`; unhealthy after `stall` seconds without a
    step.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        api_key: str = "",
        max_body: int = 2**22,
        stall: float = 60.0,
    ) -> None:
        self.backend = Backend(llm)
        self.max_body = max_body  # bytes
        config = llm.setup.config
        chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        self.models = Models(names, int(time.time()), config.max_model_len, chat)
        self.metrics = Metrics(llm, names[0])
        self.health = Health(self.backend, stall)
        backend, illness = self.backend, self.health.illness
        self.live = LiveView(llm.client, config, illness, lambda: backend.closing)
        errors = (ApiError, HTTPException, Exception)
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(RequireKey, api_key, refusal)],
            exception_handlers=dict.fromkeys(errors, lambda _, error: refusal(error)),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)

    def close(self) -> None:
        """End all answers: their clients are told that the server stops."""
        self.backend.close()

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            *(
                route(endpoint.path, partial(self._generate, endpoint))
                for endpoint in ENDPOINTS
                for route in ROUTES
            ),
            *(Route(path, self._health) for path in ("/health", "/healthz")),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/live", self.live.serve),
            *page_routes(),
        ]

    async def _generate(self, endpoint: Endpoint, connection: Connection) -> None:
        """Read a body, and answer it."""
        try:
            data = await connection.read(self.max_body)
            inquiry = endpoint.read(data)
            model = self.models.named(inquiry.model)
        except ClientDisconnect:
            return  # nobody is there to be told
        except ApiError as error:
            await connection.refuse(endpoint.failure(error))
            return
        stamp = new_stamp(endpoint.id_prefix, model)
        answer = Answer(self.backend, endpoint, inquiry, stamp, connection)
        await answer.run(long=len(data) > LONG)

    async def _models(self, _: Request) -> Response:
        return JSONResponse(self.models.listed())

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self.models.card(request.path_params["name"]))

    async def _health(self, _: Request) -> Response:
        illness = self.health.illness()
        return JSONResponse({"status": illness or "ok"}, 503 if illness else 200)

    async def _ready(self, _: Request) -> Response:
        why = self.health.unreadiness()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    # Not async, so that Starlette runs it in a thread: writing metrics out takes a while.
    def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": kind})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": minfer.__version__})


def refusal(error: Exception) -> Response:
    """What a client is told where no endpoint speaks."""
    return failure_response(openai_errors.failure(told_of(error)))
