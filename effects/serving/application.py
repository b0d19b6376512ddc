"""The ASGI application: routes, and the checks before them."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import minfer
from minfer.effects.cluster.link.link_messages import RequestQuery
from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, read_keys
from minfer.effects.serving.access.authentication import RequireKey, caller_of, key_name
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.adapters.named_adapters import NamedAdapters
from minfer.effects.serving.adapters.updates import AdapterUpdates
from minfer.effects.serving.addresses import (
    NOT_ALLOWED,
    NOT_FOUND,
    suggest_address,
    wrong_address,
    wrong_method,
)
from minfer.effects.serving.answer_task import AnswerTask
from minfer.effects.serving.anthropic import error_format as anthropic_errors
from minfer.effects.serving.anthropic import models as anthropic_models
from minfer.effects.serving.anthropic.models import speaks_anthropic
from minfer.effects.serving.client_errors import ApiError, to_api_error
from minfer.effects.serving.description import description
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS, ROUTES
from minfer.effects.serving.observability.health import Health
from minfer.effects.serving.observability.live_view import LiveView
from minfer.effects.serving.observability.metrics import Metrics
from minfer.effects.serving.observability.records import MAX_ENDED_ANSWERS, AnswerRecords
from minfer.effects.serving.observability.request_lookup import RequestLookup
from minfer.effects.serving.observability.spans import begin
from minfer.effects.serving.page.files import page_routes
from minfer.effects.serving.page.icon import icon_route
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.request_parsing.limits import Limits
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.serving.request_receiver import RequestReceiver
from minfer.effects.serving.server_state import ServerState
from minfer.effects.serving.tokens.tokenizer_info import OPTION, tokenizer_info
from minfer.effects.serving.wire import error_form as openai_errors
from minfer.effects.serving.wire.http import failure_response
from minfer.effects.serving.wire.origins import is_cross_origin
from minfer.effects.serving.wire.request_ids import MAX_ID_CHARS, RequestIds
from minfer.effects.serving.wire.request_targets import NormalizeTarget
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.effects.serving.wire.stamp import new_stamp
from minfer.effects.serving.wire.transport import Connection, Failure, StreamEvent
from minfer.effects.serving.wire.websocket import socket_route
from minfer.effects.setup.folders import bundled_folder


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
        bounds: ServerBounds | None = None,
        shared: SharedCounts | None = None,
    ) -> None:
        bounds = bounds or ServerBounds(keys=read_keys([api_key], None))
        llm.reasoning_key = bounds.reasoning_key
        llm.refuses_hosted_tools = bounds.refuse_hosted_tools
        limits = Limits.of(llm, max_body)
        self.state = ServerState(llm, limits, bounds)
        chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        bundled = llm.setup.folder == bundled_folder()
        takes_adapters = llm.adapters is not None
        self.models = Models(
            names, int(time.time()), limits.context, chat, bundled, takes_adapters
        )
        self.adapters: NamedAdapters | None = None
        if llm.adapters is not None:
            sources = bounds.adapter_sources
            self.adapters = NamedAdapters(llm.adapters, llm.client, sources, tuple(names))
        self.receiver = RequestReceiver(
            self.state, self.models, limits, bounds, self.adapters
        )
        self.metrics = Metrics(llm, names[0], vllm_names=bounds.vllm_metrics)
        self.records = AnswerRecords(llm)
        self.lookup = RequestLookup(self.records)
        self.health = Health(self.state, stall)
        self._tenants = bounds.tenants
        self._has_tokenizer_info = bounds.tokenizer_info
        state, health_error = self.state, self.health.health_error
        self.live = LiveView(
            llm.client,
            llm.setup.config,
            health_error,
            lambda: state.closing,
            (shared or SharedCounts()).viewers,
        )
        app = self._with_routes(bounds.keys)
        self.app = RequestIds(NormalizeTarget(app, refusal))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)

    def close(self) -> None:
        """End all answers; clients are notified that the server stops."""
        self.receiver.close()
        if self.adapters is not None:
            self.adapters.close()
        self.state.close()

    def _with_routes(self, keys: ApiKeys) -> Starlette:
        """The application that checks keys, routes requests and formats errors."""
        errors = (ApiError, HTTPException, Exception)
        app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(RequireKey, keys, refusal)],
            exception_handlers=dict.fromkeys(
                errors, lambda request, error: refusal(error, request.scope)
            ),
        )
        # A redirect would send clients, and their keys, to whatever their own Host names.
        app.router.redirect_slashes = False
        return app

    def _routes(self) -> list[BaseRoute]:
        serve = {
            endpoint.name: partial(self._generate, endpoint) for endpoint in ENDPOINTS
        }
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            *(
                route(endpoint.path, serve[endpoint.name])
                for endpoint in ENDPOINTS
                for route in ROUTES
            ),
            *(
                route(endpoint.path, partial(self._answer_query, endpoint))
                for endpoint in QUERY_ENDPOINTS
                for route in ROUTES
            ),
            *AdapterUpdates(self.state, self.adapters).routes(),
            socket_route("/v1/stream", serve),
            Route("/v1/requests/{name:path}", self._request, methods=["GET", "DELETE"]),
            Route("/reset_prefix_cache", self._reset, methods=["POST"]),
            *(Route(path, self._health) for path in ("/health", "/healthz")),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/live", self.live.serve),
            *page_routes(),
            icon_route(),
            Route("/openapi.json", self._description),
        ]

    async def _generate(self, endpoint: Endpoint, connection: Connection) -> None:
        """Read a body, and answer it."""
        span = begin(connection.scope)
        try:
            prepared = await self.receiver.receive(endpoint, connection)
        except ClientDisconnect:
            return  # the client has disconnected
        except Exception as error:
            failure = self.state.api_error(error, endpoint.prompt_field, endpoint.path)
            await connection.refuse(endpoint.failure(failure))
            if span is not None:
                span.refuse(endpoint, failure.code or str(failure.status))
            return
        stamp = new_stamp(endpoint.id_prefix, prepared.model)
        owner = key_name(connection.scope)
        request = prepared.request
        chosen_id = request.chosen_id or connection.chosen_id
        self.records.begin(stamp, endpoint.path, chosen_id, owner)
        try:
            answer = AnswerTask(self.state, endpoint, request, stamp, connection)
            await answer.run()
        finally:
            self.records.close(stamp.id)
            if span is not None:
                record = self.records.find(stamp.id, owner)
                span.end(endpoint, stamp, request, record)

    async def _answer_query(self, query: QueryEndpoint, connection: Connection) -> None:
        """Read a question, and answer it."""
        try:
            answer = await self.receiver.answer_query(query, connection)
        except ClientDisconnect:
            return
        except Exception as error:
            failure = self.state.api_error(error, query.prompt_field, query.path)
            await connection.refuse(query.failure(failure))
            return
        transport = connection.transport(stream=False, name="", ignored=answer.ignored)
        await transport.write([StreamEvent(answer.json)], last=True)

    def _visible_adapters(self, scope: Scope) -> list[AdapterEntry]:
        """The adapters that a client may use, of those that are loaded."""
        key = caller_of(scope).key
        return [] if self.adapters is None else self.adapters.visible(key)

    async def _models(self, request: Request) -> Response:
        adapters = self._visible_adapters(request.scope)
        if speaks_anthropic(request.scope):
            return JSONResponse(anthropic_models.list_json(self.models, adapters))
        return JSONResponse(self.models.list_json(adapters))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        adapters = self._visible_adapters(request.scope)
        entry = next((entry for entry in adapters if entry.name == name), None)
        anthropic = speaks_anthropic(request.scope)
        if entry is not None:
            if anthropic:
                return JSONResponse(anthropic_models.adapter_card(self.models, entry))
            return JSONResponse(self.models.adapter_card(entry))
        self.models.check_name(name, adapters)
        if anthropic:
            return JSONResponse(anthropic_models.card(self.models, name))
        return JSONResponse(self.models.card(name))

    async def _request(self, request: Request) -> Response:
        name = request.path_params["name"]
        cancel = request.method == "DELETE"
        if cancel and is_cross_origin(request.scope):
            raise ApiError("a page of another address may not do this", status=403)
        query = RequestQuery(name, key_name(request.scope), cancel)
        record = await self.lookup.find(query)
        if record is None:
            message = f"nothing is known of a request {name[:MAX_ID_CHARS]!r}"
            remembered = f"the last {MAX_ENDED_ANSWERS} are remembered"
            raise ApiError(f"{message}; {remembered}", "id", "request_not_found", 404)
        return JSONResponse(record)

    async def _reset(self, request: Request) -> Response:
        if is_cross_origin(request.scope):
            raise ApiError("a page of another address may not do this", status=403)
        key = caller_of(request.scope).key
        if key is not None and not key.admin:
            await run_in_threadpool(self._reset_tenant, key)
            return JSONResponse({"success": True})
        llm = self.state.llm
        try:
            llm.client.reset_cache()  # links are the event loop's
            await run_in_threadpool(llm.note_reset)  # a disk may take a while
        except EngineDeadError as error:
            raise to_api_error(error) from None
        except OSError as error:
            raise _reset_error(error) from None
        return JSONResponse({"success": True})

    def _reset_tenant(self, key: ApiKey) -> None:
        """Make all cached blocks of a key's tenant unfindable. Raises ApiError."""
        if not self._tenants.separate:
            reason = (
                "all tenants share the prefix cache; only a key with admin = true may"
            )
            raise ApiError(f"{reason} reset it", None, "not_allowed", 403)
        try:
            self._tenants.reset(key)
        except OSError as error:
            raise _reset_error(error) from None

    async def _health(self, _: Request) -> Response:
        health_error = self.health.health_error()
        body = {"status": health_error or "ok", **self.health.replicas()}
        return JSONResponse(body, 503 if health_error else 200)

    async def _ready(self, _: Request) -> Response:
        reason = self.health.unready_reason()
        model = self.models.names[0]
        names = {"model": model, "models": [*self.models.names]}
        body = {"status": reason or "ready", **names, **self.health.figures()}
        return JSONResponse(body, 503 if reason else 200)

    # Not async, so that Starlette runs it in a thread: writing metrics out takes a while.
    def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": kind})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": minfer.__version__})

    def _tokenizer_info(self, _: Request) -> Response:
        tokenizer = self.state.llm.tokenizer
        if not self._has_tokenizer_info or tokenizer is None:
            message = f"this server has no /tokenizer_info; start it with {OPTION}"
            raise ApiError(message, None, "not_found", NOT_FOUND)
        return JSONResponse(tokenizer_info(tokenizer, self.state.llm.setup.folder))

    def _description(self, _: Request) -> Response:
        return JSONResponse(description())


def _reset_error(error: OSError) -> ApiError:
    """The error of a reset that cannot be noted in the folder of blocks on disk."""
    return ApiError(f"the reset cannot be written to the disk: {error}", status=503)


def refusal(error: Exception, scope: Scope) -> Response:
    """The response for an error outside of an endpoint, in the client's protocol."""
    path = scope["path"]
    failure = to_api_error(error)
    headers = getattr(error, "headers", None) or {}
    if isinstance(error, HTTPException):  # of the routes: all else here has other errors
        if error.status_code == NOT_FOUND:
            failure = wrong_address(scope["method"], path)
        elif error.status_code == NOT_ALLOWED:
            failure = wrong_method(scope["method"], path, headers["Allow"])
    response = failure_response(error_format(scope)(failure))
    response.headers.update(headers)
    return response


def error_format(scope: Scope) -> Callable[[ApiError], Failure]:
    """The function that formats errors for a client: of the endpoint at the path, of one
    above it, or of the path that was probably meant; Anthropic's, if a header of that
    protocol is there; or else OpenAI's.
    """
    path = scope["path"]
    suggestion = suggest_address(path)
    paths = (
        [path, suggestion.path]
        if suggestion is not None and suggestion.rebased
        else [path]
    )
    endpoints: list[Endpoint | QueryEndpoint] = [*ENDPOINTS, *QUERY_ENDPOINTS]
    for endpoint in endpoints:
        if any(f"{path}/".startswith(f"{endpoint.path}/") for path in paths):
            return endpoint.failure
    if speaks_anthropic(scope):
        return anthropic_errors.failure
    return openai_errors.failure
