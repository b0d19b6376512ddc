"""The ASGI application: what is served at which path, and who is let in."""

import time
from collections.abc import Sequence
from functools import partial

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
from minfer.effects.serving.bounds import Bounds
from minfer.effects.serving.endpoints import ENDPOINTS, ROUTES
from minfer.effects.serving.errors import ApiError, told_of
from minfer.effects.serving.health import Health
from minfer.effects.serving.intake import Intake
from minfer.effects.serving.keys import read_keys
from minfer.effects.serving.limits import Limits
from minfer.effects.serving.metrics import Metrics
from minfer.effects.serving.openai import errors as openai_errors
from minfer.effects.serving.openai.models import Models
from minfer.effects.serving.protocol import Endpoint
from minfer.effects.serving.stamp import new_stamp
from minfer.effects.serving.transports.http import failure_response
from minfer.effects.serving.transports.transport import Connection


class Application:
    """An AsyncLLM over HTTP, under its `names`; unhealthy after `stall` seconds without a
    step.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        api_key: str = "",
        max_body: int | None = None,
        stall: float = 60.0,
        bounds: Bounds | None = None,
    ) -> None:
        bounds = bounds or Bounds(keys=read_keys([api_key], None))
        limits = Limits.of(llm, max_body)
        self.backend = Backend(llm, limits, bounds)
        self.models = Models(names, int(time.time()), llm.setup.config.max_model_len)
        self.intake = Intake(self.backend, self.models, limits, bounds)
        self.metrics = Metrics(llm, names[0])
        self.health = Health(self.backend, stall)
        errors = (ApiError, HTTPException, Exception)
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(RequireKey, bounds.keys, refusal)],
            exception_handlers=dict.fromkeys(errors, lambda _, error: refusal(error)),
        )
        # A redirect would send clients, and their keys, where their own Host says.
        self.app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)

    def close(self) -> None:
        """End all answers: their clients are told that the server stops."""
        self.intake.close()
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
            Route("/metrics", self._metrics),
            Route("/version", self._version),
        ]

    async def _generate(self, endpoint: Endpoint, connection: Connection) -> None:
        """Read a body, and answer it."""
        try:
            prepared = await self.intake.take(endpoint, connection)
        except ClientDisconnect:
            return  # nobody is there to be told
        except Exception as error:
            told = self.backend.told(error, endpoint.prompt_field, endpoint.path)
            await connection.refuse(endpoint.failure(told))
            return
        stamp = new_stamp(endpoint.id_prefix, prepared.model)
        answer = Answer(self.backend, endpoint, prepared.request, stamp, connection)
        await answer.run()

    async def _models(self, _: Request) -> Response:
        return JSONResponse(self.models.listed())

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self.models.card(request.path_params["name"]))

    async def _health(self, _: Request) -> Response:
        illness = self.health.illness()
        return JSONResponse({"status": illness or "ok"}, 503 if illness else 200)

    # Not async, so that Starlette runs it in a thread: writing metrics out takes a while.
    def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": kind})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": minfer.__version__})


def refusal(error: Exception) -> Response:
    """What a client is told where no endpoint speaks."""
    return failure_response(openai_errors.failure(told_of(error)))
