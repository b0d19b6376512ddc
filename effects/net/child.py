"""A child process of its parent: an engine, an API server, a rank, an input worker.

            parent                                          child
    begin   fork_child     a copy of the parent             calls a function
            spawn_child    a new interpreter                begin_as_child, at once
    watch   hangs          <-- heartbeat, shared memory --  beat, some times a second
            poll, wait     <-- exit code ----------------
    end     signal, kill   -- DRAIN, STOP, SIGKILL ------>  its own handlers
            it has ended   -- SIGKILL, by the system ---->

API servers, and engines on this machine, are forked: they share listening sockets and
counts with their parent, which loads nothing, so that each of them begins clean. All
others are spawned, by parents that may have loaded a model, a device or threads: ranks,
input workers, and engines on a cluster's nodes.

Only engines and API servers have a heartbeat here (a `limit`). A rank is watched by its
messages (`worker_group`), and an input worker has a limited time for each body
(`worker_pool`).

What begins a child again is decided elsewhere: for a server's processes by the table in
`process_ends`; an input worker is replaced by its pool; an engine ends with its rank.

DRAIN and STOP are signals that no terminal or service manager sends to all processes at
once: those are for the parent, and children ignore them.
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final, NoReturn, Protocol

from attrs import define, field

from minfer.effects.net.heartbeat import HEARTBEAT_BYTES, Heartbeat, Watch
from minfer.effects.net.secret_variables import environment_without_secrets

DRAIN: Final = signal.SIGUSR1  # end once no requests run
STOP: Final = signal.SIGUSR2  # end now
# Signals that a parent of forked children handles.
PARENT_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
# Of a spawned process: its parent's id, and the descriptor of its heartbeat, or -1.
PARENT_VARIABLE: Final = "MINFER_PARENT"
POLL_SECONDS: Final = 0.01  # seconds between two polls while waiting for an end
_PARENT_POLL_SECONDS: Final = 1.0  # seconds, likewise, for the end of a parent
_PR_SET_PDEATHSIG: Final = 1  # Linux's <sys/prctl.h>


class _Process(Protocol):
    """A process of either kind: `subprocess.Popen` has these, too."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


@define(eq=False)
class Child:
    """A child process, until its exit code is known."""

    _process: _Process
    _watch: Watch

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or the signal that ended it (negative); None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float = math.inf) -> int | None:
        """The exit code once the process has ended; None if it still runs after `timeout`
        seconds.
        """
        end = time.monotonic() + timeout
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return code

    def hangs(self, now: float, *, ready: bool) -> bool:
        """Whether it has sent no heartbeat for too long; True once. It has more time
        until it is ready.
        """
        return self._watch.hangs(now, ready=ready)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, in any state."""
        self.signal(signal.SIGKILL)


@define(eq=False)
class _Forked:
    """A process that was forked."""

    pid: int
    code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """See `Child.poll`."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def send_signal(self, sig: int) -> None:
        """See `Child.signal`."""
        if self.code is None:
            os.kill(self.pid, sig)


# --- the parent -------------------------------------------------------------------------


def fork_child(
    run: Callable[[Callable[[], None]], int], name: str, limit: float
) -> Child:
    """Call `run` in a copy of this process, whose exit code it returns; it gets what it
    calls as a heartbeat. `name` is for lists of processes; `limit` is in seconds without
    a heartbeat, 0 for any number. To be called in a thread that lasts, without others.
    """
    heartbeat, parent = Heartbeat(), os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals for the child that come before it has reset its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
    process = os.fork()
    if not process:
        _run_fork(lambda: run(heartbeat.beat), name, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
    return Child(_Forked(process), Watch(heartbeat, limit, process))


def spawn_child(
    module: str,
    *arguments: str,
    stdin_data: bytes = b"",
    descriptors: Sequence[int] = (),
    variables: Mapping[str, str] = {},
    own_session: bool = False,
    limit: float = 0.0,
) -> Child:
    """Run a module in a new interpreter, with `stdin_data` as its standard input, with
    `descriptors` of this process, and with more `variables`, but without secrets. In its
    `own_session`, it does not get a terminal's signals. `limit` is as for `fork_child`.
    Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        beat_file = -1
        if limit:
            beat_file = stack.enter_context(_memory_file()).fileno()
        heartbeat = Heartbeat(beat_file)

        def start() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(  # a module of ours
                # The path by which this package was imported, not the working folder.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE if stdin_data else subprocess.DEVNULL,
                pass_fds=[*descriptors, beat_file] if limit else descriptors,
                start_new_session=own_session,
                env={
                    **environment_without_secrets(),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **variables,
                    PARENT_VARIABLE: f"{os.getpid()} {beat_file}",
                },
            )

        process = _start_in_lasting_thread(start, stdin_data)
    return Child(process, Watch(heartbeat, limit, process.pid))


def _memory_file() -> IO[bytes]:
    """A file for a heartbeat, which goes with its last descriptor."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("minfer-heartbeat"), "wb+")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.truncate(HEARTBEAT_BYTES)
    return file


def _start_in_lasting_thread(
    start: Callable[[], "subprocess.Popen[bytes]"], stdin_data: bytes
) -> "subprocess.Popen[bytes]":
    """Start a process in a thread that lasts as long as the process: to Linux the parent
    is that thread, and this one may end before. It waits for the end, so that no zombie
    is left. Raises what `start` raises.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            process = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(stdin_data)
        process.wait()

    threading.Thread(target=run, name="minfer-parent", daemon=True).start()
    return started.result()


def reap_orphans(own_ids: Container[int]) -> None:
    """Reap processes that have ended and are not in `own_ids`: orphans of children,
    if this is PID 1 of a container.
    """
    if sys.platform != "linux":  # which alone has containers
        return
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):  # there are none
        while ended := os.waitid(os.P_ALL, 0, flags):
            if ended.si_pid in own_ids:
                return
            os.waitpid(ended.si_pid, 0)


# --- the child --------------------------------------------------------------------------


def begin_as_child() -> Heartbeat:
    """Have this spawned process end with its parent, from here on; returns its heartbeat.
    A parent that is not minfer's, such as torchrun, has no watch on that.
    """
    parent, file = os.environ.pop(PARENT_VARIABLE, f"{os.getppid()} -1").split()
    _die_with_parent(int(parent))
    return Heartbeat(int(file))


def _run_fork(run: Callable[[], int], name: str, parent: int) -> NoReturn:
    """Run as a forked child, from here on."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT):  # sent to all: for the parent
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
        _die_with_parent(parent)
        with contextlib.suppress(OSError):  # where there is no such file
            Path("/proc/self/comm").write_text(f"minfer {name}", "ascii")
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent has ended: a stopped process, or
    one in a call that does not return, would not notice that. Where the system does not
    do so, a thread looks for it.
    """
    is_killed = False
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        is_killed = prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    if not is_killed:
        threading.Thread(target=_exit_after_parent, args=[parent], daemon=True).start()


def _exit_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
