"""The parent process of a server: it starts, restarts and ends the other processes.

    Processes   decides, as a function of events: starts and signals
    Supervisor  notes events, and executes what is decided
    Child       is one of the processes

It loads nothing itself, so that each fork begins clean.
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final

from minfer.effects.cluster.processes.process_ends import Action, Processes, Start
from minfer.effects.net.child import (
    DRAIN,
    PARENT_SIGNALS,
    STOP,
    Child,
    fork_child,
    reap_orphans,
)

END_SECONDS: Final = 10.0  # in which a process has to end, beyond its own time
_CHECK_SECONDS: Final = 0.5  # between two checks of the clock

# Work of a process, which gets callbacks for a heartbeat and for when it is ready;
# returns the exit code.
Run = Callable[[Callable[[], None], Callable[[], None]], int]
Guard = Callable[[Callable[[], int]], int]  # makes an exit code of errors


class Supervisor:
    """Executes the decisions of `Processes`. `runs` has the work of each process."""

    def __init__(
        self,
        processes: Processes,
        runs: Mapping[str, Run],
        guard: Guard,
        end_seconds: float,
        heartbeat_seconds: float,
        note_end: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        """`end_seconds`: seconds that a process has to end in; `heartbeat_seconds`:
        seconds without a heartbeat until it is killed, or 0. `note_end` is called with
        the name of each process that has ended, and its exit code, or its signal
        (negative).
        """
        self._note_end = note_end
        self._processes = processes
        self._runs = runs
        self._guard = guard
        self._end_seconds = end_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._children: dict[str, Child] = {}  # by name
        self._due: dict[str, float] = {}  # when a process is to be started
        self._signals: list[int] = []
        self._deadline: float | None = None
        self._reports, self._reports_end = os.pipe()

    def run(self, ready: Callable[[], None]) -> int:
        """Watch until all have ended; returns the exit code. `ready` is called when all
        processes are ready for the first time.
        """
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(self._reports, False)
        old_handlers = {number: signal.getsignal(number) for number in PARENT_SIGNALS}
        for number in PARENT_SIGNALS:
            signal.signal(number, self._note_signal)
        old_wakeup_fd = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
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
            signal.set_wakeup_fd(old_wakeup_fd)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            for pipe in (woken, waker, self._reports, self._reports_end):
                os.close(pipe)
        return self._processes.code

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _select_timeout(self) -> float:
        until_due = min(self._due.values(), default=float("inf")) - time.monotonic()
        return max(0.0, min(_CHECK_SECONDS, until_due))

    def _read_reports(self, reports: str, ready: Callable[[], None]) -> None:
        for name in reports.split("\n"):
            if name in self._runs and self._processes.note_ready(name):
                ready()

    def _check_processes(self) -> None:
        """Handle signals, ended and hanging processes, and starts that are due."""
        while self._signals:
            interrupt = self._signals.pop(0) == signal.SIGINT
            self._execute(self._processes.note_signal(interrupt=interrupt))
            wait = self._end_seconds if self._processes.phase == "draining" else 0.0
            self._deadline = time.monotonic() + wait + END_SECONDS
        self._reap()
        now = time.monotonic()
        self._check_heartbeats(now)
        if self._processes.phase == "stopping" and self._deadline is None:
            self._deadline = now + END_SECONDS
        if self._deadline is not None and now > self._deadline:
            self._deadline = now + END_SECONDS
            self._execute(self._processes.note_timeout())
        for name in [name for name, due_time in self._due.items() if due_time <= now]:
            del self._due[name]
            if self._processes.may_start(name):
                self._start(name)

    def _reap(self) -> None:
        """Reap processes that have ended, and act on it."""
        for name, child in [*self._children.items()]:
            code = child.poll()
            if code is None:
                continue
            del self._children[name]
            self._note_end(name, code)
            before = self._processes.phase
            actions = self._processes.note_ended(name, code if code >= 0 else 128 - code)
            _report_end(name, code, before, actions)
            self._execute(actions)
        reap_orphans({child.pid for child in self._children.values()})

    def _check_heartbeats(self, now: float) -> None:
        """Kill a process that runs but sends no heartbeat."""
        for name, child in self._children.items():
            if not child.hangs(now, ready=name in self._processes.ready):
                continue
            if actions := self._processes.note_hang(name):
                reason = "has not answered for too long (--engine-timeout); it is killed"
                print(f"minfer: {name} {reason}", file=sys.stderr, flush=True)
                self._execute(actions)

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._due[action.name] = time.monotonic() + action.pause
            elif child := self._children.get(action.name):
                child.signal(_SIGNALS[action.how])

    def _start(self, name: str) -> None:
        def run(beat: Callable[[], None]) -> int:
            return self._guard(lambda: self._runs[name](beat, ready))

        def ready() -> None:
            with contextlib.suppress(OSError):  # the parent has gone
                os.write(self._reports_end, f"{name}\n".encode())

        self._children[name] = fork_child(run, name, self._heartbeat_seconds)
        self._processes.note_started(name)


_SIGNALS: Final = {"drain": DRAIN, "stop": STOP, "kill": signal.SIGKILL}


def _report_end(name: str, code: int, phase: str, actions: list[Action]) -> None:
    """Print why a process is restarted, or why the server ends."""
    ending = f"with {code}" if code >= 0 else f"by signal {-code}"
    if any(isinstance(action, Start) for action in actions):
        print(f"minfer: {name} ended {ending}; it is started again", file=sys.stderr)
    elif phase == "watching" and code < 0:  # otherwise it has printed the reason
        print(f"minfer: {name} ended {ending}; the server ends", file=sys.stderr)
    sys.stderr.flush()
