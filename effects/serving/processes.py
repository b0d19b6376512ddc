"""A server's processes: what is done when one of them ends.

    watching -- the engine ended --> it is started again, after a pause
             -- the engine hangs --> it is killed
             -- a front ended --> likewise; its connections are gone
             -- one that was never ready ended, or one several times --> stopping
             -- SIGTERM --> draining: fronts take nothing new
             -- SIGINT --> stopping
    draining -- the engine ended --> it is started again: fronts finish what they serve
             -- another signal, or the last front ended --> stopping
    stopping -- the last front ended --> the engine is told to end
             -- the last process ended --> over, with an exit code

Decisions are here, as a function of what happened; processes and signals are in
`minfer.effects.serving.supervisor`.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

ENGINE: Final = "engine"
MOST_FAILURES: Final = 5  # engines in a row that ended before they were ready
FIRST_PAUSE: Final = 0.1  # seconds before a process is started again; doubled each time
FAILED: Final = 70  # exit code of a server whose engine cannot be kept up
INTERRUPTED: Final = 130  # exit code after a SIGINT: 128 and its number


def front_name(number: int) -> str:
    """The name of a front's process."""
    return f"front {number}"


@frozen
class Start:
    """Start a process, after a pause in seconds."""

    name: str
    pause: float = 0.0


@frozen
class Signal:
    """Tell a process to end: "drain", when what it serves has ended; "stop", now;
    "kill", whether it hears or not.
    """

    name: str
    how: str


Action = Start | Signal


@define
class Processes:
    """Which processes there are, and in which phase the server is."""

    fronts: int
    alive: set[str] = field(factory=set)
    ready: set[str] = field(factory=set)  # those that have said so
    phase: str = "watching"  # then "draining", then "stopping"
    code: int = 0  # the server's, once all have ended
    served: bool = False  # all have been ready at once
    failures: dict[str, int] = field(factory=dict)  # in a row, before it was ready

    @property
    def over(self) -> bool:
        """Whether nothing is left to be waited for."""
        return self.phase == "stopping" and not self.alive

    def begin(self) -> list[Action]:
        """Start all."""
        return [Start(ENGINE), *[Start(name) for name in self._fronts()]]

    def started(self, name: str) -> None:
        """Learn that a process runs."""
        self.alive.add(name)

    def may_start(self, name: str) -> bool:
        """Whether a process that is due is to be started still."""
        needed = name == ENGINE and self.phase == "draining" and self._fronts_alive()
        return self.phase == "watching" or bool(needed)

    def said_ready(self, name: str) -> bool:
        """Learn that a process is ready; whether all are now, for the first time."""
        if name not in self.alive:  # it said so, and ended
            return False
        self.ready.add(name)
        self.failures.pop(name, None)
        first = not self.served and len(self.ready) == self.fronts + 1
        self.served = self.served or first
        return first

    def ended(self, name: str, code: int) -> list[Action]:
        """Learn that a process has ended, with this exit code."""
        self.alive.discard(name)
        was_ready = name in self.ready
        self.ready.discard(name)
        if not self.may_start(name):
            return [] if name == ENGINE or self._fronts_alive() else self._stop()
        count = 0 if was_ready else self.failures.get(name, 0) + 1
        self.failures[name] = count
        never = not self.served and not was_ready
        if never or count >= MOST_FAILURES:
            self.code = code or FAILED
            return self._stop()
        return [Start(name, FIRST_PAUSE * 2**count)]

    def hung(self, name: str) -> list[Action]:
        """Learn that a process is there, and does nothing: it will end, and be started
        again. One that was told to end has its time.
        """
        return [] if self.phase == "stopping" else [Signal(name, "kill")]

    def signalled(self, *, interrupt: bool) -> list[Action]:
        """Learn of a signal to end; an interrupt is one that does not want to wait."""
        if interrupt:
            self.code = INTERRUPTED
        if self.phase != "watching" or interrupt or not self._fronts_alive():
            return self._stop()
        self.phase = "draining"
        return [Signal(name, "drain") for name in self._fronts_alive()]

    def timed_out(self) -> list[Action]:
        """Learn that who was told to end has not done so."""
        self.phase = "stopping"
        return [Signal(name, "kill") for name in sorted(self.alive)]

    def _stop(self) -> list[Action]:
        """The engine goes last: fronts have to tell their clients that they stop."""
        self.phase = "stopping"
        names = self._fronts_alive() or [ENGINE]
        return [Signal(name, "stop") for name in names if name in self.alive]

    def _fronts(self) -> Sequence[str]:
        return [front_name(number) for number in range(self.fronts)]

    def _fronts_alive(self) -> list[str]:
        return [name for name in self._fronts() if name in self.alive]
