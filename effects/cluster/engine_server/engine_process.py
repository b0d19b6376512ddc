"""The engine's process: a model, the worker that steps it, and links to the fronts.

For its server's fronts it listens before it loads, so that they can report its progress;
for other servers' fronts once it has loaded, as only then it knows what both must have in
common (`link_terms`). When the engine breaks the process ends: the fronts resubmit its
requests to the next process, which starts with clean memory.

Only its parent ends it (by `STOP`). It ignores the signals that a terminal or a service
manager sends to all processes: while fronts finish their requests, they need the engine.
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

from minfer.effects.cluster.engine_server.host import Host
from minfer.effects.cluster.engine_server.link_server import LinkServer
from minfer.effects.cluster.engine_server.replica_news import ReplicaNews
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.link_terms import link_terms, own_terms
from minfer.effects.execution.contract import Executor, workers_of
from minfer.effects.execution.warming.start_progress import StartProgress
from minfer.effects.execution.warming.start_progress import log as start_log
from minfer.effects.live.engine.host_memory import EVERY, Trim, bound_products
from minfer.effects.live.served_model import ServedModel
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.child import STOP
from minfer.effects.net.handshake import Terms
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import Setup


@frozen
class Outside:
    """Where fronts of other machines are linked, instead of those here."""

    sock: socket.socket  # that listens
    secret: bytes = field(repr=False)
    own: bool = (
        False  # they are its own server's: linked from the start on, as those here
    )


BROKEN: Final = 70  # exit code: the engine broke, and may be restarted
# Seconds that an engine has to end in after one of its ranks is lost.
LAST: Final = 2.0
log = logging.getLogger("minfer.engine")


def run_engine(
    args: EngineArgs,
    path: Path,
    fronts: int,
    ready: Callable[[], None],
    beat: Callable[[], None] = lambda: None,
    *,
    routed: bool = False,
    outside: Outside | None = None,
) -> int:
    """Serve so many fronts at `path`, or those `outside`, until a `STOP`; returns the
    exit code. If it is `routed`, as one of several engines, it reports its cache and its
    load to them.

    `ready` is called when the model is loaded, and `beat` some times a second, from the
    start on, while it loads or its steps complete. Raises ConfigError and the like if it
    cannot be loaded.
    """
    over, loaded = threading.Event(), threading.Event()
    causes: list[str] = []

    def died(why: str) -> None:
        causes.append(why)
        over.set()

    _obey(over, loaded)
    bound_products()
    of_others = outside is not None and not outside.own
    known = None if of_others else fronts
    host = Host(known, died, beat, block_size=args.block_size)
    server = LinkServer(host)
    server.start()
    if outside is None:
        server.let_in(listen_at(path), own_terms())
    elif outside.own:
        server.let_in(outside.sock, own_terms(outside.secret))
    host.report("loading the model")
    start_log.info("loading the model")
    args = _as_before(args, path)

    def report(progress: StartProgress) -> None:
        host.report(progress.stage, progress.done, progress.total)

    with contextlib.closing(ServedModel.opened(args, report)) as model:
        _end_with_ranks(model.worker.driver.executor)
        model.warm_grammars()
        loaded.set()
        _note_blocks(path, model.setup.config.num_blocks)
        news = None
        if routed:
            driver = model.worker.driver
            news = ReplicaNews(driver.config, lambda: driver.state)
            model.worker.on_turn = host.note_turn
        host.open(model.client, _facts(model.setup), news)
        if outside is not None and not outside.own:
            server.let_in(outside.sock, _terms(outside, model.setup))
        ready()
        start_log.info("the engine is ready")
        trim = Trim()
        while not over.wait(EVERY):
            trim.look()
        if not causes:  # else a request may be why it broke
            host.end()
        server.close()
    if causes:
        log.error("%s", causes[0], exc_info=model.client.dead)
    return BROKEN if causes else 0


def _end_with_ranks(executor: Executor) -> None:
    """Have this process end once one of its ranks is lost, also if its GPU waits for that
    rank's part of a sum, and will forever.
    """

    def end() -> None:
        last = threading.Timer(LAST, os._exit, (BROKEN,))
        last.daemon = True
        last.start()

    if (workers := workers_of(executor)) is not None:
        workers.on_loss.insert(0, end)  # first: the release of the ranks may wait, too


def _as_before(args: EngineArgs, path: Path) -> EngineArgs:
    """Returns the settings with as many KV blocks as the previous engine had."""
    return args.with_blocks(noted_blocks(path)) if _blocks_file(path).exists() else args


def noted_blocks(path: Path) -> int:
    """Returns how many KV blocks the engine at `path` has, once it is ready."""
    return int(_blocks_file(path).read_text())


def _note_blocks(path: Path, count: int) -> None:
    part = path.with_name("blocks.part")
    part.write_text(str(count))
    part.rename(_blocks_file(path))  # atomic, even if the process is killed


def _blocks_file(path: Path) -> Path:
    return path.with_name("blocks")


def _obey(over: threading.Event, loaded: threading.Event) -> None:
    """Have `STOP`, and no other signal, end this process."""

    def stop(*_: object) -> None:
        over.set()
        if not loaded.is_set():  # no request is served, and loading may take minutes
            os._exit(0)

    signal.signal(STOP, stop)
    for one in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which child processes would inherit.
        signal.signal(one, lambda *_: None)


def _terms(outside: Outside, setup: Setup) -> Terms:
    size = setup.config.block_size
    return link_terms(setup.fingerprint, setup.device.kind, size, outside.secret)


def _facts(setup: Setup) -> wire.EngineReady:
    config = setup.config
    return wire.EngineReady(
        setup.device.kind, config.num_blocks, setup.fingerprint, config.max_model_len
    )
