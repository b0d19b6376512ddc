"""Fair shares of tokens, of seats and of joins: the policy `fair`.

Fair queueing decides which request goes first, but other clients notice more than that.
A step is as long as its work: each decode row slows the others a little, and a step that
newcomers join costs as much as two. So a client that sends many requests at once is
bounded in both while others run, and is deferred when it has had its share:

- It holds as many seats as all others together, times `GROWTH`: beside 16 streams it has
  32, and two greedy clients double in turns until the machine is full.
- Once it holds a seat, more of its requests join only at one step of `JOIN_EVERY`, and
  few at once. So most steps have no newcomer, however fast a client sends or cancels. If
  all running samples are paused, no step is taken that could be the fourth, and no other
  client waits for one: then its requests join at any step.

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

GROWTH: Final = 2  # seats of a client for each that others hold
PART: Final = 8  # every client may have this fraction (1 / PART) of all seats
JOIN_EVERY: Final = 4  # steps
# Of the running sequences, one in so many may be new in such a step: then sequences of 64
# tokens and more still fill the machine, however it is shared.
RENEWED: Final = 16
LINGER: Final = 1.0  # seconds for which other clients count after their end
STALE: Final = LINGER / 4  # seconds after which their presence is recorded again

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

    def moved(self, request: Request, by: int) -> "Seats":
        """The seats with `by` samples more of a request's client and class."""
        client, level = request.client, request.priority
        own, taken = self.held.get(client, _NONE), _counted(self.taken, level, by)
        if own := _counted(own, level, by):
            return evolve(self, held=self.held.set(client, own), taken=taken)
        beside = self.beside.delete(client) if client in self.beside else self.beside
        return evolve(self, held=self.held.delete(client), taken=taken, beside=beside)

    def mine(self, client: str) -> int:
        """Seats of a client, in all classes."""
        return sum(self.held.get(client, _NONE).values())

    def others(self, client: str, level: int) -> int:
        """Seats of other clients in a class and in those that are more urgent."""
        own = self.held.get(client, _NONE)
        every = self.taken.items()
        return sum(many - own.get(one, 0) for one, many in every if one <= level)

    def lately(self, request: Request, time: float) -> "Seats":
        """Record how many seats others have, unless they have had more until now, so that
        a client cannot take all seats in a short gap between the requests of the others.
        """
        now = self.others(request.client, request.priority)
        was = self.beside.get(request.client)
        if was is not None:
            age = time - was.time
            if age < (LINGER if was.seats > now else STALE) and was.seats >= now:
                return self
        found = Beside(now, time)
        return evolve(self, beside=self.beside.set(request.client, found))


def _counted(counts: Map[int, int], level: int, by: int) -> Map[int, int]:
    now = counts.get(level, 0) + by
    return counts.set(level, now) if now else counts.delete(level)


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
        mine = state.mine(request.client)
        if not mine:
            return False, state
        state = state.lately(request, load.time)
        others = state.beside[request.client].seats
        if not others:
            return False, state
        # Joining a step that otherwise would not run slows no other client, and its
        # number stays.
        waits = load.step % JOIN_EVERY and not load.paused
        if waits or came >= max(self.newcomers, load.running // RENEWED):
            return True, state
        due = GROWTH * others * self._weight(request)
        return mine >= max(self.least, load.seats // PART, due), state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Accounts:
        """Count one more seat taken."""
        queue: Any = super().admitted(state, rank, request, load)
        seats: Seats = queue.moved(request, 1)
        return seats

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Accounts:
        """Free its seat, if it had one."""
        queue: Any = super().ended(state, request, output, ran)
        seats: Seats = queue.moved(request, -1) if ran else queue
        return seats
