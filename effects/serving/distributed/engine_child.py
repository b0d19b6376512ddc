"""The process of an engine on a node of a cluster: a child of its actor, so that the
engine's signals, threads and end are its own. It reports to the actor in lines on a pipe,
and ends when another one closes, as the actor is gone then.
"""

import contextlib
import os
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from minfer.effects.execution.parent_death import die_with_parent
from minfer.effects.execution.tiers.peers.addresses import listen_at
from minfer.effects.live.engine_process import Outside, noted_blocks, run_engine
from minfer.effects.serving.distributed.engine_plan import CANNOT_START, EnginePlan
from minfer.effects.serving.observability.logs import configure_logs
from minfer.effects.serving.processes.process_ends import engine_names
from minfer.effects.serving.processes.run_folder import run_folder, socket_paths
from minfer.effects.setup.visible_gpus import VISIBLE

PORT: Final = "port"  # lines of the report: the port that it listens at
READY: Final = "ready"  # the number of its KV blocks
BEAT: Final = "beat"
WHY: Final = "why"  # it cannot be started
_LONGEST: Final = 1000  # characters of that


def run_child(
    plan: EnginePlan, host: str, reports: Connection, lifeline: Connection
) -> None:
    """Serve at a free port of this address, and end this process."""
    die_with_parent()
    code = 1
    try:
        threading.Thread(target=_end_with_parent, args=[lifeline], daemon=True).start()
        os.dup2(2, 1)  # what is printed is a log: standard output is the server's
        os.set_blocking(reports.fileno(), False)
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


def _report(reports: Connection, kind: str, text: str = "") -> None:
    with contextlib.suppress(OSError):  # the actor is gone, or is stopped
        os.write(reports.fileno(), f"{kind} {text}\n".encode("utf-8", "replace"))


def _end_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()  # nothing is sent
    os._exit(1)
