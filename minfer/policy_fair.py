"""Fair shares of tokens between clients, class by class; `fair` has seats shared, too
(`minfer.policy_seats`).

Start-time fair queueing (Goyal et al., 1996) keeps an account for each client: how far it
has got in virtual time, which advances with the tokens that are let in. A request starts
where its client's account stands, and whoever starts first goes first. Here each class of
priority has a time and accounts of its own, so that what a class has waited for others
is not held against anybody in it.

A rank is (class, start), both fixed at arrival: nobody who waits is ever looked at again,
and what a request costs the policy is a few entries of persistent maps.
"""

import math
from functools import partial
from typing import Any, Final

import attrs
from attrs import field, frozen

from minfer.checks import MOST, ConfigError, is_number, number
from minfer.pmap import Map
from minfer.policy import FirstCome, Load, Rank
from minfer.record import evolve
from minfer.request import Request

_number: Final = partial(number, of="scheduling policy: ")

Owner = tuple[int, str]  # of an account: class and client


def positive_weights(
    _: object, attribute: "attrs.Attribute[Any]", weights: Map[str, float]
) -> None:
    """Raise ConfigError unless each client's weight is a number above 0."""
    for client, weight in weights.items():
        if not is_number(weight) or not 0 < weight <= MOST:
            what = f"scheduling policy: {attribute.name} must be numbers above 0"
            raise ConfigError(f"{what}; that of {client!r:.80} is not")


@frozen
class Account:
    """What a client has had in a class, in virtual time."""

    end: float = 0.0  # of all that it asked for, less what it did not use
    start: float = 0.0  # of its last request; what comes later starts no earlier
    live: int = 0  # samples that wait or run


@frozen
class Accounts:
    """All accounts, and where each class's virtual time stands."""

    times: Map[int, float] = Map()
    by_owner: Map[Owner, Account] = Map()
    limit: int = 1024  # of accounts, at which those that matter least are forgotten

    def time(self, level: int) -> float:
        """Virtual time of a class."""
        return self.times.get(level, 0.0)

    def with_room(self, least: int) -> "Accounts":
        """Keep who has something here, and of the others those who are furthest ahead of
        their class, half of `least` at most: with who comes from anywhere once, there is
        no end of them. A class in which nobody has anything begins anew. Names decide
        nothing.
        """
        every = self.by_owner.items()
        times = {owner[0]: self.time(owner[0]) for owner, one in every if one.live}
        ahead = {
            owner: one.end - times.get(owner[0], math.inf)
            for owner, one in every
            if not one.live
        }
        bar = max([0.0, *sorted(ahead.values(), reverse=True)[least // 2 :][:1]])
        kept = {owner: one for owner, one in every if one.live or ahead[owner] > bar}
        limit = max(least, 2 * len(kept))
        return evolve(self, times=Map(times), by_owner=Map(kept), limit=limit)


@frozen
class FairQueue(FirstCome):
    """The more urgent class first, and within a class fair shares between clients.

    A class is a `priority`; lower goes first, and takes the place of a less urgent one
    that runs. A request costs the tokens of its prompt and the output it may have; what
    it did not use is given back when it ends. Guarantees:

    - Nobody is admitted while someone of a more urgent class waits. A stream of urgent
      requests may starve the less urgent, and that is what a priority means.
    - Of two clients of a class that always have something waiting in it, neither is let
      in for more tokens than the other, less what was given back, by more than the
      largest request of each, whatever they had before. So nobody starves behind others
      of its class.
    - A client's first request is overtaken by nobody of its class who comes later.
    - One client's requests of a class are admitted in the order in which they came.
    """

    # Of clients that are due more or less than one share.
    weights: Map[str, float] = field(default=Map(), validator=positive_weights)
    clients: int = field(default=1024, validator=_number(1))  # see `Accounts.limit`

    def start(self) -> Accounts:
        return Accounts(limit=self.clients)

    def rank(
        self, state: Accounts, request: Request, time: float
    ) -> tuple[Rank, Accounts]:
        """Start where the client's account stands, but neither in the past nor before
        what it asked for earlier, which may have started too late for what was used.
        """
        owner = request.priority, request.client
        if owner not in state.by_owner and len(state.by_owner) >= state.limit:
            state = state.with_room(self.clients)
        now = state.time(request.priority)
        account = state.by_owner.get(owner, Account())
        begin = max(now, account.end)
        start = max(begin, account.start) if account.live else begin
        cost = _prompt_cost(request) + request.n * request.max_tokens
        end = begin + cost / self._weight(request)
        account = Account(end, start, account.live + request.n)
        state = evolve(state, by_owner=state.by_owner.set(owner, account))
        return (float(request.priority), start), state

    def displaces(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """For the sake of a class, and never within one."""
        return waiting[0] < running[0]

    def admitted(
        self, state: Accounts, rank: Rank, request: Request, load: Load
    ) -> Accounts:
        """A class's virtual time is the start of whoever was admitted last in it."""
        now = max(state.time(request.priority), rank[-1])
        return evolve(state, times=state.times.set(request.priority, now))

    def ended(
        self, state: Accounts, request: Request, output: int, ran: bool
    ) -> Accounts:
        """Give back what was not used."""
        owner = request.priority, request.client
        account = state.by_owner.get(owner)
        if account is None:
            return state
        prompt = 0 if ran else _prompt_cost(request) / request.n
        unused = (request.max_tokens - output + prompt) / self._weight(request)
        left = Account(account.end - unused, account.start, max(0, account.live - 1))
        return evolve(state, by_owner=state.by_owner.set(owner, left))

    def _weight(self, request: Request) -> float:
        return self.weights.get(request.client, 1.0)


def _prompt_cost(request: Request) -> int:
    """Tokens of a prompt; of one that goes on with another's work, that has paid them."""
    return len(request.prompt) if request.place is None else 0
