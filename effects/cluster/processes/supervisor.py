"""The parent process of a server: it starts, restarts and ends the other processes.

It loads nothing itself, so that each fork begins clean. Its children end when it does:
each of them reads a pipe whose other end only the parent holds, and is also killed by the
system where that supports it.
"""

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from minfer.effects.cluster.processes.process_ends import Action, Processes, Start
from minfer.effects.net.child_signals import DRAIN, STOP, announce
from minfer.effects.net.heartbeat import Heartbeat
from minfer.effects.net.parent_death import die_with_parent

LAST_MOMENTS: Final = 10.0  # seconds that a process has to end, beyond its own time
_LOOK: Final = 0.5  # seconds between two looks at the clock

Run = Callable[[Callable[[], None]], int]  # gets a callback for when it is ready
Guard = Callable[[Callable[[], int]], int]  # makes an exit code of errors


class Supervisor:
    """Executes the decisions of `Processes`. `runs` has the work of each process."""

    def __init__(
        self,
        processes: Processes,
        runs: Mapping[str, Run],
        guard: Guard,
        patience: float,
        heartbeats: Mapping[str, Heartbeat],
        note_end: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """`patience`: seconds that a process has to end in; `heartbeats`: of processes,
        by name. `note_end` is called with the name of each process that has ended, and
        its exit code, or its signal (negative).
        """
        self._note_end = note_end
        self._processes = processes
        self._runs = runs
        self._guard = guard
        self._patience = patience
        self._heartbeats = heartbeats
        self._names: dict[int, str] = {}  # by process id
        self._due: dict[str, float] = {}  # when a process is to be started
        self._signals: list[int] = []
        self._deadline: float | None = None
        self._lifeline, self._lifeline_end = os.pipe()
        self._reports, self._reports_end = os.pipe()

    def run(self, ready: Callable[[], None]) -> int:
        """Watch until all have ended; returns the exit code. `ready` is called when all
        processes are ready for the first time.
        """
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(self._reports, False)
        before = {one: signal.getsignal(one) for one in _WATCHED}
        for one in _WATCHED:
            signal.signal(one, self._note_signal)
        old = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(woken, selectors.EVENT_READ)
                selector.register(self._reports, selectors.EVENT_READ)
                self._execute(self._processes.begin())
                while not self._processes.over:
                    for key, _ in selector.select(self._select_timeout()):
                        data = os.read(key.fd, 4096)
                        if key.fd == self._reports:
                            self._read_reports(data.decode(), ready)
                    self._check_processes()
        finally:
            signal.set_wakeup_fd(old)
            for one, handler in before.items():
                signal.signal(one, handler)
            pipes = (
                woken,
                waker,
                self._lifeline,
                self._lifeline_end,
                self._reports,
                self._reports_end,
            )
            for pipe in pipes:
                os.close(pipe)
        return self._processes.code

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _select_timeout(self) -> float:
        until_due = min(self._due.values(), default=float("inf")) - time.monotonic()
        return max(0.0, min(_LOOK, until_due))

    def _read_reports(self, reports: str, ready: Callable[[], None]) -> None:
        for name in reports.split("\n"):
            if name in self._runs and self._processes.note_ready(name):
                ready()

    def _check_processes(self) -> None:
        """Handle signals, ended and hanging processes, and starts that are due."""
        while self._signals:
            interrupt = self._signals.pop(0) == signal.SIGINT
            self._execute(self._processes.note_signal(interrupt=interrupt))
            wait = self._patience if self._processes.phase == "draining" else 0.0
            self._deadline = time.monotonic() + wait + LAST_MOMENTS
        self._reap()
        now = time.monotonic()
        self._check_heartbeats(now)
        if self._processes.phase == "stopping" and self._deadline is None:
            self._deadline = now + LAST_MOMENTS
        if self._deadline is not None and now > self._deadline:
            self._deadline = now + LAST_MOMENTS
            self._execute(self._processes.note_timeout())
        for name in [name for name, when in self._due.items() if when <= now]:
            del self._due[name]
            if self._processes.may_start(name):
                self._start(name)

    def _reap(self) -> None:
        """Reap processes that have ended, and act on it."""
        while self._names:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            name = self._names.pop(process, None)
            if name is None:  # an orphan of a child, if we are PID 1 of a container
                continue
            code = os.waitstatus_to_exitcode(status)
            self._note_end(name, code)
            before = self._processes.phase
            actions = self._processes.note_ended(name, code if code >= 0 else 128 - code)
            _report_end(name, code, before, actions)
            self._execute(actions)

    def _check_heartbeats(self, now: float) -> None:
        """Kill a process that runs but sends no heartbeat."""
        table = self._processes
        for name, heartbeat in self._heartbeats.items():
            if name in table.alive and heartbeat.hangs(now, ready=name in table.ready):
                heartbeat.begin()  # it may take a while to end
                if actions := table.note_hang(name):
                    why = "has not answered for too long (--engine-timeout); it is killed"
                    print(f"minfer: {name} {why}", file=sys.stderr, flush=True)
                    self._execute(actions)

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._due[action.name] = time.monotonic() + action.pause
                continue
            kind = _SIGNALS[action.how]
            for process, name in self._names.items():
                if name == action.name:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, kind)

    def _start(self, name: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals for the child that come before it has reset its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        process = os.fork()
        if not process:
            self._run_child(name)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        self._names[process] = name
        self._processes.note_started(name)
        if name in self._heartbeats:
            self._heartbeats[name].begin(process)

    def _run_child(self, name: str) -> NoReturn:
        """Run as the named process, from here on."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (signal.SIGTERM, signal.SIGINT):  # sent to all: for the parent
                signal.signal(number, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.close(self._lifeline_end)
            die_with_parent()
            with contextlib.suppress(OSError):  # where there is no such file
                Path("/proc/self/comm").write_text(f"minfer {name}", "ascii")
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            ready = f"{name}\n".encode()
            code = self._guard(
                lambda: self._runs[name](lambda: announce(self._reports_end, ready))
            )
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end_with_parent(self) -> None:
        os.read(self._lifeline, 1)  # returns when no process holds the other end
        os._exit(1)


_WATCHED: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_SIGNALS: Final = {"drain": DRAIN, "stop": STOP, "kill": signal.SIGKILL}


def _report_end(name: str, code: int, phase: str, actions: list[Action]) -> None:
    """Print why a process is restarted, or why the server ends."""
    how = f"with {code}" if code >= 0 else f"by signal {-code}"
    if any(isinstance(action, Start) for action in actions):
        print(f"minfer: {name} ended {how}; it is started again", file=sys.stderr)
    elif phase == "watching" and code < 0:  # otherwise it has printed the reason
        print(f"minfer: {name} ended {how}; the server ends", file=sys.stderr)
    sys.stderr.flush()
