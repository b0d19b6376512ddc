"""A server's processes: the actions when one of them ends.

    watching -- an engine ended --> it is restarted, after a pause
             -- an engine or an API server hangs --> it is killed
             -- an engine of torchrun's ended --> stopping: torchrun starts all again
             -- an API server ended --> it is restarted; its connections are lost
             -- one that was never ready ended, or one several times --> stopping
             -- SIGTERM --> draining: API servers take no new requests
             -- SIGINT --> stopping
    draining -- an engine or an API server hangs --> it is killed
             -- an engine ended --> it is restarted: API servers finish their requests
             -- another signal, or the last API server ended --> stopping
    stopping -- the last API server ended --> the engines are stopped
             -- the last process ended --> over, with an exit code

Of several engines, the replicas, each is restarted by itself; one that fails again and
again ends the server only if no other one is ready: else it is tried again, more seldom.

Decisions are made here, as a function of events; processes and signals are in
`minfer.effects.cluster.processes.supervisor`.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

ENGINE: Final = "engine"
MAX_FAILED_STARTS: Final = 5  # in a row, of one process before it was ready
FIRST_PAUSE_SECONDS: Final = 0.1  # before a process is restarted; doubled each time
FAILED_EXIT_CODE: Final = 70  # of a server with a process that fails again and again
MAX_PAUSE_SECONDS: Final = 60.0  # it is doubled up to this
_MAX_DOUBLINGS: Final = 10  # which exceed that
INTERRUPTED_EXIT_CODE: Final = 130  # after a SIGINT: 128 and its number


def api_server_name(number: int) -> str:
    """Returns the name of an API server's process."""
    return f"api {number}"


def engine_names(replicas: int) -> list[str]:
    """Returns the names of the engines' processes."""
    numbered = [f"{ENGINE} {number}" for number in range(replicas)]
    return [ENGINE] if replicas == 1 else numbered


def restart_pause(failures: int) -> float:
    """Returns the seconds before a process is restarted that ended `failures` times in a
    row before it was ready.
    """
    return min(
        FIRST_PAUSE_SECONDS * 2.0 ** min(failures, _MAX_DOUBLINGS), MAX_PAUSE_SECONDS
    )


@frozen
class Start:
    """Start a process, after a pause in seconds."""

    name: str
    pause: float = 0.0


@frozen
class Signal:
    """Signal a process to end: "drain", when its requests have ended; "stop", now;
    "kill", in any case.
    """

    name: str
    how: str


Action = Start | Signal


@define
class Processes:
    """The processes that exist, and the phase of the server."""

    api_servers: int
    replicas: int = 1  # engines
    by_torchrun: bool = False  # which starts all again, when one of them has ended
    alive: set[str] = field(factory=set)
    ready: set[str] = field(factory=set)  # those that have reported it
    phase: str = "watching"  # then "draining", then "stopping"
    code: int = 0  # the server's, once all have ended
    served: bool = False  # all have been ready at once
    failures: dict[str, int] = field(factory=dict)  # in a row, before it was ready
    hung: set[str] = field(factory=set)  # those that are killed as they hang

    @property
    def over(self) -> bool:
        """Whether the server has ended."""
        return self.phase == "stopping" and not self.alive

    def begin(self) -> list[Action]:
        """Start all processes."""
        return [Start(name) for name in (*self._engines(), *self._api_servers())]

    def note_started(self, name: str) -> None:
        """Note that a process runs."""
        self.alive.add(name)
        self.hung.discard(name)

    def may_start(self, name: str) -> bool:
        """Returns whether a process that is due may still be started."""
        is_engine = name in self._engines()
        is_needed = is_engine and self.phase == "draining" and self._api_servers_alive()
        return self.phase == "watching" or bool(is_needed)

    def note_ready(self, name: str) -> bool:
        """Note that a process is ready; returns whether all are, for the first time."""
        if name not in self.alive:  # it reported that, and ended
            return False
        self.ready.add(name)
        self.failures.pop(name, None)
        first = not self.served and len(self.ready) == self.api_servers + self.replicas
        self.served = self.served or first
        return first

    def note_ended(self, name: str, code: int) -> list[Action]:
        """Note that a process has ended, with this exit code."""
        self.alive.discard(name)
        was_ready = name in self.ready
        self.ready.discard(name)
        if not self.may_start(name):
            is_engine = name in self._engines()
            return [] if is_engine or self._api_servers_alive() else self._stop()
        count = 0 if was_ready else self.failures.get(name, 0) + 1
        self.failures[name] = count
        is_first_start = not self.served and not was_ready
        ends_server = is_first_start or (self.by_torchrun and name in self._engines())
        other_ready = name in self._engines() and self.ready.intersection(self._engines())
        if ends_server or (count >= MAX_FAILED_STARTS and not other_ready):
            self.code = code or FAILED_EXIT_CODE
            return self._stop()
        return [Start(name, restart_pause(count))]

    def note_hang(self, name: str) -> list[Action]:
        """Kill a process that hangs: it will end, and be restarted. While stopping, it
        keeps its time to end.
        """
        if self.phase == "stopping":
            return []
        self.hung.add(name)
        return [Signal(name, "kill")]

    def note_signal(self, *, interrupt: bool) -> list[Action]:
        """Note a signal to end; an interrupt stops at once."""
        if interrupt:
            self.code = INTERRUPTED_EXIT_CODE
        if self.phase != "watching" or interrupt or not self._api_servers_alive():
            return self._stop()
        self.phase = "draining"
        return [Signal(name, "drain") for name in self._api_servers_alive()]

    def note_timeout(self) -> list[Action]:
        """Kill the processes that did not end in time."""
        self.phase = "stopping"
        return [Signal(name, "kill") for name in sorted(self.alive)]

    def _stop(self) -> list[Action]:
        """Stop the API servers first, so that they notify their clients; then the
        engines.
        """
        self.phase = "stopping"
        names = self._api_servers_alive() or self._engines()
        return [Signal(name, "stop") for name in names if name in self.alive]

    def _engines(self) -> Sequence[str]:
        return engine_names(self.replicas)

    def _api_servers(self) -> Sequence[str]:
        return [api_server_name(number) for number in range(self.api_servers)]

    def _api_servers_alive(self) -> list[str]:
        return [name for name in self._api_servers() if name in self.alive]
