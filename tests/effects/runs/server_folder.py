"""The folder of a server with two replicas, on two machines: of these replica 1 died, and
a request that ran there went on at replica 0.
"""

from pathlib import Path
from typing import Final

from minfer.effects.cluster.engine_client.api_server_router import (
    ApiServerRouter,
    routing_request,
)
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.live.journal.routing_journal_file import RoutingJournalFile
from minfer.records.messages import Submit
from minfer.routing.messages import (
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
)
from minfer.routing.policies import RoundRobin
from minfer.routing.state import RouterConfig
from tests.core.simulation.clocked import Run, config, request

RUNS: Final = {  # by file, the requests
    "replica-0/20260101T000000Z-7.0-000001": ("cmpl-a-0", "cmpl-c-0", "cmpl-b-0#1"),
    "replica-1/20260101T000000Z-8.0-000001": ("cmpl-b-0",),
    "replica-1/20260101T000009Z-9.0-000001": ("cmpl-d-0",),
}


def write_run(file: Path, *names: str, machine: str = "") -> None:
    """A run of these requests; without a machine as earlier versions wrote it."""
    run = Run(config())
    for name in names:
        run.turn(Submit(request(name, 5)))
    run.drain()
    file.parent.mkdir(exist_ok=True)
    metadata = {"machine": machine} if machine else {}
    write_journal(file, run.config, run.turns, metadata)


def write_server(folder: Path, *, closed: bool = True) -> Path:
    """Write the folder; returns the file of its router."""
    for name, names in RUNS.items():
        machine = f"node-{name[8]}"
        write_run(folder / f"{name}.journal", *names, machine=machine)
    config = RouterConfig(RoundRobin(), 4)
    journal = RoutingJournalFile(folder, config, 2**20, "api-0")
    router = ApiServerRouter(config, journal)
    router.apply(ReplicaJoined("0"), ReplicaJoined("1"))
    _sent(router, "cmpl-a-0", "cmpl-b-0")
    router.apply(ReplicaLeft("1"))
    _sent(router, "cmpl-c-0", "cmpl-b-0")
    router.apply(ReplicaJoined("1"))
    _sent(router, "cmpl-d-0")
    router.apply(*(RequestEnded(f"cmpl-{letter}-0") for letter in "abcd"))
    journal.close()
    (file,) = folder.glob("*.routing")
    if not closed:  # as of an API server that was killed
        *lines, _ = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines) + "{")
    return file


def _sent(router: ApiServerRouter, *names: str) -> None:
    for name in names:
        router.decide(routing_request(request(name, 5)))
        router.apply(RequestStarted(name))
