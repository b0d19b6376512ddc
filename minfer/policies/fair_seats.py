"""Fair shares of tokens, of seats and of joins: the policy `fair`.

Fair queueing decides which request goes first, but other clients notice more than that.
A step is as long as its work: each decode row slows the others a little, and a step that
newcomers join costs as much as two. So a client that sends many requests at once is
bounded in both while others run, and is deferred when it has had its share:

- It holds as many seats as all others together, times `SEAT_RATIO`: beside 16 streams it
  has 32, and two greedy clients double in turns until the machine is full.
- Once it holds a seat, more of its requests join only at one step of `JOIN_EVERY_STEPS`,
  and few at once. So most steps have no newcomer, however fast a client sends or cancels.
  If all running samples are paused, no step is taken that could be the fourth, and no
  other client waits for one: then its requests join at any step.

A client that has the machine to itself is not bounded.
"""

from functools import partial
from typing import Any, Final

from attrs import field, frozen

from minfer.policies.fair_queue import Accounts, FairQueue
from minfer.records.policy import Load, Rank
from minfer.records.request import Request
from minfer.values.checks import number
from minfer.values.pmap import Map
from minfer.values.record import evolve

SEAT_RATIO: Final = 2  # seats of a client for each that others hold
MIN_SHARE_DIVISOR: Final = 8  # every client may have all seats divided by this
JOIN_EVERY_STEPS: Final = 4
# For each 16 running sequences, one may be new in such a step: then sequences of 64
# tokens and more still fill the machine, however it is shared.
RUNNING_PER_NEWCOMER: Final = 16
LINGER_SECONDS: Final = 1.0  # for which other clients count after their end
STALE_SECONDS: Final = LINGER_SECONDS / 4  # then their presence is recorded again

_number: Final = partial(number, prefix="scheduling policy: ")
_NONE: Final = Map[int, int]()


@frozen
class Beside:
    """The use of other clients when a client wanted more."""

    seats: int  # of others
    time: float  # seconds


@frozen
class Seats(Accounts):
    """The accounts, and the samples that are admitted and have not ended."""

    held: Map[str, Map[int, int]] = Map()  # client -> class -> samples
    taken: Map[int, int] = Map()  # class -> samples of all clients
    # Of clients that have seats and wait for more beside others, or did recently.
    beside: Map[str, Beside] = Map()

    def with_samples(self, request: Request, change: int) -> "Seats":
        """The seats with `change` more samples of a request's client and class."""
        client, level = request.client, request.priority
        totals = _add_count(self.taken, level, change)
        if classes := _add_count(self.held.get(client, _NONE), level, change):
            return evolve(self, held=self.held.set(client, classes), taken=totals)
        beside = self.beside.delete(client) if client in self.beside else self.beside
        return evolve(self, held=self.held.delete(client), taken=totals, beside=beside)

    def num_seats(self, client: str) -> int:
        """Seats of a client, in all classes."""
        return sum(self.held.get(client, _NONE).values())

    def num_other_seats(self, client: str, level: int) -> int:
        """Seats of other clients in a class and in those that are more urgent."""
        classes = self.held.get(client, _NONE)
        totals = self.taken.items()
        return sum(
            count - classes.get(other_level, 0)
            for other_level, count in totals
            if other_level <= level
        )

    def record_other_seats(self, request: Request, time: float) -> "Seats":
        """Record how many seats others have, unless they have had more until now, so that
        a client cannot take all seats in a short gap between the requests of the others.
        """
        seats = self.num_other_seats(request.client, request.priority)
        last = self.beside.get(request.client)
        if last is not None:
            age = time - last.time
            limit = LINGER_SECONDS if last.seats > seats else STALE_SECONDS
            if age < limit and last.seats >= seats:
                return self
        beside = Beside(seats, time)
        return evolve(self, beside=self.beside.set(request.client, beside))


def _add_count(counts: Map[int, int], level: int, change: int) -> Map[int, int]:
    count = counts.get(level, 0) + change
    return counts.set(level, count) if count else counts.delete(level)


@frozen
class FairSeats(FairQueue):
    """As `FairQueue`; and while others run, no client has more than its share of seats.

    Others are those of its class and of more urgent ones: less urgent ones do not bound
    it. Guarantees, beside those of `FairQueue` between clients that are not deferred:

    - While others hold s seats, a client is admitted to no more than 2 s, or an eighth of
      all seats, or `least`, whichever is the most.
    - While others hold a seat, it joins at every fourth step at most, except for its
      first seat and while all running samples are paused; and no more than `newcomers` at
      once, or one for each 16 that run.
    - If no others run, nor have for a second, it is never deferred; so no client waits
      forever.
    """

    # seats that every client may have
    least: int = field(default=8, validator=_number(1))
    newcomers: int = field(default=4, validator=_number(1))  # of a client, in a step

    def start(self) -> Seats:
        return Seats(limit=self.clients)

    def defer(
        self, state: Seats, request: Request, load: Load, came: int
    ) -> tuple[bool, Seats]:
        """Defer a client that has its share, or has to wait for the step at which it may
        join.
        """
        own_seats = state.num_seats(request.client)
        if not own_seats:
            return False, state
        state = state.record_other_seats(request, load.time)
        other_seats = state.beside[request.client].seats
        if not other_seats:
            return False, state
        # Joining a step that otherwise would not run slows no other client, and its
        # number stays.
        waits = load.step % JOIN_EVERY_STEPS and not load.paused
        if waits or came >= max(self.newcomers, load.running // RUNNING_PER_NEWCOMER):
            return True, state
        fair_seats = SEAT_RATIO * other_seats * self._weight(request)
        min_seats = max(self.least, load.seats // MIN_SHARE_DIVISOR)
        return own_seats >= max(min_seats, fair_seats), state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Accounts:
        """Count one more seat taken."""
        queue: Any = super().admitted(state, rank, request, load)
        seats: Seats = queue.with_samples(request, 1)
        return seats

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Accounts:
        """Free its seat, if it had one."""
        queue: Any = super().ended(state, request, output, ran)
        seats: Seats = queue.with_samples(request, -1) if ran else queue
        return seats
