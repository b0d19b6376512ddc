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
from minfer.effects.serving.bounds import bounds_of
from minfer.effects.serving.connections import bounded
from minfer.effects.setup.settings import EngineArgs, engine_args

DRAIN: Final = 5  # seconds that answers have to end when the server does
_LINE: Final = 2048  # connections that wait to be accepted


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
    bounds = bounds_of(options)
    with bound(options.host, options.port) as listener:
        llm = AsyncLLM(**attrs.asdict(args, recurse=False))
        names = options.served_model_name or [_model_name(args)]
        app = Application(llm, names, max_body=options.max_body_size, bounds=bounds)
        config = uvicorn.Config(
            app,
            http=bounded(bounds.patience),
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
