"""`minfer route`: a socket, the router behind it, and its end."""

import argparse
import socket
import sys
from pathlib import Path

import uvicorn

from minfer.effects.live.input_processing.template_settings import (
    parsers_of,
    template_settings,
)
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.addresses import port_text
from minfer.effects.proxy.backends import read_backends, read_sources
from minfer.effects.proxy.router_application import RouterApplication
from minfer.effects.proxy.router_options import RouterOptions
from minfer.effects.proxy.tenants import read_proxies
from minfer.effects.serving.access.api_keys import read_keys
from minfer.effects.serving.access.hosts import read_hosts
from minfer.effects.serving.access.server_bounds import (
    ServerBounds,
    check_seconds,
    check_whole,
)
from minfer.effects.serving.processes.server import (
    DrainingServer,
    HttpOptions,
    http_config,
    listen_at,
    with_middleware,
)
from minfer.effects.serving.wire.connections import ConnectionLimits
from minfer.effects.serving.wire.descriptors import raise_limit
from minfer.effects.serving.wire.tls import Tls
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError


class RouterServer(DrainingServer):
    """The server of a router."""

    def __init__(
        self, config: uvicorn.Config, router: RouterApplication, shutdown_timeout: float
    ) -> None:
        super().__init__(config, shutdown_timeout)
        self._router = router

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Probe the backends, then accept connections."""
        await self._router.open()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop."""
        self._router.closing = True
        await self.wait_while(lambda: self._router.live)
        await super().shutdown(sockets)
        await self._router.close()


def read_router_options(options: argparse.Namespace) -> tuple[RouterOptions, HttpOptions]:
    """The settings of the command line. Raises ConfigError."""
    tls = Tls(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        password=options.ssl_keyfile_password,
        ca_certs=options.ssl_ca_certs,
    )
    tls.check()
    file = options.api_keys_file
    keys = read_keys(options.api_key, None if file is None else Path(file))
    connection_limits = ConnectionLimits(
        connections=check_whole("max-connections", options.max_connections, 1),
        header=check_seconds("header-timeout", options.header_timeout),
    )
    backends = read_backends(options.backend)
    sources = read_sources(options.kv_events, backends)
    if bool(sources) != (options.model is not None):
        reason = "a server's blocks are compared by token ids"
        raise ConfigError(f"--kv-events and --model need each other: {reason}")
    rendering = EngineArgs(
        chat_template=options.chat_template,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    router_options = RouterOptions(
        backends=backends,
        kv_sources=sources,
        kv_block_size=check_whole("kv-block-size", options.kv_block_size, 1),
        model=options.model,
        templates=template_settings(rendering),
        parsers=parsers_of(rendering),
        policy=options.routing,
        keys=keys,
        proxies=read_proxies(options.forwarded_allow_ips),
        cache_tokens=check_whole("cache-tokens", options.cache_tokens, 1),
        max_body=None
        if options.max_body_size is None
        else check_whole("max-body-size", options.max_body_size, 1),
        workers=check_whole("preparers", options.preparers, 0),
        max_waiting=check_whole("max-waiting", options.max_waiting, 0),
        backend_timeout=check_seconds("backend-timeout", options.backend_timeout),
        journal=None if options.journal is None else Path(options.journal),
        journal_size=check_whole("journal-size", options.journal_size, 1),
    )
    http = HttpOptions(
        names=[],
        bounds=ServerBounds(keys=keys, connection_limits=connection_limits),
        max_body=router_options.max_body,
        hosts=read_hosts(options, has_keys=bool(keys.known)),
        access_log=options.access_log,
        allowed_origins=options.allowed_origins,
        tls=tls,
        shutdown_timeout=check_seconds("shutdown-timeout", options.shutdown_timeout),
    )
    return router_options, http


def serve_router(options: argparse.Namespace) -> int:
    """Route until a signal comes; returns the exit code. Raises ConfigError."""
    router_options, http = read_router_options(options)
    configure_logs("router")
    raise_limit()
    (listener,) = listen_at(options.host, options.port)
    with listener:
        router = RouterApplication(router_options)
        print(_announcement(listener, router_options, http), flush=True)
        with with_middleware(router, http, "router", lambda: None) as outer:
            config = http_config(outer, http)
            server = RouterServer(config, router, http.shutdown_timeout)
            server.run_until_signalled(listener)
    print("minfer: the router has ended", file=sys.stderr)
    return 0


def _announcement(
    listener: socket.socket, router_options: RouterOptions, http: HttpOptions
) -> str:
    """The line that announces the address; programs read it."""
    host, port = listener.getsockname()[:2]
    address = port_text((host, port))
    scheme = "https" if http.tls.enabled else "http"
    count = len(router_options.backends)
    servers = f"{count} server{'s' * (count > 1)}"
    return f"minfer: {servers} by {router_options.policy} at {scheme}://{address}/v1"
