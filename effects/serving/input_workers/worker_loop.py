"""The main loop of all worker programs: a process handles one body after the other, until
its memory has grown.

    python -m MODULE DESCRIPTOR

A worker reads its settings from standard input and frames from the inherited socket; an
empty reply means that it is ready. It ends when the socket is closed, or when a body
takes longer than `ALARM_SECONDS`, so that it does not outlive its server, or more of a
processor than its `WorkerLimits` allow. If its memory has grown by more than
`MAX_GROWTH_BYTES`, its reply announces that it ends: this frees the memory that
tokenizers and the interpreter keep after large bodies.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from attrs import evolve

from minfer.effects.net.child import begin_as_child
from minfer.effects.net.framing import EndedError, frame, read_message
from minfer.effects.serving.client_errors import INTERNAL, ApiError, to_api_error
from minfer.effects.serving.input_workers.worker_limits import WorkerLimits
from minfer.effects.serving.input_workers.worker_messages import (
    MAX_MESSAGE_BYTES,
    Refusal,
    WorkerReply,
    WorkerRequest,
    encode,
    request_decoder,
)

MAX_GROWTH_BYTES: Final = 2**27  # that a worker may keep beyond its first size
ALARM_SECONDS: Final = 60  # after which a body ends its worker, if the server has not
TOO_LARGE: Final = "the body takes too much memory to be read; send less at once"
_RSS, _DATA = 1, 5  # columns of /proc/self/statm, in pages
_log: Final = logging.getLogger(__name__)


class Worker(Protocol):
    """Handles the bodies of one program."""

    @property
    def limits(self) -> WorkerLimits:
        """Of each body."""

    def reply(self, request: WorkerRequest) -> WorkerReply:
        """The reply for a body; never raises."""


def refusal_reply(error: Exception, path: str, field: str | None = None) -> WorkerReply:
    """The reply for a body that was posted to `path` and led to an error; `field` has
    its prompt.
    """
    if isinstance(error, MemoryError):
        return WorkerReply(refusal=_refusal(ApiError(TOO_LARGE, status=413)), last=True)
    api_error = to_api_error(error, field)
    if api_error.status == INTERNAL:
        _log.error("%s: not prepared", path, exc_info=error)
    return WorkerReply(refusal=_refusal(api_error))


def _refusal(error: ApiError) -> Refusal:
    return Refusal(
        message=str(error), param=error.param, code=error.code, status=error.status
    )


def _size(column: int) -> int:
    """Bytes of memory of this process; 0 where the system does not report it."""
    table = Path("/proc/self/statm")
    if not table.exists():
        return 0
    return int(table.read_text().split()[column]) * resource.getpagesize()


def _lower_priority(limits: WorkerLimits) -> None:
    """Let other processes go first."""
    os.nice(limits.nice)
    # OSError: the system has no such groups, or does not let their priority be changed.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(limits.session_nice))


def serve(link: socket.socket, worker: Worker) -> None:
    """Work on bodies from the socket until it is closed."""
    max_bytes = _size(_RSS) + MAX_GROWTH_BYTES
    link.sendall(frame(encode(WorkerReply())))
    last = False
    while not last:
        try:
            request = read_message(link, request_decoder, MAX_MESSAGE_BYTES)
        except EndedError:
            return
        # Neither signal has a handler: it ends the process in any state.
        signal.alarm(ALARM_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, worker.limits.cpu)
        reply = worker.reply(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        last = reply.last or _size(_RSS) > max_bytes
        link.sendall(frame(encode(evolve(reply, last=last))))


def run_worker(make: Callable[[bytes], Worker]) -> int:
    """Run the worker that `make` makes of the facts; returns the exit code."""
    begin_as_child()
    # Signals to the whole group are for the server: it ends this process by the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = make(sys.stdin.buffer.read())
    _lower_priority(worker.limits)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_size(_DATA) + worker.limits.memory, hard))
    # OSError: the server has gone, and needs no reply.
    with socket.socket(fileno=int(sys.argv[1])) as link, contextlib.suppress(OSError):
        serve(link, worker)
    return 0
