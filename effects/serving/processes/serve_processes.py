"""A server of several processes: what each of them does.

    this process    listens, forks the others, and watches them (`Supervisor`)
    engine 0 ...    a model each; or "engine" keeps all engines, which are on a cluster
    api 0 ...       HTTP, and links to all engines

A fork inherits what is made here: sockets that listen, the folder with the engines'
sockets, and counts in shared memory.
"""

import contextlib
import mmap
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

from minfer.effects.cluster.engine_server.engine_process import (
    ApiServerSocket,
    run_engine,
)
from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.cluster.processes.engine_ends import EngineEnds
from minfer.effects.cluster.processes.process_ends import (
    ENGINE,
    Processes,
    api_server_name,
    engine_names,
)
from minfer.effects.cluster.processes.replica_devices import (
    ReplicaDevice,
    replica_devices,
)
from minfer.effects.cluster.processes.supervisor import Guard, Run, Supervisor
from minfer.effects.execution.ranks.rank_folder import is_by_torchrun
from minfer.effects.live.logs import configure_logs
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.net.addresses import port_text
from minfer.effects.net.run_folder import run_folder, socket_paths
from minfer.effects.serving.processes.api_server_process import (
    ApiServerPlan,
    run_api_server,
)
from minfer.effects.serving.processes.server import (
    HttpOptions,
    describe_address,
    listen_at,
)
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.model_source import checkpoint_folder
from minfer.values.checks import ConfigError

ADAPTERS_FOLDER: Final = "adapters"  # of the run folder: the names of adapters
# Work of a process that keeps engines elsewhere, whose addresses it writes beside these
# paths; with the callbacks of `Run`.
Keep = Callable[[Sequence[Path], Callable[[], None], Callable[[], None]], int]


def serve_in_processes(
    args: EngineArgs,
    options: HttpOptions,
    host: str,
    port: int,
    api_servers: int,
    guard: Guard,
    deployment: Deployment,
    keep: Keep | None = None,
) -> int:
    """Serve until a signal comes, with the engines of a deployment and this number of API
    servers, or none if the engines are for those of other machines; returns the exit
    code. `keep` is the work of a process that has all engines elsewhere, on a cluster.

    Raises ConfigError if it cannot listen, or has fewer GPUs than engines, and
    CheckpointError if there is no such model.
    """
    _check_options(options, api_servers)
    devices = [] if keep is not None else replica_devices(deployment.settings(args))
    with contextlib.ExitStack() as stack:
        server = ForkedServer.opened(
            stack, args, options, host, port, api_servers, deployment
        )
        engines = server.engines(devices) if keep is None else server.keeper(keep)
        api_server_runs = server.api_server_runs()
        table = Processes(
            len(api_server_runs), len(engines), by_torchrun=is_by_torchrun()
        )
        one_rank_engines = server.engines_of_one_rank() if keep is None else {}

        def note_end(name: str, code: int) -> None:
            if (number := one_rank_engines.get(name)) is not None:
                server.ends.note(number, code, hung=name in table.hung)

        supervisor = Supervisor(
            table,
            {**engines, **api_server_runs},
            guard,
            end_seconds=options.shutdown_timeout,
            heartbeat_seconds=options.engine_timeout,
            note_end=note_end,
        )
        return supervisor.run(server.announce)


@frozen(kw_only=True, eq=False)
class ForkedServer:
    """The state that a server's processes inherit, and the work of each, by its name."""

    args: EngineArgs
    options: HttpOptions
    deployment: Deployment
    paths: Sequence[Path]  # of the engines' sockets
    listeners: Sequence[socket.socket]  # of the API servers here
    links: Sequence[socket.socket]  # of engines, for the API servers of other machines
    api_servers: int
    ends: EngineEnds  # shared
    # Shared: whether the first line is out.
    announced: mmap.mmap = field(factory=lambda: mmap.mmap(-1, 1))

    @classmethod
    def opened(
        cls,
        stack: contextlib.ExitStack,
        args: EngineArgs,
        options: HttpOptions,
        host: str,
        port: int,
        api_servers: int,
        deployment: Deployment,
    ) -> "ForkedServer":
        """Listen, and make the folder, until `stack` closes both. Raises as
        `serve_in_processes`.
        """
        listeners: list[socket.socket] = []
        if not deployment.serves_others:
            listeners += map(stack.enter_context, listen_at(host, port, api_servers))
        links = deployment.link_sockets(stack)
        # Once, before any process starts: it may have to be downloaded.
        read_config(checkpoint_folder(args))
        folder = stack.enter_context(run_folder())
        if args.enable_lora:
            args = evolve(args, lora_registry=str(folder / ADAPTERS_FOLDER))
        return cls(
            args=args,
            options=options,
            deployment=deployment,
            paths=socket_paths(folder, deployment.replicas),
            listeners=listeners,
            links=links,
            api_servers=api_servers,
            ends=EngineEnds(deployment.replicas),
        )

    def engines(self, devices: Sequence[ReplicaDevice]) -> dict[str, Run]:
        """The engines of this machine."""
        deployment = self.deployment
        settings = deployment.settings(self.args)
        plans = deployment.peer_plans(self.paths, self.args.tensor_parallel_size)
        serves_others = deployment.serves_others
        return {
            name: LocalEngine(
                name=name,
                args=evolve(settings[number].numbered(number), kv_peers=plans[number]),
                device=devices[number],
                path=self.paths[number],
                api_servers=self.api_servers,
                routed=deployment.routed,
                api_server_socket=ApiServerSocket(self.links[number], deployment.secret)
                if serves_others
                else None,
            ).run
            for number, name in enumerate(engine_names(deployment.replicas))
        }

    def engines_of_one_rank(self) -> dict[str, int]:
        """The numbers of the engines that have one rank, by the names of their processes.
        A rank of several that is killed from outside ends its engine as a fault of that
        does, so the ends of the others say nothing of their causes.
        """
        settings = self.deployment.settings(self.args)
        names = engine_names(self.deployment.replicas)
        numbered = enumerate(zip(names, settings, strict=True))
        return {
            name: number
            for number, (name, engine_args) in numbered
            if engine_args.parallel.ranks == 1
        }

    def keeper(self, keep: Keep) -> dict[str, Run]:
        """The process that keeps the engines of a cluster."""
        return {ENGINE: partial(keep, self.paths)}

    def api_server_runs(self) -> dict[str, Run]:
        """The API servers of this machine."""
        shared = SharedCounts.of(max(1, len(self.listeners)))
        plans = [
            ApiServerPlan(
                number=number,
                listener=listener,
                paths=self.paths,
                args=self.args,
                http=self.options,
                deployment=self.deployment,
                shared=shared,
                last_end=self.ends.last,
                announced=lambda: self.announced[0] == 1,
            )
            for number, listener in enumerate(self.listeners)
        ]
        return {
            api_server_name(plan.number): partial(run_api_server, plan) for plan in plans
        }

    def announce(self) -> None:
        """Print the first line: where the server listens."""
        if self.deployment.serves_others:
            addresses = ", ".join(
                port_text(link.getsockname()[:2]) for link in self.links
            )
            name = self.options.names[0]
            print(
                f"minfer: {name} computes prompts for others at {addresses}", flush=True
            )
        else:
            print(describe_address(self.listeners[0], self.options), flush=True)
        self.announced[0] = 1


@frozen(kw_only=True, eq=False)
class LocalEngine:
    """An engine of this machine."""

    name: str  # of its process
    args: EngineArgs
    device: ReplicaDevice
    path: Path  # of its socket
    api_servers: int
    routed: bool
    api_server_socket: (
        ApiServerSocket | None
    )  # where API servers of other machines are linked

    def run(self, beat: Callable[[], None], ready: Callable[[], None]) -> int:
        """Serve until the parent ends it; returns the exit code."""
        configure_logs(self.name)
        args = self.device.take(self.args)
        self.path.unlink(missing_ok=True)  # of an earlier engine
        return run_engine(
            args,
            self.path,
            self.api_servers,
            ready,
            beat,
            routed=self.routed,
            api_server_socket=self.api_server_socket,
        )


def _check_options(options: HttpOptions, api_servers: int) -> None:
    """Raise ConfigError for impossible options."""
    for name, value in (
        ("--api-processes", api_servers),
        ("--engine-timeout", options.engine_timeout),
    ):
        if not value >= 0:
            raise ConfigError(f"{name} must be at least 0, not {value:g}")
