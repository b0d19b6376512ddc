"""Scheduling policy: who goes first, who gives way, how much at once, and whether to
wait.

A policy is an object with eleven pure functions. It decides order and appetite only: that
blocks are conserved, budgets kept and nobody is planned twice is the engine's business
whatever a policy says. State of its own lives inside `EngineState` and is passed in;
policies hold none.
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
    running: int  # sequences that run, those that this step lets in included
    available: int  # blocks free or evictable
    arrived: float  # arrival time of the first in line, seconds; now if nobody waits
    budget: int  # tokens a step may take, from the configuration
    seats: int = 0  # sequences that may run at once, from the configuration
    step: int = 0  # number of the step that is planned
    # Whether all who run, and have been let in, are paused: if nobody else is let in,
    # there is no step, and this number stays what it is until one of them goes on.
    paused: bool = False


class Policy(Protocol):
    """What the engine asks. Every answer must be a function of the arguments alone.

    The answers here are those of first come, first served: a policy says only what
    differs.
    """

    def start(self) -> Any:
        """Return the policy's first state: an immutable value."""
        return None

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        """Place a new request in line. Lower goes first.

        Of one that brings a place along (`Request.place`), only the new state counts.
        """
        return (), state

    def again(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        """Place a sequence that was preempted with `done` output tokens; never behind
        `rank`.
        """
        return rank

    def admit_from(self, state: Any, load: Load) -> float:
        """Return the time from which the first in line may start; now or earlier: at
        once.

        Infinity waits for something else to happen; while nothing runs it is not heeded.
        """
        return load.time

    def holds_back(
        self, state: Any, request: Request, load: Load, came: int
    ) -> tuple[bool, Any]:
        """Say whether a client must let others pass for now: its next one is `request`,
        and this step has let in `came` of its own.

        It is not asked while nothing runs, nor of who has been in and gave way.
        """
        return False, state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Any:
        """Learn that a sample starts for the first time; `load` is from just
        before it.
        """
        return state

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Any:
        """Learn that a sample has ended after `output` tokens, and whether it
        ever ran.
        """
        return state

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        """Choose who gives its blocks back, as an index into `ranks`, sorted; never the
        first.
        """
        return len(ranks) - 1

    def displaces(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """Say whether who is next in line may take the place of the last that runs."""
        return False

    def budget(self, state: Any, load: Load) -> int:
        """Return the tokens to schedule in this step; the engine keeps it within its
        limits.
        """
        return load.budget

    def drafts(self, state: Any, load: Load, most: int) -> int:
        """Return how many drafts a row may have in this step; the engine keeps it within
        `most`.
        """
        return most


@frozen
class FirstCome(Policy):
    """First come, first served.

    Guarantee: a request is admitted after all that arrived before it, a finite number
    each of which ends. The latest arrival gives way when blocks run out.
    """
