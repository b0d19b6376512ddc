"""The process of an engine on a node of a cluster: a child of its actor, so that the
engine's signals, threads and end are its own. The actor sends a plan on a connection
that ends with the actor: then it ends, too. Its output is lines for the actor.
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

from minfer.effects.execution.parent_death import die_with_parent
from minfer.effects.execution.tiers.peers.addresses import listen_at
from minfer.effects.execution.tiers.peers.peer_plan import DECODE
from minfer.effects.live.engine_process import STOP, Outside, noted_blocks, run_engine
from minfer.effects.serving.distributed.engine_plan import (
    BEAT,
    CANNOT_START,
    KV,
    LAST,
    PORT,
    READY,
    WHY,
    EnginePlan,
)
from minfer.effects.serving.observability.logs import configure_logs
from minfer.effects.serving.processes.process_ends import engine_names
from minfer.effects.serving.processes.run_folder import run_folder, socket_paths
from minfer.effects.setup.visible_gpus import VISIBLE

_LONGEST: Final = 1000  # characters of a reason


def run_child(host: str, plans: Connection) -> None:
    """Serve at a free port of this address, and end this process."""
    die_with_parent()
    code = 1
    reports = os.dup(1)
    try:
        os.dup2(2, 1)  # what is printed is a log
        os.set_blocking(reports, False)
        plan: EnginePlan = plans.recv()
        threading.Thread(target=_end_with_parent, args=[plans], daemon=True).start()
        configure_logs(engine_names(plan.replicas)[plan.number])
        code = _serve(plan, host, partial(_report, reports))
    except (ValueError, OSError) as error:
        code = CANNOT_START
        why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
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
            report(KV, str(kv.getsockname()[1]))  # first: fronts learn both together
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
    with contextlib.suppress(OSError):  # the actor is gone, or is stopped
        os.write(reports, f"{kind} {text}\n".encode("utf-8", "replace"))


def _end_with_parent(plans: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        plans.recv_bytes()  # no more are sent
    os.kill(os.getpid(), STOP)
    time.sleep(LAST)
    os._exit(1)


if __name__ == "__main__":
    run_child(sys.argv[1], Connection(int(sys.argv[2]), writable=False))
