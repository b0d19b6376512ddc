"""The process of an engine on a node of a cluster. It is a child of the actor, and not
the actor itself, so that signals, threads and crashes of the engine are not those of
Ray's worker. The actor sends its plan over a pipe, and reads what it reports
(`engine_plan`).
"""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from attrs import evolve

from minfer.effects.cluster.engine_server.engine_process import (
    ApiServerSocket,
    read_num_blocks,
    run_engine,
)
from minfer.effects.cluster.processes.process_ends import engine_names
from minfer.effects.cluster.ray.engine_plan import (
    CANNOT_START,
    EnginePlan,
    EngineReport,
)
from minfer.effects.execution.tiers.peers.peer_plan import DECODE
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.child import begin_as_child
from minfer.effects.net.run_folder import socket_paths
from minfer.effects.setup.visible_gpus import VISIBLE_VARIABLE
from minfer.values.texts import without_breaks

_MAX_REASON_CHARS: Final = 1000  # of the reason that is reported


def run_child(host: str, folder: Path, plans: Connection) -> None:
    """Serve at a free port of the address `host`, and end this process."""
    beat = begin_as_child().beat
    code = 1
    try:
        plan: EnginePlan = plans.recv()
        configure_logs(engine_names(plan.replicas)[plan.number])
        code = _serve(plan, host, folder, beat)
    except (ValueError, OSError) as error:
        code = CANNOT_START
        reason = without_breaks(f"{type(error).__name__}: {error}")[:_MAX_REASON_CHARS]
        EngineReport(why=reason).write(folder)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(plan: EnginePlan, host: str, folder: Path, beat: Callable[[], None]) -> int:
    args = plan.settings(os.environ.get(VISIBLE_VARIABLE, ""))
    (path,) = socket_paths(folder, 1)
    report = EngineReport()

    def ready() -> None:
        evolve(report, blocks=read_num_blocks(path)).write(folder)

    with listen_at((host, 0)) as sock:
        report = evolve(report, port=sock.getsockname()[1])
        if (peers := args.kv_peers) is not None and peers.role == DECODE:
            kv = listen_at((host, 0))
            args = evolve(args, kv_peers=evolve(peers, sock=kv))
            report = evolve(report, kv=kv.getsockname()[1])
        report.write(folder)
        return run_engine(
            args,
            path,
            plan.api_servers,
            ready,
            beat,
            routed=plan.replicas > 1,
            api_server_socket=ApiServerSocket(sock, plan.secret, own=True),
        )


if __name__ == "__main__":
    file = Connection(int(sys.argv[3]), writable=False)
    run_child(sys.argv[1], Path(sys.argv[2]), file)
