"""Scheduling policy: who goes first, who gives way, how much at once, and whether to wait.

A policy is an object with six pure functions. It decides order and appetite only: that blocks are
conserved, budgets kept and nobody is planned twice is the engine's business whatever a policy
says. State of its own lives inside `EngineState` and is passed in; policies hold none.
"""

from typing import Any, Protocol

from attrs import frozen

from minfer.request import Request

Rank = tuple[float, ...]  # lower goes first; the engine breaks ties by arrival


@frozen
class Load:
    """What a policy may look at when it decides for a whole step."""

    time: float  # of this turn, seconds
    waiting: int  # samples that wait
    running: int  # sequences that run
    available: int  # blocks free or evictable
    oldest: float  # arrival time of the first in line, seconds
    budget: int  # tokens a step may take, from the configuration


class Policy(Protocol):
    """What the engine asks. Every answer must be a function of the arguments alone."""

    def start(self) -> Any:
        """Return the policy's first state: an immutable value."""
        ...

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        """Place a new request in line, once; the place survives preemption. Lower goes first."""
        ...

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        """Choose who gives its blocks back, as an index into `ranks`, sorted; never the first."""
        ...

    def displaces(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """Say whether the first in line may take the place of the last that runs."""
        ...

    def budget(self, state: Any, load: Load) -> int:
        """Return the tokens to schedule in this step; the engine keeps it within its limits."""
        ...

    def admit_from(self, state: Any, load: Load) -> float:
        """Return the time from which the first in line may start; now or earlier: at once."""
        ...


@frozen
class FirstCome:
    """First come, first served: a request is admitted after all that arrived before it.

    The latest arrival gives way when blocks run out. Nobody starves: a request waits for a finite
    number of earlier ones only, each of which ends.
    """

    def start(self) -> None:
        """Keep no state."""

    def rank(self, state: None, request: Request, time: float) -> tuple[Rank, None]:
        """Leave the order to arrival."""
        del request, time
        return (), state

    def victim(self, state: None, ranks: tuple[Rank, ...]) -> int:
        """Let the last in rank give way."""
        del state
        return len(ranks) - 1

    def displaces(self, state: None, waiting: Rank, running: Rank) -> bool:
        """Nobody takes a place from one that came before."""
        del state, waiting, running
        return False

    def budget(self, state: None, load: Load) -> int:
        """Take all that the configuration allows."""
        del state
        return load.budget

    def admit_from(self, state: None, load: Load) -> float:
        """Never wait."""
        del state
        return load.time


@frozen
class Priority(FirstCome):
    """Lower `priority` first, first come within one; a waiting request displaces a less urgent one.

    Among equals it is first come, first served. A stream of urgent requests may starve the others:
    that is what strict priority means.
    """

    def rank(self, state: None, request: Request, time: float) -> tuple[Rank, None]:
        """Order by priority, then by arrival."""
        del time
        return (float(request.priority),), state

    def displaces(self, state: None, waiting: Rank, running: Rank) -> bool:
        """Give way to a strictly more urgent request."""
        del state
        return waiting < running
