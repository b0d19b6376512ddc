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
from starlette.types import Message, Receive, Scope, Send

from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.effects.serving.access.api_keys import Keys
from minfer.effects.serving.access.authentication import RequireKey
from minfer.effects.serving.application import error_format, refusal
from minfer.effects.serving.client_errors import ApiError, to_api_error
from minfer.effects.serving.router.backend_models import (
    MODELS_PATH,
    BackendModels,
    list_models,
)
from minfer.effects.serving.router.body import Bodies
from minfer.effects.serving.router.disconnects import until_disconnect
from minfer.effects.serving.router.dispatcher import Dispatcher, no_backend
from minfer.effects.serving.router.forwarding import (
    DISCONNECTED,
    Answered,
    ClientRequest,
    Exchange,
    Failed,
    Outcome,
    Refused,
    open_session,
    pass_on,
)
from minfer.effects.serving.router.head import RawHeaders, broken_header
from minfer.effects.serving.router.health import HealthWatch
from minfer.effects.serving.router.homes import Homes
from minfer.effects.serving.router.kv_events import ReportedCache
from minfer.effects.serving.router.paths import Target, Way, target_of
from minfer.effects.serving.router.prompt_keys import BLOCK_TOKENS
from minfer.effects.serving.router.request_reader import RequestReader
from minfer.effects.serving.router.router_metrics import RouterMetrics
from minfer.effects.serving.router.router_options import RouterOptions
from minfer.effects.serving.router.token_keys import TokenKeys
from minfer.effects.serving.wire.http import failure_response
from minfer.effects.serving.wire.request_ids import RequestIds
from minfer.effects.serving.wire.request_targets import NormalizeTarget
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig

if TYPE_CHECKING:
    from minfer.effects.serving.router.kv_subscriber import KvSubscriber

_NOT_FOUND: Final = 404
_UNAVAILABLE: Final = 503
# Connections that may end over a request before it is given up: it may be what kills
# servers, and is not to kill them all.
_MOST_ENDED: Final = 2
_log: Final = logging.getLogger("minfer.router")


class Router:
    """Requests for several servers over HTTP. `open` and `close` are called in the event
    loop that serves it. Raises ConfigError.
    """

    def __init__(self, options: RouterOptions) -> None:
        self.closing = False
        self.live = 0  # requests that wait or are answered
        sources = options.kv_sources
        block = options.kv_block_size if sources else BLOCK_TOKENS
        config = RouterConfig(routing_policy_named(options.policy), block)
        tokens = TokenKeys(options.model, block) if options.model is not None else None
        self._caches = {name: ReportedCache(name, block) for name in sources}
        self._journal: RoutingJournalFile | None = None
        if options.journal is not None:
            size = options.journal_size
            self._journal = RoutingJournalFile(options.journal, config, size)
        self.dispatcher = Dispatcher(
            config,
            cache_blocks=max(1, options.cache_tokens // block),
            most_waiting=options.max_waiting,
            journal=self._journal,
            reporting={name: cache.cached for name, cache in self._caches.items()},
        )
        self._options = options
        self._bodies = Bodies(options.max_body)
        self._homes = Homes()
        self._models = BackendModels()
        self._reader = RequestReader(options.max_body, tokens)
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None
        self.watches: dict[str, HealthWatch] = {}
        app = self._with_routes(options.keys)
        self.app = RequestIds(NormalizeTarget(app, refusal))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)

    async def open(self) -> None:
        """Ask all backends how they are, and go on asking them."""
        http = self._http = open_session(self._options.patience)
        subscribers = self._subscribers()
        for name in self._options.backends:
            watch = self.watches[name] = HealthWatch(
                name, http, self.dispatcher, models=self._models
            )
            if name in subscribers:
                watch.note_gone = subscribers[name].restart
        watches = [*self.watches.values()]
        self.metrics = RouterMetrics(
            self._options.policy, self.dispatcher, watches, self._journal
        )
        await asyncio.gather(*(watch.ask() for watch in watches))
        running = [one.run() for one in watches]
        running += [one.run() for one in subscribers.values()]
        for one in running:
            task = asyncio.create_task(one)
            task.add_done_callback(_log_failure)
            self._tasks.append(task)

    def _subscribers(self) -> dict[str, "KvSubscriber"]:
        """What follows the events of backends, by their names."""
        if not self._caches:
            return {}
        from minfer.effects.serving.router.kv_subscriber import KvSubscriber  # zmq

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
            await self._http.close()
        if self._journal is not None:
            self._journal.close()

    def _with_routes(self, keys: Keys) -> Starlette:
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
                why = "the router is shutting down"
                raise ApiError(why, None, "shutting_down", _UNAVAILABLE)  # noqa: TRY301 - answered as others are
            if name := broken_header(scope["headers"]):
                why = f"the header {name} has a control character"
                raise ApiError(why)  # noqa: TRY301 - answered as others are
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
        except ApiError as error:
            failure = error_format(scope)(to_api_error(error))
            await failure_response(failure)(scope, receive, send)
        finally:
            self.live -= 1

    async def _answer(self, target: Target, request: ClientRequest) -> None:
        """Have a request answered. Raises ApiError."""
        if target.way is Way.POLICY:
            await self._answer_routed(request)
        elif target.way is Way.HOME:
            await self._try_in_turn(request, [self._home(target.id)])
        else:
            await self._answer_anywhere(request)

    async def _answer_anywhere(self, request: ClientRequest) -> None:
        """Have any backend answer that has the requested model. The list of models is
        that of all backends. Raises ApiError.
        """
        free = sorted(self.dispatcher.available(), key=lambda one: one.requests)
        names = [one.name for one in free]
        path = request.scope["path"]
        if self._models.differ and path == MODELS_PATH and self._http is not None:
            listed = await list_models(
                self._http, self._options.backends, request.scope["headers"]
            )
            if listed is not None:
                response = JSONResponse(listed)
                await response(request.scope, _no_message, request.send)
                return
        if self._models.differ:
            model: object = path.removeprefix(f"{MODELS_PATH}/")
            if model == path:
                model = self._reader.model_of(request.scope, request.body)
            allowed = self._models.backends_of(model)
            names = [name for name in names if allowed is None or name in allowed]
        await self._try_in_turn(request, names)

    def _home(self, key: str) -> str:
        """The backend that has a response or request. Raises ApiError."""
        backends = self._options.backends
        found = backends[0] if len(backends) == 1 else self._homes.find(key)
        if found is None:
            why = f"the router knows no server that made {key[:128]!r}"
            raise ApiError(why, "id", "not_found", _NOT_FOUND)
        return found

    async def _try_in_turn(self, request: ClientRequest, names: list[str]) -> None:
        """Pass a request on to the first of these backends that answers."""
        failed: Failed | None = None
        for name in names:
            if failed is not None:
                self.metrics.note_retry(failed.cause)
            outcome = await self._attempt(request, name)
            if not isinstance(outcome, Failed):
                return
            failed = outcome
            if not failed.again:
                break
        raise no_backend() if failed is None else failed.error

    async def _answer_routed(self, request: ClientRequest) -> None:
        """Place a request, and if its backend fails, place it elsewhere."""
        read = await self._reader.read(request.scope, request.body)
        allowed = self._models.backends_of(read.model)
        routed = evolve(read.routed, allowed=allowed)
        home = self._home_of_previous(read.previous)
        try:
            if home is None:
                name: str | None = await self.dispatcher.place(routed)
            else:
                self.dispatcher.send_to(home, routed)
                name = home
            tried = list[str]()
            refused, error, ended = None, no_backend(), 0
            while name is not None:
                tried.append(name)
                outcome = await self._attempt(
                    request, name, routed.id, may_refuse=refused is None
                )
                if isinstance(outcome, Answered):
                    return
                if isinstance(outcome, Refused):
                    refused, cause, again = outcome, "refused", True
                else:
                    cause, again, error = outcome.cause, outcome.again, outcome.error
                ended += cause == DISCONNECTED
                again = again and home is None and ended < _MOST_ENDED
                name = self.dispatcher.elsewhere(routed, tried) if again else None
                if name is not None:
                    self.metrics.note_retry(cause)
            if refused is None:
                raise error
            await pass_on(refused, request.send)
        finally:
            self.dispatcher.end(routed.id)

    def _home_of_previous(self, previous: str) -> str | None:
        """The backend that has the response which a request continues, if that is known:
        no other one can serve it. Raises ApiError.
        """
        home = self._homes.find(previous) if previous else None
        if home is not None and home not in self.dispatcher.state.replicas:
            why = f"the server that has {previous!r} cannot be reached now"
            raise ApiError(why, "previous_response_id", "no_backend", _UNAVAILABLE)
        return home

    async def _attempt(
        self,
        request: ClientRequest,
        name: str,
        routed: str | None = None,
        *,
        may_refuse: bool = False,
    ) -> Outcome:
        """Try one backend; what is `routed` starts with its first part."""
        if self._http is None:
            raise no_backend()
        exchange = Exchange(self._http, request, name)
        first = partial(self._note_first, name, routed)
        outcome = await exchange.run(first, may_refuse=may_refuse)
        if isinstance(outcome, Failed):
            self.watches[name].failed(refused=outcome.refused)
        elif isinstance(outcome, Answered) and outcome.broken:
            self.metrics.broken += 1
            self.watches[name].failed(refused=False)
        return outcome

    def _note_first(
        self, name: str, routed: str | None, status: int, headers: RawHeaders, part: bytes
    ) -> None:
        self.metrics.note_answer(name, status)
        if routed is not None:
            self.dispatcher.start(routed)
            self._homes.note(name, headers, part)


async def _no_message() -> Message:
    """Returns no message: a response of its own reads none."""
    raise AssertionError("a response reads nothing")


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Log the error by which a task ended that should not end."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the router no longer follows a server", exc_info=error)


class _Asgi:
    """An ASGI application for a route: Starlette calls functions with a Request."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)
