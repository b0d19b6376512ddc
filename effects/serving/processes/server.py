"""`minfer serve`: sockets, a model behind an application, and the end of a server.

A server is one process, in which the engine runs too, or several: an engine, API servers
that speak HTTP, and this one, which watches them
(`minfer.effects.cluster.processes.supervisor`).
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import uvicorn
from attrs import field, frozen
from starlette.types import ASGIApp

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.input_processing.template_settings import with_template_read
from minfer.effects.live.load_log import log_load
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.addresses import port_text
from minfer.effects.serving.access.hosts import CheckHost, Hosts, read_hosts
from minfer.effects.serving.access.server_bounds import ServerBounds, read_bounds
from minfer.effects.serving.application import Application, refusal
from minfer.effects.serving.observability.access_log import AccessLog
from minfer.effects.serving.observability.records import JsonObject
from minfer.effects.serving.observability.spans import (
    check_endpoint,
    open_traces,
    with_traces,
)
from minfer.effects.serving.observability.stdout_lines import LineWriter
from minfer.effects.serving.request_parsing.answer_parsing import log_unknown_format
from minfer.effects.serving.request_parsing.limits import MIN_BODY_LIMIT_BYTES
from minfer.effects.serving.wire.connections import Connections, bounded
from minfer.effects.serving.wire.descriptors import BoundedListener
from minfer.effects.serving.wire.origins import AllowOrigins, read_origins
from minfer.effects.serving.wire.root_path import RootPath, read_root_path
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.effects.serving.wire.tls import Tls
from minfer.effects.serving.wire.unix_sockets import listen_at_path, unix_path
from minfer.effects.serving.wire.websocket import ENVELOPE_BYTES, SOCKETS
from minfer.effects.setup.engine_args import EngineArgs, engine_args
from minfer.effects.setup.kv_events_settings import published_events
from minfer.effects.setup.lora_settings import read_modules
from minfer.values.checks import ConfigError

DRAIN_SECONDS: Final = 5  # that answers have to be sent when the server ends
_STOP_SIGNALS: Final = 2  # signals after which the server stops at once
_ACCEPT_BACKLOG: Final = 2048  # connections that wait to be accepted
_POLL_SECONDS: Final = 0.05  # between two looks at running requests, at the end
# One API server is enough for this number of cores, of which the engine needs some
# itself.
_CORES_PER_API_SERVER: Final = 4
_MAX_API_SERVERS: Final = 4
_WILDCARD_ADDRESSES: Final = ("0.0.0.0", "::")  # noqa: S104 - addresses that no browser can ask


@frozen(kw_only=True)
class HttpOptions:
    """How a model is served over HTTP."""

    names: Sequence[str]  # of the model
    bounds: ServerBounds = field(factory=ServerBounds)
    max_body: int | None = None  # bytes; None: by the model's context
    access_log: str = "off"  # or one of the other `LOG_FORMATS`
    allowed_origins: Sequence[str] = ()  # whose pages may send requests, beside our own
    hosts: Hosts | None = None  # that requests must be for; None: any
    root_path: str = ""  # before all addresses, if they have it
    tls: Tls = field(factory=Tls)
    traces: str = ""  # the URL that spans are sent to, if any
    shutdown_timeout: float = 30.0  # seconds that requests have to end after a SIGTERM
    # Seconds without a heartbeat of an engine or an API server; 0: any number.
    engine_timeout: float = 60.0


class DrainingServer(uvicorn.Server):
    """Ends in two stages: after a SIGTERM it takes no new requests, and running ones have
    `shutdown_timeout` seconds to end; after a second one, or an interrupt, it stops.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        shutdown_timeout: float,
        shared: SharedCounts | None = None,
    ) -> None:
        super().__init__(config)
        connections = (shared or SharedCounts()).connections
        self.server_state.connections = Connections(connections)
        self.shutdown_timeout = shutdown_timeout
        self._signals = 0

    @property
    def stopping(self) -> bool:
        """Whether running requests are not waited for any more."""
        return self._signals >= _STOP_SIGNALS

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Count a signal."""
        self._signals += _STOP_SIGNALS if sig == signal.SIGINT else 1
        super().handle_exit(sig, frame)

    def run_until_signalled(self, listener: socket.socket) -> None:
        """Serve until a signal comes, from now on."""
        # uvicorn raises again the signal that stopped it. An interrupt is for our caller;
        # a SIGTERM ends here.
        signal.signal(signal.SIGTERM, self.handle_exit)
        self.run([listener])

    async def wait_while(self, running: Callable[[], object]) -> None:
        """Wait until no request is running, or the server must stop."""
        end = asyncio.get_running_loop().time() + self.shutdown_timeout
        while running() and not self.stopping and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_SECONDS)


class HttpServer(DrainingServer):
    """The server of a model."""

    def __init__(
        self,
        config: uvicorn.Config,
        options: HttpOptions,
        application: Callable[[], Application | None],
        shared: SharedCounts | None = None,
    ) -> None:
        super().__init__(config, options.shutdown_timeout, shared)
        self._options = options
        self._application = application

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        for listener in sockets or ():
            if isinstance(listener, BoundedListener):
                listener.tls = self._options.tls.enabled
                listener.limit_connections(
                    self._options.bounds.connection_limits.connections
                )
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        application = self._application()
        if application is not None:
            await self._drain(application)
            application.close()
        await super().shutdown(sockets)

    async def _drain(self, application: Application) -> None:
        """Take no new requests, and wait until the running ones are answered: a client
        may be slower than the engine.
        """
        client = application.state.llm.client
        client.drain(0)
        count = application.records.live
        if count and not self.stopping:
            running = f"{count} request{'s' * (count > 1)} may take"
            limit = f"{self.shutdown_timeout:g} s to end"
            note = f"minfer: {running} {limit}; another signal stops them"
            print(note, file=sys.stderr, flush=True)
        await self.wait_while(lambda: application.records.live)


@contextlib.contextmanager
def with_middleware(
    app: ASGIApp,
    options: HttpOptions,
    process: str,
    application: Callable[[], Application | None],
    begin: Callable[[], bool] = lambda: True,
) -> Iterator[ASGIApp]:
    """An application inside its middleware, while it is served. `application` returns the
    one with the records, once it is there; lines are logged once `begin` returns true.
    """

    def find_record(name: str, owner: str) -> JsonObject | None:
        current = application()
        return None if current is None else current.records.find(name, owner)

    with contextlib.ExitStack() as stack:
        if options.root_path:
            app = RootPath(app, options.root_path)
        if options.hosts is not None:
            app = CheckHost(app, options.hosts, refusal)
        if options.traces:
            traces = stack.enter_context(contextlib.closing(open_traces(options.traces)))
            app = with_traces(app, traces)
        if options.allowed_origins:
            app = AllowOrigins(app, options.allowed_origins)
        if options.access_log != "off":
            lines = stack.enter_context(contextlib.closing(LineWriter(begin=begin)))
            app = AccessLog(app, lines, options.access_log, process, find_record)
        yield app


def http_config(app: ASGIApp, options: HttpOptions) -> uvicorn.Config:
    """The configuration of uvicorn."""
    return uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # `logs` has it
        access_log=False,  # `access_log` is ours
        lifespan="off",
        **SOCKETS,
        http=bounded(options.bounds.connection_limits),
        ws_max_size=(options.max_body or MIN_BODY_LIMIT_BYTES) + ENVELOPE_BYTES,
        **options.tls.settings(),
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )


def listen_at(host: str, port: int, count: int = 1) -> list[BoundedListener]:
    """`count` sockets that listen at one address; the system divides connections among
    them. Before the model is loaded, connections wait, or get an error. Raises
    ConfigError.
    """
    if (path := unix_path(host)) is not None:
        listening = listen_at_path(path, _ACCEPT_BACKLOG)
        copies = [listening, *(listening.dup() for _ in range(count - 1))]
        return [BoundedListener.of(copy) for copy in copies]
    listeners: list[BoundedListener] = []
    try:
        if not 0 <= port < 2**16:
            # In the form of the system's errors.
            raise OSError("the port must be from 0 to 65535")  # noqa: TRY301
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        if count > 1:
            # With SO_REUSEPORT, the address could be shared with another server, too.
            with socket.create_server((address[0], port), family=family) as free:
                port = free.getsockname()[1]
        for _ in range(count):
            listening = socket.create_server(
                (address[0], port),
                family=family,
                backlog=_ACCEPT_BACKLOG,
                reuse_port=count > 1,
            )
            # Connections inherit it. Without it, data after a first packet waits 40 ms
            # for its acknowledgement.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listeners.append(BoundedListener.of(listening))
    except (OSError, UnicodeError) as error:
        for listener in listeners:
            listener.close()
        message = (
            f"cannot listen at {host}:{port}: {error}; choose with --host and --port"
        )
        raise ConfigError(message) from None
    return listeners


def describe_address(listener: socket.socket, options: HttpOptions) -> str:
    """The lines that announce the model and its address; programs read the first."""
    if listener.family == socket.AF_UNIX:
        served = f"minfer: {options.names[0]} is served at {listener.getsockname()}"
        return f"{served}\nminfer: {options.bounds.tenants.describe()}"
    host, port = listener.getsockname()[:2]
    address = port_text((host, port))
    scheme = "https" if options.tls.enabled else "http"
    served = f"minfer: {options.names[0]} is served at {scheme}://{address}/v1"
    nearby = f"localhost:{port}" if host in _WILDCARD_ADDRESSES else address
    page = f"minfer: a page to try it is at {scheme}://{nearby}/"
    return f"{served}\n{page}\nminfer: {options.bounds.tenants.describe()}"


def api_servers_by_cores() -> int:
    """The default number of API servers on this machine."""
    return max(1, min(_MAX_API_SERVERS, (os.cpu_count() or 1) // _CORES_PER_API_SERVER))


def serve_in_process(
    args: EngineArgs, listener: socket.socket, options: HttpOptions
) -> int:
    """Serve until a signal comes, all in this process; returns the exit code."""
    configure_logs("server")
    llm = AsyncLLM(**attrs.asdict(args, recurse=False))
    llm.warm_grammars()
    log_unknown_format(llm)
    app = Application(
        llm,
        options.names,
        max_body=options.max_body,
        bounds=options.bounds,
    )
    print(describe_address(listener, options), flush=True)
    ended = threading.Event()
    if not args.disable_log_stats:
        log_load(llm.client, ended)
    with (
        contextlib.closing(llm),
        with_middleware(app, options, "server", lambda: app) as outer,
    ):
        server = HttpServer(http_config(outer, options), options, lambda: app)
        server.run_until_signalled(listener)
        ended.set()
    return 0


def read_options(options: argparse.Namespace) -> tuple[EngineArgs, HttpOptions]:
    """The settings of the command line. Raises ConfigError."""
    executor = "dry" if options.dry_run else "torch"
    args = engine_args(
        options,
        executor=executor,
        streaming=True,
        kv_disk_secret=options.cache_secret,
    )
    args = with_template_read(args)
    published_events(args.kv_events_config, caches_prefixes=args.enable_prefix_caching)
    tls = Tls(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        password=options.ssl_keyfile_password,
        ca_certs=options.ssl_ca_certs,
    )
    tls.check()
    check_endpoint(options.otlp_traces_endpoint)
    bounds = read_bounds(options)
    names = options.served_model_name or [_model_name(args)]
    check_module_names(args, names)
    http = HttpOptions(
        names=names,
        bounds=bounds,
        hosts=read_hosts(options, has_keys=bool(bounds.keys.known)),
        max_body=options.max_body_size,
        access_log=options.access_log,
        allowed_origins=read_origins(options.allowed_origins),
        root_path=read_root_path(options.root_path),
        tls=tls,
        traces=options.otlp_traces_endpoint,
        shutdown_timeout=options.shutdown_timeout,
        engine_timeout=options.engine_timeout,
    )
    return args, http


def check_module_names(args: EngineArgs, names: Sequence[str]) -> None:
    """Raise ConfigError for an adapter with a name of the model."""
    for module in read_modules(args.lora_modules):
        if module.name in names:
            raise ConfigError(
                f"--lora-modules: the model itself has the name {module.name!r}; choose "
                "another one, or --served-model-name"
            )


def _model_name(args: EngineArgs) -> str:
    """A model's name for clients if no name is given: its folder's."""
    name = args.model or "bundled"
    return Path(name).resolve().name if Path(name).is_dir() else name
