"""The engine's process: a model, the worker that steps it, and links to the API servers.

For its server's API servers it listens before it loads, so that they can report its
progress; for other servers' API servers once it has loaded, as only then it knows what
both must have in common (`link_terms`). When the engine breaks the process ends: the API
servers resubmit its requests to the next process, which starts with clean memory.

Only its parent ends it (by `STOP`). It ignores the signals that a terminal or a service
manager sends to all processes: while API servers finish their requests, they need the
engine.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attrs import field, frozen

from minfer.effects.cluster.engine_server.cache_event_publisher import CacheEventPublisher
from minfer.effects.cluster.engine_server.engine_server import EngineServer
from minfer.effects.cluster.engine_server.link_server import LinkServer
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_terms import link_terms, own_terms
from minfer.effects.execution.contract import Executor, workers_of
from minfer.effects.execution.warming.start_progress import StartProgress
from minfer.effects.execution.warming.start_progress import log as start_log
from minfer.effects.live.engine.host_memory import (
    TRIM_CHECK_SECONDS,
    Trim,
    bound_onednn_cache,
)
from minfer.effects.live.load_log import log_load
from minfer.effects.live.served_model import ServedModel
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.child import STOP
from minfer.effects.net.handshake import Terms
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import Setup


@frozen
class ApiServerSocket:
    """A socket for links of API servers on other machines, instead of those here."""

    sock: socket.socket  # that listens
    secret: bytes = field(repr=False)
    # These API servers are its own server's: linked from the start on, as those here.
    own: bool = False


BROKEN: Final = 70  # exit code: the engine broke, and may be restarted
# In which an engine has to end after one of its ranks is lost.
RANK_LOSS_SECONDS: Final = 2.0
log = logging.getLogger("minfer.engine")


def run_engine(
    args: EngineArgs,
    path: Path,
    api_servers: int,
    ready: Callable[[], None],
    beat: Callable[[], None] = lambda: None,
    *,
    routed: bool = False,
    api_server_socket: ApiServerSocket | None = None,
) -> int:
    """Serve `api_servers` API servers at `path`, or those at `api_server_socket`, until a
    `STOP`; returns the exit code. If it is `routed`, as one of several engines, it
    reports its cache and its load to them.

    `ready` is called when the model is loaded, and `beat` some times a second, from the
    start on, while it loads or its steps complete. Raises ConfigError and the like if it
    cannot be loaded.
    """
    stop_event, loaded_event = threading.Event(), threading.Event()
    causes: list[str] = []

    def died(reason: str) -> None:
        causes.append(reason)
        stop_event.set()

    _handle_signals(stop_event, loaded_event)
    bound_onednn_cache()
    of_others = api_server_socket is not None and not api_server_socket.own
    num_api_servers = None if of_others else api_servers
    engine_server = EngineServer(num_api_servers, died, beat, block_size=args.block_size)
    link_server = LinkServer(engine_server)
    link_server.start()
    if api_server_socket is None:
        link_server.accept_links(listen_at(path), own_terms())
    elif api_server_socket.own:
        link_server.accept_links(
            api_server_socket.sock, own_terms(api_server_socket.secret)
        )
    engine_server.report("loading the model")
    start_log.info("loading the model")
    args = _with_previous_blocks(args, path)

    def report(progress: StartProgress) -> None:
        engine_server.report(progress.stage, progress.done, progress.total)

    with contextlib.closing(ServedModel.from_engine_args(args, report)) as model:
        _end_with_ranks(model.worker.driver.executor)
        model.warm_grammars()
        if model.epochs is None:
            model.count_resets = engine_server.count_resets
        loaded_event.set()
        _write_num_blocks(path, model.setup.config.num_blocks)
        publisher = None
        if routed:
            driver = model.worker.driver
            publisher = CacheEventPublisher(driver.config, lambda: driver.state)
            model.worker.turn_listeners.append(engine_server.note_turn)
        engine_server.open(model.client, _ready_message(model.setup), publisher)
        if api_server_socket is not None and not api_server_socket.own:
            link_server.accept_links(
                api_server_socket.sock, _api_server_terms(api_server_socket, model.setup)
            )
        ready()
        start_log.info("the engine is ready")
        trim = Trim()
        if not args.disable_log_stats:
            log_load(model.client, stop_event)
        while not stop_event.wait(TRIM_CHECK_SECONDS):
            trim.trim_if_grown()
        if not causes:  # else a request may be why it broke
            engine_server.end()
        link_server.close()
    if causes:
        log.error("%s", causes[0], exc_info=model.client.dead)
    return BROKEN if causes else 0


def _end_with_ranks(executor: Executor) -> None:
    """Have this process end once one of its ranks is lost, also if its GPU waits for that
    rank's part of a sum, and will forever.
    """

    def end() -> None:
        timer = threading.Timer(RANK_LOSS_SECONDS, os._exit, (BROKEN,))
        timer.daemon = True
        timer.start()

    if (workers := workers_of(executor)) is not None:
        workers.on_loss.insert(0, end)  # first: the release of the ranks may wait, too


def _with_previous_blocks(args: EngineArgs, path: Path) -> EngineArgs:
    """Returns the settings with as many KV blocks as the previous engine had."""
    return (
        args.with_blocks(read_num_blocks(path)) if _blocks_file(path).exists() else args
    )


def read_num_blocks(path: Path) -> int:
    """Returns how many KV blocks the engine at `path` has, once it is ready."""
    return int(_blocks_file(path).read_text())


def _write_num_blocks(path: Path, count: int) -> None:
    temporary = path.with_name("blocks.part")
    temporary.write_text(str(count))
    temporary.rename(_blocks_file(path))  # atomic, even if the process is killed


def _blocks_file(path: Path) -> Path:
    return path.with_name("blocks")


def _handle_signals(stop_event: threading.Event, loaded_event: threading.Event) -> None:
    """Have `STOP`, and no other signal, end this process."""

    def stop(*_: object) -> None:
        stop_event.set()
        if not loaded_event.is_set():  # no request is served; loading may take minutes
            os._exit(0)

    signal.signal(STOP, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which child processes would inherit.
        signal.signal(number, lambda *_: None)


def _api_server_terms(api_server_socket: ApiServerSocket, setup: Setup) -> Terms:
    size = setup.config.block_size
    return link_terms(
        setup.fingerprint, setup.device.kind, size, api_server_socket.secret
    )


def _ready_message(setup: Setup) -> wire.EngineReady:
    config = setup.config
    return wire.EngineReady(
        setup.device.kind, config.num_blocks, setup.fingerprint, config.max_model_len
    )
