"""Fair shares of tokens between clients, within each class; the policy `fair` shares
seats, too (`minfer.policies.fair_seats`).

Start-time fair queueing (Goyal et al., 1996) keeps an account for each client: its
position in virtual time, which advances with the admitted tokens. A request starts at its
client's account, and the earliest start goes first. Here each class of priority has its
own virtual time and accounts, so that the time that a class waits for others does not
count against its clients.

A rank is (class, start), both fixed at arrival: waiting requests are never looked at
again, and a request costs the policy a few entries of persistent maps.
"""

import math
from functools import partial
from typing import Any, Final

import attrs
from attrs import field, frozen

from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request
from minfer.values.checks import MAX_INT64, ConfigError, is_number, number
from minfer.values.pmap import Map
from minfer.values.record import evolve

_number: Final = partial(number, prefix="scheduling policy: ")

Owner = tuple[int, str]  # of an account: class and client


def positive_weights(
    _: object, attribute: "attrs.Attribute[Any]", weights: Map[str, float]
) -> None:
    """Raise ConfigError unless each client's weight is a number above 0."""
    for client, weight in weights.items():
        if not is_number(weight) or not 0 < weight <= MAX_INT64:
            message = f"scheduling policy: {attribute.name} must be numbers above 0"
            raise ConfigError(f"{message}; that of {client!r:.80} is not")


@frozen
class Account:
    """The use of a client in a class, in virtual time."""

    end: float = 0.0  # of all that it requested, less the unused part
    start: float = 0.0  # of its last request; later ones start no earlier
    live: int = 0  # samples that wait or run


@frozen
class Accounts:
    """All accounts, and the virtual time of each class."""

    times: Map[int, float] = Map()
    by_owner: Map[Owner, Account] = Map()
    limit: int = 1024  # accounts, at which the least important are forgotten

    def time(self, level: int) -> float:
        """Virtual time of a class."""
        return self.times.get(level, 0.0)

    def with_room(self, base_limit: int) -> "Accounts":
        """Keep the accounts of clients with live samples, and of the others those
        furthest ahead of their class, at most half of `base_limit`, as the number of
        clients is unbounded. A class without live samples starts again at 0. Names do not
        matter.
        """
        items = self.by_owner.items()
        times = {
            owner[0]: self.time(owner[0]) for owner, account in items if account.live
        }
        ahead = {
            owner: account.end - times.get(owner[0], math.inf)
            for owner, account in items
            if not account.live
        }
        beyond = sorted(ahead.values(), reverse=True)[base_limit // 2 :]
        threshold = max([0.0, *beyond[:1]])
        accounts = {
            owner: account
            for owner, account in items
            if account.live or ahead[owner] > threshold
        }
        limit = max(base_limit, 2 * len(accounts))
        return evolve(self, times=Map(times), by_owner=Map(accounts), limit=limit)


@frozen
class FairQueue(FirstCome):
    """The more urgent class first, and within a class fair shares between clients.

    A class is a `priority`; lower goes first, and preempts a less urgent one that runs. A
    request costs its prompt tokens and its allowed output; the unused part is refunded
    when it ends. Guarantees:

    - No request is admitted while one of a more urgent class waits. A stream of urgent
      requests may starve the less urgent: that is the meaning of priority.
    - Of two clients of a class that always have requests waiting in it, neither is
      admitted for more tokens than the other, less refunds, by more than the largest
      request of each, whatever they had before. So no client starves behind others of its
      class.
    - No later request of its class overtakes a client's first request.
    - One client's requests of a class are admitted in the order in which they arrived.
    """

    # of clients whose share is not one
    weights: Map[str, float] = field(default=Map(), validator=positive_weights)
    clients: int = field(default=1024, validator=_number(1))  # see `Accounts.limit`

    def start(self) -> Accounts:
        return Accounts(limit=self.clients)

    def rank(
        self, state: Accounts, request: Request, time: float
    ) -> tuple[Rank, Accounts]:
        """The rank at the client's account, but neither in the past nor before its
        earlier requests, which may have started too late for their real use.
        """
        owner = request.priority, request.client
        if owner not in state.by_owner and len(state.by_owner) >= state.limit:
            state = state.with_room(self.clients)
        now = state.time(request.priority)
        account = state.by_owner.get(owner, Account())
        earliest = max(now, account.end)
        start = max(earliest, account.start) if account.live else earliest
        cost = _prompt_cost(request) + request.n * request.max_tokens
        end = earliest + cost / self._weight(request)
        account = Account(end, start, account.live + request.n)
        state = evolve(state, by_owner=state.by_owner.set(owner, account))
        return (float(request.priority), start), state

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """Whether `waiting` is of a more urgent class; never within one."""
        return waiting[0] < running[0]

    def admitted(
        self, state: Accounts, rank: Rank, request: Request, load: Load
    ) -> Accounts:
        """Set the class's virtual time to the start of the request admitted last in
        it.
        """
        now = max(state.time(request.priority), rank[-1])
        return evolve(state, times=state.times.set(request.priority, now))

    def ended(
        self, state: Accounts, request: Request, output: int, ran: bool
    ) -> Accounts:
        """Refund the unused part of the cost."""
        owner = request.priority, request.client
        account = state.by_owner.get(owner)
        if account is None:
            return state
        prompt = 0 if ran else _prompt_cost(request) / request.n
        unused = (request.max_tokens - output + prompt) / self._weight(request)
        account = Account(account.end - unused, account.start, max(0, account.live - 1))
        return evolve(state, by_owner=state.by_owner.set(owner, account))

    def _weight(self, request: Request) -> float:
        return self.weights.get(request.client, 1.0)


def _prompt_cost(request: Request) -> int:
    """Tokens of a prompt; none for a later round of a search, whose prompt is paid
    for.
    """
    return 0 if request.continues else len(request.prompt)
