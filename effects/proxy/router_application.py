"""The ASGI application of a router."""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from attrs import evolve
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minfer.effects.live.errors import EngineDeadError
from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.effects.proxy.attempts import Attempts, no_backend_error, not_placed_error
from minfer.effects.proxy.backend_dispatcher import (
    BackendDispatcher,
    NotPlacedError,
)
from minfer.effects.proxy.backend_models import (
    MODELS_PATH,
    BackendModels,
    ModelList,
    list_models,
)
from minfer.effects.proxy.body import Bodies
from minfer.effects.proxy.denied_bodies import DeniedBodies
from minfer.effects.proxy.disconnects import until_disconnect
from minfer.effects.proxy.forwarding import (
    Answered,
    BackendFailure,
    ClientRequest,
    ForwardingAttempt,
    Outcome,
    open_session,
    pass_on,
)
from minfer.effects.proxy.head import (
    RawHeaders,
    broken_header,
    unreadable_header,
)
from minfer.effects.proxy.health import HealthWatch
from minfer.effects.proxy.homes import Homes
from minfer.effects.proxy.kv_events import ReportedCache
from minfer.effects.proxy.paths import METHODS, ForwardTarget, Way, target_of
from minfer.effects.proxy.prompt_keys import BLOCK_TOKENS
from minfer.effects.proxy.prompt_reader import PromptReader
from minfer.effects.proxy.request_reader import RequestReader
from minfer.effects.proxy.router_metrics import RouterMetrics
from minfer.effects.proxy.router_options import RouterOptions
from minfer.effects.proxy.token_keys import TokenKeys
from minfer.effects.serving.access.api_keys import ApiKeys
from minfer.effects.serving.access.authentication import RequireKey
from minfer.effects.serving.addresses import NOT_ALLOWED
from minfer.effects.serving.application import error_format, refusal
from minfer.effects.serving.client_errors import ApiError, to_api_error
from minfer.effects.serving.request_parsing.limits import largest_body
from minfer.effects.serving.wire.http import failure_response
from minfer.effects.serving.wire.request_ids import RequestIds
from minfer.effects.serving.wire.request_targets import NormalizeTarget
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import Replica, RouterConfig

if TYPE_CHECKING:
    from minfer.effects.proxy.kv_subscriber import KvSubscriber

_NOT_FOUND: Final = 404
_UNAVAILABLE: Final = 503
_log: Final = logging.getLogger("minfer.router")


class RouterApplication:
    """Requests for several servers over HTTP. `open` and `close` are called in the event
    loop that serves it. Raises ConfigError.
    """

    def __init__(self, options: RouterOptions) -> None:
        self.closing = False
        self.live = 0  # requests that wait or are answered
        sources = options.kv_sources
        block_size = options.kv_block_size if sources else BLOCK_TOKENS
        config = RouterConfig(routing_policy_named(options.policy), block_size)
        tokens = None
        if options.model is not None:
            rendering = options.templates, options.parsers
            tokens = TokenKeys(options.model, block_size, *rendering)
        self._caches = {name: ReportedCache(name, block_size) for name in sources}
        self._journal: RoutingJournalFile | None = None
        if options.journal is not None:
            size = options.journal_size
            self._journal = RoutingJournalFile(options.journal, config, size)
        self.dispatcher = BackendDispatcher(
            config,
            cache_blocks=max(1, options.cache_tokens // block_size),
            max_waiting=options.max_waiting,
            journal=self._journal,
            reporting={name: cache.cached for name, cache in self._caches.items()},
        )
        self._options = options
        self._tokens = tokens
        self._bodies = Bodies(options.max_body or largest_body(0))
        self._homes = Homes()
        self._denied_bodies = DeniedBodies(self._bodies)
        self._models = BackendModels(options.backends)
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, set[ForwardingAttempt]] = {}  # by backend
        self.watches: dict[str, HealthWatch] = {}
        app = self._with_routes(options.keys)
        self.app = RequestIds(NormalizeTarget(_CheckMethod(app), refusal))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)

    async def open(self) -> None:
        """Probe all backends, now and from then on."""
        http = self._http = open_session()
        prompts = PromptReader.start(self._tokens, self._options.workers)
        proxies = self._options.proxies
        self._reader = RequestReader(self._bodies.max_bytes, prompts, proxies)
        subscribers = self._subscribers()
        for name in self._options.backends:
            watch = self.watches[name] = HealthWatch(name, http, self.dispatcher)
            self._running[name] = set()
            watch.note_silent = partial(self._give_up, name)
            watch.note_models = partial(self._note_models, name)
            if name in subscribers:
                watch.note_gone = subscribers[name].restart
        watches = [*self.watches.values()]
        self.metrics = RouterMetrics(
            self._options.policy, self.dispatcher, watches, self._journal
        )
        await asyncio.gather(*(watch.probe() for watch in watches))
        coroutines = [watch.run() for watch in watches]
        coroutines += [subscriber.run() for subscriber in subscribers.values()]
        for coroutine in coroutines:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(_log_failure)
            self._tasks.append(task)

    def _give_up(self, name: str) -> None:
        """Move the requests that wait for a silent backend, if others take them."""
        for attempt in tuple(self._running[name]):
            attempt.give_up()

    def _note_models(self, name: str, models: ModelList) -> None:
        """Note a backend's models, and accept bodies that the longest context accepts."""
        self._models.note(name, models)
        if self._options.max_body is None:
            max_bytes = largest_body(self._models.longest_context)
            self._bodies.max_bytes = self._reader.max_bytes = max_bytes

    def _subscribers(self) -> dict[str, "KvSubscriber"]:
        """What follows the events of backends, by their names."""
        if not self._caches:
            return {}
        from minfer.effects.proxy.kv_subscriber import KvSubscriber  # zmq

        return {
            name: KvSubscriber(
                self._options.kv_sources[name],
                cache,
                partial(self.dispatcher.report, name),
            )
            for name, cache in self._caches.items()
        }

    async def close(self) -> None:
        """Close all connections to backends, and the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            self._reader.prompts.pool.close()
            await self._http.close()
        if self._journal is not None:
            self._journal.close()

    def _with_routes(self, keys: ApiKeys) -> Starlette:
        errors = (ApiError, HTTPException, Exception)
        app = Starlette(
            routes=[
                *(Route(path, self._health) for path in ("/health", "/healthz")),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/router", self._status),
                Route("/{path:path}", _Asgi(self._serve), methods=None),
            ],
            middleware=[Middleware(RequireKey, keys, refusal)],
            exception_handlers=dict.fromkeys(
                errors, lambda request, error: refusal(error, request.scope)
            ),
        )
        # A redirect would send clients, and their keys, to whatever their own Host names.
        app.router.redirect_slashes = False
        return app

    # --- the router's own ---------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        ready = bool(self.dispatcher.available()) and not self.closing
        status = "ready" if ready else "no server takes requests"
        return JSONResponse({"status": status}, 200 if ready else _UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": kind})

    async def _status(self, _: Request) -> Response:
        return JSONResponse(self.metrics.status())

    # --- requests for backends ----------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for a backend, until it is answered or its client leaves."""
        self.live += 1
        try:
            if self.closing:
                message = "the router is shutting down"
                raise ApiError(message, None, "shutting_down", _UNAVAILABLE)  # noqa: TRY301 - answered as others are
            if name := broken_header(scope["headers"]):
                message = f"the header {name} has a control character"
                raise ApiError(message)  # noqa: TRY301 - answered as others are
            if name := unreadable_header(scope["headers"]):
                message = f"the header {name} is not in UTF-8"
                raise ApiError(message)  # noqa: TRY301 - answered as others are
            target = target_of(scope["method"], scope["path"], scope["raw_path"])
            body = await self._bodies.read(scope, receive)
            try:
                await until_disconnect(
                    self._answer(
                        target, ClientRequest(scope=scope, send=send, body=body)
                    ),
                    receive,
                )
            finally:
                self._bodies.release(body)
        except ClientDisconnect:
            return
        except (
            ApiError,
            EngineDeadError,
        ) as error:  # the latter as a reader's worker ended
            failure = error_format(scope)(to_api_error(error))
            await failure_response(failure)(scope, receive, send)
        finally:
            self.live -= 1

    async def _answer(self, target: ForwardTarget, request: ClientRequest) -> None:
        """Have a request answered. Raises ApiError."""
        if target.way is Way.POLICY:
            await self._answer_routed(request)
        elif target.way is Way.HOME:
            outcome = await self._forward(request, self._home(target.id))
            if isinstance(outcome, BackendFailure):
                raise outcome.error
        else:
            await self._answer_anywhere(request)

    def _home(self, key: str) -> str:
        """The backend that has a response or request. Raises ApiError."""
        backends = self._options.backends
        backend = backends[0] if len(backends) == 1 else self._homes.find(key)
        if backend is None:
            message = f"the router knows no server that made {key[:128]!r}"
            raise ApiError(message, "id", "not_found", _NOT_FOUND)
        return backend

    async def _answer_anywhere(self, request: ClientRequest) -> None:
        """Pass a request on to a backend with few requests that has its model; if it
        fails, to others. The list of models is that of all backends. Raises ApiError.
        """
        if self._models.differ and request.scope["path"] == MODELS_PATH:
            listed = await self._list_models(request)
            if listed is not None:
                await listed(request.scope, _no_message, request.send)
                return
        attempts = Attempts(await self._allowed(request))
        while candidates := self._untried_backends(attempts):
            name = min(candidates, key=lambda backend: backend.requests).name
            attempts.tried.append(name)
            outcome = await self._forward(request, name, attempts=attempts)
            if not isinstance(outcome, BackendFailure):
                return
            if not attempts.note(outcome):
                break
            if self._untried_backends(attempts):
                self.metrics.note_retry(outcome.cause)
        raise attempts.error

    async def _list_models(self, request: ClientRequest) -> Response | None:
        if self._http is None:
            raise no_backend_error()
        headers = request.scope["headers"]
        listed = await list_models(self._http, self._options.backends, headers)
        return None if listed is None else JSONResponse(listed)

    async def _allowed(self, request: ClientRequest) -> tuple[str, ...] | None:
        """The backends that have the model that a request names; None: all. Raises
        ApiError if none has it.
        """
        if not self._models.differ:
            return None
        path: str = request.scope["path"]
        model = path.removeprefix(f"{MODELS_PATH}/")
        if model == path:
            model = (await self._reader.read(request.scope, request.body)).model
        return self._models.backends_of(model)

    def _untried_backends(self, attempts: Attempts) -> list[Replica]:
        """The backends that take requests, have the model, and were not tried."""
        allowed = attempts.allowed
        return [
            backend
            for backend in self.dispatcher.available()
            if backend.name not in attempts.tried
            and (allowed is None or backend.name in allowed)
        ]

    def _may_move(self, attempts: Attempts) -> bool:
        """Whether a request may go to another backend if the present one is silent."""
        return attempts.may_move and bool(self._untried_backends(attempts))

    async def _answer_routed(self, request: ClientRequest) -> None:
        """Place a request, and if its backend fails, place it elsewhere."""
        read = await self._reader.read(request.scope, request.body)
        allowed = self._models.backends_of(read.model)
        adapter = self._models.adapter(read.model)
        routed = read.routed
        if allowed or adapter:
            routed = evolve(routed, allowed=allowed, adapter=adapter)
        if adapter and self._reader.prompts.tokens is not None:
            # Servers report blocks by keys of token ids, which are those of no adapter.
            routed = evolve(routed, keys=())
        await self._denied_bodies.check(routed.tenant, request)
        request = self._denied_bodies.watch(routed.tenant, request)
        home = self._home_of_previous(read.previous)
        try:
            if home is None:
                name: str | None = await self.dispatcher.place(routed, read.user)
            else:
                self.dispatcher.send_to(home, routed)
                name = home
            attempts = Attempts(allowed)
            while name is not None:
                attempts.tried.append(name)
                movable = attempts if home is None else None
                outcome = await self._forward(request, name, routed.id, movable)
                if isinstance(outcome, Answered):
                    return
                may_retry = attempts.note(outcome) and home is None
                tried = attempts.tried
                name = self.dispatcher.move(routed, tried) if may_retry else None
                if name is not None:
                    self.metrics.note_retry(outcome.cause)
            refused = attempts.refused
            if refused is None:
                raise attempts.error
            self.metrics.note_answer(refused.name, refused.status)
            await pass_on(refused, request.send)
        except NotPlacedError as error:
            raise not_placed_error(error) from None
        finally:
            self.dispatcher.end(routed.id)

    def _home_of_previous(self, previous: str) -> str | None:
        """The backend that has the response which a request continues, if that is known:
        no other one can serve it. Raises ApiError.
        """
        home = self._homes.find(previous) if previous else None
        if home is not None and home not in self.dispatcher.state.replicas:
            message = f"the server that has {previous!r} cannot be reached now"
            raise ApiError(message, "previous_response_id", "no_backend", _UNAVAILABLE)
        return home

    async def _forward(
        self,
        request: ClientRequest,
        name: str,
        routed: str | None = None,
        attempts: Attempts | None = None,
    ) -> Outcome:
        """Forward a request to a backend. With `routed`, its id in the dispatcher, it
        starts with the first part of the answer, and the backend may refuse it. With
        `attempts`, another backend may be tried after this one.
        """
        if self._http is None:
            raise no_backend_error()
        attempt = ForwardingAttempt(
            self._http, request, name, self._options.backend_timeout
        )
        if attempts is not None:
            attempt.may_move = partial(self._may_move, attempts)
        first = partial(self._note_first, name, routed)
        self._running[name].add(attempt)
        try:
            outcome = await attempt.run(first, may_refuse=routed is not None)
        finally:
            self._running[name].discard(attempt)
        if isinstance(outcome, BackendFailure):
            self.watches[name].note_failure(refused=outcome.refused)
        elif isinstance(outcome, Answered) and outcome.broken:
            self.metrics.broken += 1
            self.watches[name].note_failure(refused=False)
        return outcome

    def _note_first(
        self,
        name: str,
        routed: str | None,
        status: int,
        headers: RawHeaders,
        chunk: bytes,
    ) -> None:
        self.metrics.note_answer(name, status)
        if routed is not None:
            self.dispatcher.start(routed)
            self._homes.note(name, headers, chunk)


async def _no_message() -> Message:
    """The `receive` of the router's own responses, which read no message."""
    raise AssertionError("a response reads nothing")


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Log the error by which a task ended that should not end."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the router no longer follows a server", exc_info=error)


class _CheckMethod:
    """Middleware that refuses methods which are never forwarded with 405."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http" or scope["method"] in METHODS:
            await self._app(scope, receive, send)
            return
        error = HTTPException(NOT_ALLOWED, headers={"Allow": ", ".join(METHODS)})
        await refusal(error, scope)(scope, receive, send)


class _Asgi:
    """An ASGI application for a route: Starlette calls functions with a Request."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)
