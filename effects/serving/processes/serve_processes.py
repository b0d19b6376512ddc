"""A server of several processes: what each of them does."""

import contextlib
import mmap
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from attrs import evolve

from minfer.effects.cluster.engine_server.engine_process import Outside, run_engine
from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.cluster.processes.engine_ends import EngineEnds
from minfer.effects.cluster.processes.engines_elsewhere import EnginesElsewhere, Keep
from minfer.effects.cluster.processes.process_ends import (
    ENGINE,
    Processes,
    engine_names,
    front_name,
)
from minfer.effects.cluster.processes.replica_devices import (
    ReplicaDevice,
    replica_devices,
)
from minfer.effects.cluster.processes.supervisor import Guard, Run, Supervisor
from minfer.effects.execution.ranks.started_by import is_by_torchrun
from minfer.effects.live.logs import configure_logs
from minfer.effects.models.checkpoint import read_config
from minfer.effects.net.addresses import port_text
from minfer.effects.net.heartbeat import Heartbeat
from minfer.effects.net.run_folder import run_folder, socket_paths
from minfer.effects.serving.processes.front_process import FrontPlan, run_front
from minfer.effects.serving.processes.server import (
    HttpOptions,
    describe_address,
    listen_at,
)
from minfer.effects.serving.wire.shared_counts import SharedCounts
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder
from minfer.values.checks import ConfigError

# Gets callbacks for a heartbeat and for when it is ready; returns the exit code.
RunWithHeartbeat: TypeAlias = Callable[[Callable[[], None], Callable[[], None]], int]


def serve_in_processes(
    args: EngineArgs,
    options: HttpOptions,
    host: str,
    port: int,
    fronts: int,
    guard: Guard,
    deployment: Deployment,
    keep: Keep | None = None,
) -> int:
    """Serve until a signal comes, with the engines of a deployment and so many fronts, or
    no fronts if the engines are for those of other machines; returns the exit code.
    `keep` is the work of a process that has all engines elsewhere, on a cluster.

    Raises ConfigError if it cannot listen, or has fewer GPUs than engines, and
    CheckpointError if there is no such model.
    """
    _check_options(options, fronts)
    devices = [] if keep is not None else replica_devices(deployment.settings(args))
    alone = deployment.serves_others
    with contextlib.ExitStack() as stack:
        listeners = [] if alone else listen_at(host, port, fronts)
        for one in listeners:
            stack.enter_context(one)
        links = deployment.link_sockets(stack)
        # Once, before any process starts: it may have to be downloaded.
        read_config(model_folder(args.model))
        paths = socket_paths(stack.enter_context(run_folder()), deployment.replicas)
        announced = mmap.mmap(-1, 1)  # shared: whether the first line is out
        shared = SharedCounts.of(max(1, len(listeners)))
        if keep is None:
            work = _engines(args, deployment, paths, links, fronts, devices)
        else:
            elsewhere = EnginesElsewhere(
                args=args,
                deployment=deployment,
                paths=paths,
                fronts=fronts,
                timeout=options.engine_timeout,
            )
            work = {ENGINE: partial(keep, elsewhere)}
        engines = list(work)
        ends = EngineEnds(len(paths))
        for number, one in enumerate(listeners):
            front = FrontPlan(
                number=number,
                listener=one,
                paths=paths,
                args=args,
                http=options,
                deployment=deployment,
                shared=shared,
                last_end=ends.last,
                announced=lambda: announced[0] == 1,
            )
            work[front_name(number)] = partial(run_front, front)
        heartbeats = {name: Heartbeat(options.engine_timeout) for name in work}
        runs: dict[str, Run] = {
            name: partial(run, heartbeats[name].beat) for name, run in work.items()
        }

        def ready() -> None:
            if alone:
                where = ", ".join(port_text(one.getsockname()[:2]) for one in links)
                said = (
                    f"minfer: {options.names[0]} computes prompts for others at {where}"
                )
            else:
                said = describe_address(listeners[0], options)
            print(said, flush=True)
            announced[0] = 1

        patience = options.shutdown_timeout
        table = Processes(len(listeners), len(engines), by_torchrun=is_by_torchrun())
        # A rank that is killed from outside ends its engine as a fault of that does.
        replicas = engines if keep is None and args.parallel.ranks == 1 else []

        def note_end(name: str, code: int) -> None:
            if name in replicas:
                ends.note(replicas.index(name), code, hung=name in table.hung)

        supervisor = Supervisor(table, runs, guard, patience, heartbeats, note_end)
        return supervisor.run(ready)


def _engines(
    args: EngineArgs,
    deployment: Deployment,
    paths: Sequence[Path],
    links: Sequence[socket.socket],
    fronts: int,
    devices: Sequence[ReplicaDevice],
) -> dict[str, RunWithHeartbeat]:
    """The work of each engine of this machine, by its name."""
    settings = deployment.settings(args)
    plans = deployment.peer_plans(paths, args.tensor_parallel_size)
    alone = deployment.serves_others
    return {
        name: partial(
            _run_engine,
            name,
            evolve(settings[number], kv_peers=plans[number]),
            devices[number],
            paths[number],
            fronts,
            deployment.routed,
            Outside(links[number], deployment.secret) if alone else None,
        )
        for number, name in enumerate(engine_names(deployment.replicas))
    }


def _check_options(options: HttpOptions, fronts: int) -> None:
    """Raise ConfigError for impossible options."""
    for name, value in (
        ("--api-processes", fronts),
        ("--engine-timeout", options.engine_timeout),
    ):
        if not value >= 0:
            raise ConfigError(f"{name} must be at least 0, not {value:g}")


def _run_engine(
    name: str,
    args: EngineArgs,
    device: ReplicaDevice,
    path: Path,
    fronts: int,
    routed: bool,
    outside: Outside | None,
    beat: Callable[[], None],
    ready: Callable[[], None],
) -> int:
    configure_logs(name)
    args = device.take(args)
    path.unlink(missing_ok=True)  # of an earlier engine
    return run_engine(args, path, fronts, ready, beat, routed=routed, outside=outside)
