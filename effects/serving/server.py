"""`minfer serve`: a socket, a model behind an application, and what ends it."""

import argparse
import contextlib
import logging
import signal
import socket
from pathlib import Path
from typing import Any, Final

import attrs
import uvicorn

from minfer.config import ConfigError
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.application import Application
from minfer.effects.setup.options import EngineArgs, engine_args

DRAIN: Final = 5  # seconds that answers have to end when the server does
_OPEN: Final = ("/health", "/healthz", "/metrics")  # what needs no key
_STOPS: Final = "the server is shutting down"
# Errors that clients are told of as they are, with code and status.
_TOLD: Final[dict[type[Exception], tuple[str | None, int]]] = {
    edge.RequestError: (None, 400),
    edge.TooLongError: ("context_length_exceeded", 400),
    edge.OverloadedError: ("overloaded", 503),
    EngineDeadError: ("engine_dead", 503),
    ParameterError: (None, 400),
    ChatTemplateError: (None, 400),
}


def refusal(error: Exception, where: str | None = None) -> JSONResponse:
    """What a client is told about an error; `where` is the field that its
    prompt is in.
    """
    if isinstance(error, HTTPException):
        error = ApiError(error.detail, status=error.status_code)
    if not isinstance(error, ApiError):
        code, status = _TOLD.get(type(error), (None, 500))
        said = str(error) if type(error) in _TOLD else "internal error"
        param = (getattr(error, "param", None) or where) if status == 400 else None
        error = ApiError(said, param, code, status)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about = {
        "message": str(error),
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    headers = {"Retry-After": "1"} if error.code == "overloaded" else None
    return JSONResponse({"error": about}, error.status, headers)


class Service:
    """An ASGI application: an AsyncLLM over HTTP. After `stall` s without a step it is
    broken.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        api_key: str = "",
        max_body: int = 2**22,
        stall: float = 60.0,
    ) -> None:
        self.llm, self.names, self.max_body, self.stall = llm, names, max_body, stall
        self.key = f"Bearer {api_key}".encode() if api_key else b""
        self.metrics = metrics.Metrics(llm, names[0])
        self.made = int(time.time())
        self.pool = ThreadPoolExecutor(2, "minfer-edge")
        self.closing = False
        told = (ApiError, HTTPException, ClientDisconnect, Exception)
        routes = [
            Route("/v1/models", self._model),
            Route("/v1/models/{name:path}", self._model),
            Route(
                "/v1/completions", partial(self._generate, Completion), methods=["POST"]
            ),
            Route(
                "/v1/chat/completions", partial(self._generate, Chat), methods=["POST"]
            ),
            *(Route(path, self._health) for path in ("/health", "/healthz")),
            Route("/metrics", self._metrics),
            Route("/version", lambda _: JSONResponse({"version": minfer.__version__})),
        ]
        refuse = dict.fromkeys(told, lambda _, error: refusal(error))
        self.app = Starlette(routes=routes, exception_handlers=refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        known = (
            scope["path"] in _OPEN or not self.key or hmac.compare_digest(given, self.key)
        )
        error = ApiError("the API key is missing or wrong", None, "invalid_api_key", 401)
        await (self.app if known else refusal(error))(scope, receive, send)

    def close(self) -> None:
        """End all answers: their clients are told that the server stops."""
        self.closing = True
        self.llm.front.abandon(EngineDeadError(_STOPS))

    async def _health(self, _: Request) -> Response:
        engine = self.llm.client.snapshot()
        ill = ""
        if self.closing:
            ill = _STOPS
        elif engine.dead:
            ill = f"the engine broke: {engine.dead}"
        elif engine.stalled > self.stall:
            ill = f"requests wait, and no step for {engine.stalled:.0f} s"
        return JSONResponse({"status": ill or "ok"}, 503 if ill else 200)

    def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": kind})

    async def _model(self, request: Request) -> Response:
        name, cards = request.path_params.get("name"), [*map(self._card, self.names)]
        return JSONResponse(
            {"object": "list", "data": cards} if name is None else self._card(name)
        )

    def _card(self, name: str) -> dict[str, Any]:
        if name not in self.names:
            why = (
                f"there is no model {name[:200]!r} here; there is {', '.join(self.names)}"
            )
            raise ApiError(why, "model", "model_not_found", 404)
        about = {
            "id": name,
            "object": "model",
            "created": self.made,
            "owned_by": "minfer",
        }
        return {**about, "max_model_len": self.llm.setup.config.max_model_len}

    async def _generate(
        self, kind: type[Chat] | type[Completion], request: Request
    ) -> Any:
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError("send the body as Content-Type: application/json", status=415)
        data, size = bytearray(), int(request.headers.get("content-length", "0"))
        parts = request.stream()
        while size <= self.max_body and (part := await anext(parts, b"")):
            data += part
            size = max(size, len(data))
        if (
            size > self.max_body
        ):  # uvicorn drops the rest, so that the client gets to read this
            raise ApiError(f"the body has more than {self.max_body} bytes", status=413)
        body = kind.read(bytes(data))
        return Answer(self, body, self._card(body.model or self.names[0])["id"], size)


class Answer:
    """The answer to one request, written while the engine makes it: an ASGI
    application.
    """

    def __init__(
        self, service: Service, body: Completion | Chat, model: str, size: int
    ) -> None:
        self.service, self.body, self.size = service, body, size
        self.name = (
            f"{'chatcmpl' if isinstance(body, Chat) else 'cmpl'}-{uuid.uuid4().hex}"
        )
        self.writer = Writer(self.name, model, body, service.llm.tokenizer)
        self.writing, self.begun = asyncio.Lock(), False  # the response's head was sent
        self.echo: dict[int, str] = {}  # prompts by choice, until they were written
        self.left = 0  # prompts that are not finished
        self.prompt = self.output = self.cached = 0  # tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, for as long as the client is there."""
        loop, pool, make = asyncio.get_running_loop(), self.service.pool, self._streams
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_departure(receive))
                streams = (
                    await loop.run_in_executor(pool, make) if self.size > LONG else make()
                )
                self.left = len(streams)
                parts = [
                    self._follow(i * self.body.n, one, send)
                    for i, one in enumerate(streams)
                ]
                await asyncio.wait([*map(group.create_task, parts)])
                watch.cancel()
        except* ClientDisconnect:
            pass
        except* Exception as errors:
            error = errors.exceptions[0]
            said = refusal(error, "messages" if isinstance(self.body, Chat) else "prompt")
            if said.status_code == 500:
                logging.getLogger("uvicorn.error").exception("%s failed", self.name)
            if self.begun:
                event = b"data: %b\n\n" % bytes(said.body)
                await send({"type": "http.response.body", "body": event})
            else:
                await said(scope, receive, send)

    def _streams(self) -> list[AsyncGenerator[RequestOutput]]:
        """Check all prompts and make their requests. Raises what `refusal` knows."""
        body, llm, salt = self.body, self.service.llm, self.body.cache_salt.encode()
        if isinstance(body, Chat):
            begins, goes_on = body.add_generation_prompt, body.continue_final_message
            ids = llm.render(
                [message.model_dump(exclude_none=True) for message in body.messages],
                add_generation_prompt=not goes_on if begins is None else begins,
                continue_final_message=goes_on,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            prompts, given = [edge.Asked(None, ids, salt)], {"max_tokens": None}
        else:
            size, given = llm.setup.spec.vocab_size, {}
            prompts = [
                edge.read_prompt(one, llm.tokenizer, size, salt) for one in body.prompt
            ]
            if body.echo and llm.tokenizer is not None:
                texts = [
                    llm.tokenizer.decode(p.ids) if p.text is None else p.text
                    for p in prompts
                ]
                self.echo = {i: texts[i // body.n] for i in range(len(prompts) * body.n)}
        params = llm.setup.default_sampling_params(**{**given, **body.sampling()})
        client = body.safety_identifier or body.user
        urgency = edge.Urgency(
            priority=body.priority, client=client, deadline=body.deadline
        )
        return [
            llm.generate(
                one,
                params,
                request_id=f"{self.name}-{i}",
                urgency=urgency,
                streaming=body.stream,
            )
            for i, one in enumerate(prompts)
        ]

    async def _follow(
        self, first: int, stream: AsyncGenerator[RequestOutput], send: Send
    ) -> None:
        """Write what comes of one prompt, whose first choice is `first`: one write for a
        turn.
        """
        async with contextlib.aclosing(stream):
            async for output in stream:
                said = "".join(
                    [self._said(first + one.index, one) for one in output.outputs]
                )
                if output.finished:
                    self.left -= 1
                    self.prompt += len(output.prompt_token_ids)
                    self.output += output.metrics.output_tokens
                    self.cached += output.num_cached_tokens
                    if self.writer.timing is not None:
                        self.writer.timing[first] = timing_of(output)
                if not self.left:
                    said += self.writer.last(self.prompt, self.output, self.cached)
                if said:
                    await self._write(said.encode(), self.left > 0, send)

    async def _write(self, part: bytes, more: bool, send: Send) -> None:
        """Write a part; those of other prompts wait: a slow client's must not be
        overtaken.
        """
        async with self.writing:
            if not self.begun:
                kind = b"text/event-stream" if self.body.stream else b"application/json"
                head = [(b"content-type", kind), (b"x-request-id", self.name.encode())]
                await send(
                    {"type": "http.response.start", "status": 200, "headers": head}
                )
                self.begun = True
            await send({"type": "http.response.body", "body": part, "more_body": more})

    def _said(self, index: int, one: CompletionOutput) -> str:
        if one.finish_reason == "error":
            raise ApiError(f"the request failed: {one.error}", None, "engine_error", 500)
        if self.service.closing or one.finish_reason == "cancelled":
            raise EngineDeadError(
                _STOPS if self.service.closing else "the request was cancelled"
            )
        text = self.echo.pop(index, "") + one.text
        return self.writer.write(index, text, one.finish_reason, one.logprobs)


async def _departure(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class _Server(uvicorn.Server):
    """Says when it is ready, and ends what runs when it is told to stop."""

    config: Any  # its app is an Application

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        name = self.config.app.models.names[0]
        print(f"minfer: {name} is served at http://{where}/v1", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.close()
        await super().shutdown(sockets)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens: who comes before the model is loaded waits. Raises
    ConfigError.
    """
    try:
        if not 0 <= port < 2**16:
            # The system's words.
            raise OSError("the port must be from 0 to 65535")  # noqa: TRY301
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server((address[0], port), family=family, backlog=_LINE)
    except (OSError, UnicodeError) as error:
        why = f"cannot listen at {host}:{port}: {error}; choose with --host and --port"
        raise ConfigError(why) from None
    # Connections inherit it. Without it, what follows a first packet waits 40 ms for its
    # receipt.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code.

    Raises ConfigError and the like.
    """
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    with bound(options.host, options.port) as listener:
        llm = AsyncLLM(**attrs.asdict(args, recurse=False))
        names = options.served_model_name or [_model_name(args)]
        app = Application(llm, names, options.api_key, options.max_body_size)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=options.access_log,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=DRAIN,
        )
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        # uvicorn raises again what stopped it. An interrupt is our caller's, this one
        # ends here.
        signal.signal(signal.SIGTERM, lambda *_: None)
        with contextlib.closing(llm):
            _Server(config).run(sockets=[listener])
    return 0


def _model_name(args: EngineArgs) -> str:
    """What clients call a model that was given no name: its folder's."""
    name = args.model or "bundled"
    return Path(name).resolve().name if Path(name).is_dir() else name
