"""Fair shares of tokens, and of seats and joins: what `fair` names.

Fair queueing says who goes first, and that is not all that neighbours feel. A step is as
long as what is in it: rows that decode cost each of the others a little, and a step that
newcomers join costs as much as two. So a client that asks for everything at once is
bounded in both while others run, and lets others pass when it has had its share:

- It holds as many seats as all others together, times `GROWTH`: one beside 16 streams
  has 32, and two that want all double in turns until the machine is full.
- Once it holds a seat, more of its requests join at one step of `JOIN_EVERY` only, and
  few at once. So most steps have no newcomer, however fast a client asks or leaves.
  While the host is not ready for anybody who runs, no step is taken that could be the
  fourth, and no neighbour waits for one: then it joins at any.

A client that has the machine for itself is bounded in nothing.
"""

from functools import partial
from typing import Any, Final

from attrs import field, frozen

from minfer.checks import number
from minfer.pmap import Map
from minfer.policy import Load, Rank
from minfer.policy_fair import Accounts, FairQueue
from minfer.record import evolve
from minfer.request import Request

GROWTH: Final = 2  # seats of a client for each that others hold
PART: Final = 8  # of all seats, one in so many is anybody's
JOIN_EVERY: Final = 4  # steps
# Of those who run, one in so many may come anew in such a step: then sequences of 64
# tokens and more still fill the machine, whoever shares it.
RENEWED: Final = 16
LINGER: Final = 1.0  # seconds for which others count who have just ended
STALE: Final = LINGER / 4  # seconds, after which it is noted anew that they are there

_number: Final = partial(number, of="scheduling policy: ")
_NONE: Final = Map[int, int]()


@frozen
class Beside:
    """What was beside a client when it wanted more."""

    seats: int  # of others
    time: float  # seconds


@frozen
class Seats(Accounts):
    """The accounts, and who has been let in and has not ended."""

    held: Map[str, Map[int, int]] = Map()  # client -> class -> samples
    taken: Map[int, int] = Map()  # class -> samples of all clients
    # Of clients that have seats and wait for more beside others, or did lately.
    beside: Map[str, Beside] = Map()

    def moved(self, request: Request, by: int) -> "Seats":
        """With so many samples more, or less, of a request's client and class."""
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
        """Note how many seats others have, unless they have had more until now: between
        two answers of all others a client shall not take everything.
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

    Others are those of its class and of more urgent ones: the less urgent bound nobody.
    Guarantees, beside those of `FairQueue` between clients that are not held back:

    - While others hold s seats, a client is let in to no more than 2 s, or an eighth of
      all seats, or `least`, whichever is the most.
    - While others hold a seat, it joins at every fourth step at most, but for its first
      seat and where all who run are paused; and no more than `newcomers` at once, or one
      for each 16 that run.
    - Where no others run, nor have for a second, it is held back in nothing; so nobody
      waits for ever.
    """

    least: int = field(default=8, validator=_number(1))  # seats that anybody may have
    newcomers: int = field(default=4, validator=_number(1))  # of a client, in a step

    def start(self) -> Seats:
        return Seats(limit=self.clients)

    def holds_back(
        self, state: Seats, request: Request, load: Load, came: int
    ) -> tuple[bool, Seats]:
        """Hold back who has its share, or has to wait for a step that others join."""
        mine = state.mine(request.client)
        if not mine:
            return False, state
        state = state.lately(request, load.time)
        others = state.beside[request.client].seats
        if not others:
            return False, state
        # Nobody feels who joins a step that would not be, nor does its number pass.
        waits = load.step % JOIN_EVERY and not load.paused
        if waits or came >= max(self.newcomers, load.running // RENEWED):
            return True, state
        due = GROWTH * others * self._weight(request)
        return mine >= max(self.least, load.seats // PART, due), state

    def admitted(self, state: Any, rank: Rank, request: Request, load: Load) -> Accounts:
        """One more seat is taken."""
        told: Any = super().admitted(state, rank, request, load)
        seats: Seats = told.moved(request, 1)
        return seats

    def ended(self, state: Any, request: Request, output: int, ran: bool) -> Accounts:
        """Its seat is free, if it had one."""
        told: Any = super().ended(state, request, output, ran)
        seats: Seats = told.moved(request, -1) if ran else told
        return seats
