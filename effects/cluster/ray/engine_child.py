"""The process of an engine on a node of a cluster. It is a child of the actor, and not
the actor itself, so that signals, threads and crashes of the engine are not those of
Ray's worker. The actor sends a plan over a pipe; when the pipe is closed, this process
ends, too. On standard output it reports to the actor, in lines (`engine_plan`).
"""

import contextlib
import os
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from attrs import evolve

from minfer.effects.cluster.engine_server.engine_process import (
    Outside,
    noted_blocks,
    run_engine,
)
from minfer.effects.cluster.processes.process_ends import engine_names
from minfer.effects.cluster.ray.engine_plan import (
    BEAT,
    CANNOT_START,
    KV,
    PORT,
    READY,
    STOP_TIMEOUT,
    WHY,
    EnginePlan,
)
from minfer.effects.execution.tiers.peers.peer_plan import DECODE
from minfer.effects.live.logs import configure_logs
from minfer.effects.net.addresses import listen_at
from minfer.effects.net.child import STOP, begin_as_child
from minfer.effects.net.run_folder import run_folder, socket_paths
from minfer.effects.setup.visible_gpus import VISIBLE
from minfer.values.texts import without_breaks

_LONGEST: Final = 1000  # characters, at most, of the reason that is reported


def run_child(host: str, plans: Connection) -> None:
    """Serve at a free port of the address `host`, and end this process."""
    begin_as_child()
    code = 1
    reports = os.dup(1)
    try:
        os.dup2(2, 1)  # anything that is printed goes to the log
        os.set_blocking(reports, False)
        plan: EnginePlan = plans.recv()
        threading.Thread(target=_end_with_parent, args=[plans], daemon=True).start()
        configure_logs(engine_names(plan.replicas)[plan.number])
        code = _serve(plan, host, partial(_report, reports))
    except (ValueError, OSError) as error:
        code = CANNOT_START
        why = without_breaks(f"{type(error).__name__}: {error}")[:_LONGEST]
        _report(reports, WHY, why)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(plan: EnginePlan, host: str, report: "partial[None]") -> int:
    args = plan.settings(os.environ.get(VISIBLE, ""))
    with run_folder() as folder, listen_at((host, 0)) as sock:
        (path,) = socket_paths(folder, 1)
        if (peers := args.kv_peers) is not None and peers.role == DECODE:
            kv = listen_at((host, 0))
            args = evolve(args, kv_peers=evolve(peers, sock=kv))
            # Before PORT: the keeper gives fronts both addresses once PORT is known.
            report(KV, str(kv.getsockname()[1]))
        report(PORT, str(sock.getsockname()[1]))
        return run_engine(
            args,
            path,
            plan.fronts,
            lambda: report(READY, str(noted_blocks(path))),
            lambda: report(BEAT),
            routed=plan.replicas > 1,
            outside=Outside(sock, plan.secret, own=True),
        )


def _report(reports: int, kind: str, text: str = "") -> None:
    with contextlib.suppress(OSError):  # the actor is gone, or does not read
        os.write(reports, f"{kind} {text}\n".encode("utf-8", "replace"))


def _end_with_parent(plans: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        plans.recv_bytes()  # nothing more is sent: returns when the pipe is closed
    os.kill(os.getpid(), STOP)
    time.sleep(STOP_TIMEOUT)
    os._exit(1)


if __name__ == "__main__":
    run_child(sys.argv[1], Connection(int(sys.argv[2]), writable=False))
