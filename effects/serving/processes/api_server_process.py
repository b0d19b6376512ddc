"""An API server's process: HTTP, templates and text, over an engine in another process,
or several of them.

An API server accepts connections at once, but for one in place of an API server that
ended, which lets them wait until it can answer. Until the engine is ready for the first
time, every request is answered with 503, but for `/health`, as the API server lives
(`gate`). While an engine that died is restarted, requests wait.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Never

from attrs import field, frozen

from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.link_client import (
    SAME_MACHINE,
    LinkedEngine,
    keep_linked,
)
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.link.crash_rule import EngineEnd
from minfer.effects.cluster.link.link_terms import link_terms, own_terms
from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.cluster.processes.engine_address import read_address
from minfer.effects.cluster.processes.process_ends import api_server_name
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.journal.routing_journal_file import (
    PREFILL_SUFFIX,
    RoutingJournalFile,
)
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.addresses import Port, port_text
from minfer.effects.net.child import DRAIN, STOP
from minfer.effects.net.handshake import Terms
from minfer.effects.serving.application import Application
from minfer.effects.serving.processes.gate import Gate
from minfer.effects.serving.processes.server import (
    HttpOptions,
    HttpServer,
    http_config,
    with_middleware,
)
from minfer.effects.serving.request_parsing.answer_parsing import log_unknown_format
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare_as_decided
from minfer.routing.policies import routing_policy_named
from minfer.routing.state import RouterConfig
from minfer.values.checks import ConfigError

REQUEST_IDS_PER_API_SERVER: Final = 2**40  # more than there will be
POLL_SECONDS: Final = 0.02  # from one look for the engine to the next
# In which an API server in place of one that ended should be linked and able to answer.
REPLACEMENT_SECONDS: Final = 5.0
HEARTBEAT_SECONDS: Final = 0.1  # from one heartbeat to the next
REPORT_SECONDS: Final = 0.1  # from one report of counts to the next
_log = logging.getLogger("minfer.front")


@frozen(kw_only=True)
class ApiServerPlan:
    """The settings of an API server."""

    number: int  # from 0
    listener: socket.socket
    paths: Sequence[Path]  # of the engines' sockets
    args: EngineArgs
    http: HttpOptions
    shared: SharedCounts = field(
        factory=SharedCounts
    )  # what it counts with the other API servers
    deployment: Deployment = field(factory=Deployment)
    # See `EngineEnds`, by replica.
    last_end: Callable[[int], EngineEnd] = lambda _: EngineEnd()
    # Whether the first line of the output is written: logs come after it.
    announced: Callable[[], bool] = lambda: True


class ApiServer(HttpServer):
    """A server that ends when its parent signals it. Signals that a terminal or a service
    manager sends to all processes are for the parent: handled here too, they would count
    twice.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are."""
        yield

    def install_handlers(self) -> None:
        """Handle the parent's signals from now on."""
        signal.signal(DRAIN, lambda *_: self.handle_exit(signal.SIGTERM, None))
        signal.signal(STOP, lambda *_: self.handle_exit(signal.SIGINT, None))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)


def run_api_server(
    plan: ApiServerPlan, beat: Callable[[], None], ready: Callable[[], None]
) -> int:
    """Serve until the parent ends it; returns the exit code. `beat` is called every
    `HEARTBEAT_SECONDS` while the event loop runs, and `ready` once the engine is ready.
    Raises ConfigError if the engine has another model.
    """
    configure_logs(api_server_name(plan.number))
    # An earlier process of this API server may have died with open connections.
    return asyncio.run(_serve(plan, plan.shared.at(plan.number), beat, ready))


async def _serve(
    plan: ApiServerPlan,
    shared: SharedCounts,
    beat: Callable[[], None],
    ready: Callable[[], None],
) -> int:
    journals = contextlib.ExitStack()
    router, prefill = None, None
    if plan.deployment.routed:
        router = _router(plan, journals)
    if plan.deployment.prefills and router is not None:
        prefill = PrefillFirst(_router(plan, journals, PREFILL_SUFFIX))
    remote = RemoteEngine(
        plan.number,
        max_waiting=plan.args.max_waiting,
        replicas=len(plan.paths),
        router=router,
        prefill=prefill,
        prefillers=plan.deployment.prefillers,
        external=len(plan.deployment.prefill_at),
        last_end=plan.last_end,
    )
    for link in remote.own_replicas:
        link.listens = plan.deployment.listens(link.number)
        if not plan.deployment.distributed:
            link.machine = socket.gethostname()
    gate = Gate(lambda: remote.unready)
    tasks: list[asyncio.Task[None]] = [
        asyncio.create_task(keep_linked(remote, _own_engine(plan, remote, replica)))
        for replica in range(len(plan.paths))
    ]
    tasks.append(asyncio.create_task(_send_heartbeats(beat)))
    terms_future: asyncio.Future[Terms] = asyncio.get_running_loop().create_future()
    tasks += [
        asyncio.create_task(_link_elsewhere(plan, remote, address, number, terms_future))
        for number, address in enumerate(plan.deployment.prefill_at, len(plan.paths))
    ]
    tasks.append(
        asyncio.create_task(
            _open_application(plan, shared, remote, router, gate, terms_future, ready)
        )
    )
    try:
        name = api_server_name(plan.number)
        with with_middleware(
            gate, plan.http, name, lambda: gate.application, plan.announced
        ) as app:
            config = http_config(app, plan.http)
            server = ApiServer(config, plan.http, lambda: gate.application, shared)
            server.install_handlers()
            serving = asyncio.create_task(_accept(server, plan, gate))
            await asyncio.wait([serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
            if ended:  # without these tasks no request is served: end, visibly
                server.handle_exit(signal.SIGINT, None)
            await serving
            for task in ended:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        remote.close()
        journals.close()
    return 0


async def _accept(server: ApiServer, plan: ApiServerPlan, gate: Gate) -> None:
    """Accept connections until the server ends. An API server in place of one that ended
    lets them wait until it can answer, as those of other API servers are answered
    meanwhile.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + REPLACEMENT_SECONDS
    while plan.announced() and gate.application is None and clock() < end:
        if server.should_exit:
            break
        await asyncio.sleep(POLL_SECONDS)
    await server.serve(sockets=[plan.listener])


async def _send_heartbeats(beat: Callable[[], None]) -> None:
    """Send heartbeats to the parent: a blocked event loop sends none."""
    while True:
        beat()
        await asyncio.sleep(HEARTBEAT_SECONDS)


def _own_engine(plan: ApiServerPlan, remote: RemoteEngine, replica: int) -> LinkedEngine:
    """An engine of this server, wherever that runs."""
    path, name = plan.paths[replica], _name(plan)
    if not plan.deployment.distributed:
        return LinkedEngine(
            replica=replica,
            find=lambda: path,
            terms=own_terms(),
            name=name,
            settings=SAME_MACHINE,
        )
    link = remote.replicas[replica]

    def find() -> Port | None:
        if (address := read_address(path)) is None:
            link.machine = ""
            return None
        link.listens, link.machine = address.kv, address.machine  # it may have moved
        return address.port

    terms = own_terms(plan.deployment.secret)
    return LinkedEngine(replica=replica, find=find, terms=terms, name=name)


async def _link_elsewhere(
    plan: ApiServerPlan,
    remote: RemoteEngine,
    address: Port,
    replica: int,
    terms_future: "asyncio.Future[Terms]",
) -> Never:
    """Link an engine of another server, once the model here is known."""
    remote.replicas[replica].machine = port_text(address)
    terms = await asyncio.shield(terms_future)
    engine = LinkedEngine(
        replica=replica, find=lambda: address, terms=terms, name=_name(plan)
    )
    await keep_linked(remote, engine)


def _name(plan: ApiServerPlan) -> str:
    """How an API server introduces itself to engines."""
    return f"{socket.gethostname()}, {api_server_name(plan.number)}"


def _router(
    plan: ApiServerPlan, journals: contextlib.ExitStack, suffix: str = ""
) -> ApiServerRouter:
    """A router among several engines, which is recorded if a journal is written."""
    args, policy = plan.args, routing_policy_named(plan.deployment.routing)
    config = RouterConfig(policy, args.block_size)
    if args.journal is None:
        return ApiServerRouter(config)
    if args.journal_redact:
        _log.warning("routing is not recorded, as --journal-redact does not cover it")
        return ApiServerRouter(config)
    name = api_server_name(plan.number).replace(" ", "-") + suffix
    journal = RoutingJournalFile(Path(args.journal), config, args.journal_size, name)
    journals.callback(journal.close)
    return ApiServerRouter(config, journal)


async def _open_application(
    plan: ApiServerPlan,
    shared: SharedCounts,
    remote: RemoteEngine,
    router: ApiServerRouter | None,
    gate: Gate,
    terms_future: "asyncio.Future[Terms]",
    ready: Callable[[], None],
) -> None:
    """Wait for the engine, and serve it."""
    while (facts := remote.ready) is None:
        await asyncio.sleep(POLL_SECONDS)
    setup = await asyncio.to_thread(
        prepare_as_decided,
        plan.args,
        facts.device,
        facts.num_blocks,
        facts.max_model_len,
    )
    _check_same(setup.fingerprint, remote)
    secret = plan.deployment.secret
    size = setup.config.block_size
    terms_future.set_result(link_terms(setup.fingerprint, facts.device, size, secret))
    remote.bound_lengths(setup.config.max_model_len)
    llm = AsyncLLM.from_client(remote, setup, plan.number * REQUEST_IDS_PER_API_SERVER)
    await asyncio.to_thread(llm.warm_grammars)
    if llm.adapters is not None:
        await asyncio.to_thread(llm.adapters.warm)
    gate.application = Application(
        llm,
        plan.http.names,
        max_body=plan.http.max_body,
        bounds=plan.http.bounds,
        shared=shared,
    )
    if plan.number == 0:
        log_unknown_format(llm)
    gate.application.lookup.join(remote.queries)
    ready()
    metrics = gate.application.metrics
    if router is not None:
        metrics.routed = remote.sent
    last_report = None
    while True:
        _check_same(setup.fingerprint, remote)  # another engine may be there by now
        totals = metrics.api_server_totals()
        report = (totals, remote.links)  # a new engine has no earlier reports
        if report != last_report:
            remote.count(totals)
            last_report = report
        await asyncio.sleep(REPORT_SECONDS)


def _check_same(fingerprint: bytes, remote: RemoteEngine) -> None:
    """Raise ConfigError if the engine has loaded another model than this API server."""
    engines = [link.ready for link in remote.own_replicas if link.ready is not None]
    if any(engine.fingerprint != fingerprint for engine in engines):
        raise ConfigError(
            "API server and engine have read different models: were files changed "
            "meanwhile?"
        )
