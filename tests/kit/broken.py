"""Policies that break the protocol, each in one way that its author would not notice.

All but `ShortestFirst` and those of drafts were written from the protocol's documentation
alone, before there was a check to find them. `test_kit.py` and `ten_runs.py` demand that
each is found.
"""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

import math
from typing import Any, Final

from attrs import define, field, frozen

from minfer.records.policy import FirstCome, Load, Policy, Rank
from minfer.records.request import Request


@frozen
class GivesBackTheBiggest(FirstCome):
    """The sample that has run longest holds most blocks, so let it give them back: the
    first in rank.
    """

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        return 0


@frozen
class PaysForPreemption(FirstCome):
    """Who was preempted has had its turn: it goes behind those that have had nothing."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (time,), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        return (rank[0] + done,)


@define
class TakesTurns(FirstCome):
    """Round robin between clients, by counts that the object keeps for itself."""

    had: dict[str, int] = field(factory=dict)  # client -> requests let in

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(self.had.get(request.client, 0)), time), state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Any:
        self.had[request.client] = self.had.get(request.client, 0) + 1
        return state


@frozen
class CountsInPlace(FirstCome):
    """The same, with counts in the policy's state, which it changes in place."""

    def start(self) -> dict[str, int]:
        return {}

    def rank(
        self, state: dict[str, int], request: Request, time: float
    ) -> tuple[Rank, Any]:
        state[request.client] = state.get(request.client, 0) + 1
        return (float(state[request.client]), time), state


@frozen
class TossesACoin(FirstCome):
    """Spreads equal requests by where their objects happen to lie in memory."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(id(request) // 64 % 8),), state


@frozen
class WaitsForQuiet(FirstCome):
    """Lets a burst arrive in full: none starts until none came for
    `quiet` seconds.
    """

    quiet: float = 0.05

    def start(self) -> float:
        """When a request came last."""
        return -math.inf

    def rank(self, state: float, request: Request, time: float) -> tuple[Rank, float]:
        return (), time

    def admit_from(self, state: float, load: Load) -> float:
        return state + self.quiet


@frozen
class WaitsForCompany(FirstCome):
    """Waits for a batch of three, a moment at a time."""

    def admit_from(self, state: Any, load: Load) -> float:
        return load.time if load.waiting >= 3 else load.time + 0.01


@frozen
class ByUrgency(FirstCome):
    """Orders by how urgent a request is, on a scale that not every request is on."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (round(math.log2(request.deadline)) * request.max_tokens, time), state


@frozen
class WeighsDeadlines(FirstCome):
    """Adds up time, deadline and priority with weights; none has a deadline and no
    weight.
    """

    weight: float = 0.0

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (time + request.priority + self.weight * request.deadline,), state


@frozen
class SavesBlocks(FirstCome):
    """Takes fewer tokens a step when blocks run low: none when they have run out."""

    reserve: int = 8

    def budget(self, state: Any, load: Load) -> int:
        return min(load.budget, 4 * (load.available - self.reserve))


@frozen
class Halves(FirstCome):
    """Takes half of the budget while others wait, so that each step is short."""

    def budget(self, state: Any, load: Load) -> int:
        # The bug.
        return load.budget / 2 if load.waiting else load.budget  # type: ignore[return-value]


@frozen
class CountsSeats(FirstCome):
    """Lets `seats` requests in at a time, by a count that forgets who gave up before it
    ran.
    """

    seats: int = 2

    def start(self) -> int:
        """Seats that are taken or promised."""
        return 0

    def rank(self, state: int, request: Request, time: float) -> tuple[Rank, int]:
        return (), state + request.n

    def admit_from(self, state: int, load: Load) -> float:
        return load.time if load.running + load.waiting >= state else load.time + 1.0

    def ended(self, state: int, request: Request, output: int, ran: bool) -> int:
        return state - 1 if ran else state


@frozen
class FavoursTheFresh(FirstCome):
    """Newcomers go ahead of who has waited; the line moves, and its end never does."""

    def start(self) -> int:
        """Requests that came."""
        return 0

    def rank(self, state: int, request: Request, time: float) -> tuple[Rank, int]:
        return (-float(state // 3),), state + 1


@frozen
class ShortestFirst(FirstCome):
    """Fewest tokens first, and waiting counts for nothing: the long wait for ever."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(len(request.prompt) + request.max_tokens),), state


@frozen
class DraftsLessInLine(FirstCome):
    """A draft less for each that waits; of a long line, less than none."""

    def drafts(self, state: Any, load: Load, most: int) -> int:
        return most - load.waiting


@frozen
class SharesDrafts(FirstCome):
    """Those that wait count too; it is consulted where none does."""

    def drafts(self, state: Any, load: Load, most: int) -> int:
        return most // load.waiting


@define
class LearnsDrafts(FirstCome):
    """More drafts as time goes by, by what the object keeps for itself."""

    requested: list[float] = field(factory=list)  # times

    def drafts(self, state: Any, load: Load, most: int) -> int:
        self.requested.append(load.time)
        return min(most, len(self.requested) // 8)


BROKEN: Final[tuple[type[Policy], ...]] = (
    GivesBackTheBiggest,
    PaysForPreemption,
    TakesTurns,
    CountsInPlace,
    TossesACoin,
    WaitsForQuiet,
    WaitsForCompany,
    ByUrgency,
    WeighsDeadlines,
    SavesBlocks,
    Halves,
    CountsSeats,
    FavoursTheFresh,
    ShortestFirst,
    DraftsLessInLine,
    SharesDrafts,
    LearnsDrafts,
)
