"""The policies that come with minfer, each with its guarantee, and their names.

The queue needs no re-sorting: all waiting requests age at the same pace, so a request
that is ahead by (arrival + a constant of the request) stays ahead; and only finitely many
can overtake it: no request starves.
"""

import math
from functools import partial
from typing import Any, Final

import attrs
from attrs import field, frozen
from attrs.exceptions import FrozenInstanceError

from minfer.policies.fair_queue import positive_weights
from minfer.policies.fair_seats import FairSeats
from minfer.policies.mistakes import METHODS
from minfer.records.policy import FIELDS_ADVICE, FirstCome, Load, Policy, Rank
from minfer.records.request import Request
from minfer.values.checks import ConfigError, number
from minfer.values.pmap import Map
from minfer.values.record import evolve

# Prompt tokens that cost about as much as one output token.
PROMPT_TOKENS_PER_OUTPUT: Final = 64

_number: Final = partial(number, prefix="scheduling policy: ")


@frozen
class Priority(FirstCome):
    """Strict priority: lower `priority` first, first come within one.

    Guarantee: no request is admitted while a more urgent one waits, and a waiting request
    preempts a strictly less urgent one that runs. A stream of urgent requests may starve
    others.
    """

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (float(request.priority),), state

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        return waiting < running


@frozen
class Ageing(FirstCome):
    """Priority with ageing: waiting `seconds` is worth one level of priority.

    Guarantee: no request that arrives more than `seconds` x (difference in priority)
    later goes first. Priorities are clipped to `levels` around 0, which bounds that for
    all.
    """

    seconds: float = field(default=10.0, validator=_number(0, above=True))
    levels: int = field(default=8, validator=_number(0))

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        level = max(-self.levels, min(request.priority, self.levels))
        return (time + self.seconds * level,), state

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        """Whether `waiting` is ahead by a whole level: less is not worth a preemption."""
        return waiting[0] + self.seconds <= running[0]


@frozen
class Deadline(FirstCome):
    """Earliest deadline first; `slack` seconds if a request has none.

    Guarantee: admitted in the order of deadlines; only requests that arrive before a
    request's deadline can be admitted before it.
    """

    slack: float = field(default=60.0, validator=_number(0))

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        deadline = self.slack if request.deadline == math.inf else request.deadline
        return (time + deadline,), state


@frozen
class Shortest(FirstCome):
    """Shortest remaining work first, by the allowed output; waiting counts.

    Guarantee: one unit of work (an output token, or `PROMPT_TOKENS_PER_OUTPUT` tokens of
    prompt) is worth `pace` seconds of waiting, so no request that arrives `pace` x work
    seconds after another goes first. Work done before a preemption counts.
    """

    pace: float = field(default=0.1, validator=_number(0))

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return self.requeue_rank(state, (), request, time, 0), state

    def requeue_rank(
        self, state: Any, rank: Rank, request: Request, arrived: float, done: int
    ) -> Rank:
        work = len(request.prompt) / PROMPT_TOKENS_PER_OUTPUT + request.max_tokens - done
        return (arrived + self.pace * work,)


@frozen
class Shares:
    """Virtual time, and per client the virtual time at which its next request starts."""

    now: float = 0.0
    tags: Map[str, float] = Map()
    # number of clients at which those without debt are forgotten
    limit: int = 1024


@frozen
class Fair(FirstCome):
    """The former policy `fair`, without priorities, kept so that runs recorded with it
    replay; `FairQueue` replaced it.

    Fair shares between clients, by start-time fair queueing (Goyal et al., 1996). A
    request costs its prompt tokens and its allowed output; the unused part is refunded
    when it ends. Guarantee: of two clients that always have requests waiting, neither is
    admitted for more tokens than the other by more than the largest request of each,
    whatever they had before; and no request that arrives later overtakes a client's first
    request.
    """

    # of clients whose share is not one
    weights: Map[str, float] = field(default=Map(), validator=positive_weights)
    clients: int = field(default=1024, validator=_number(1))  # see `Shares.limit`

    def start(self) -> Shares:
        return Shares(limit=self.clients)

    def rank(self, state: Shares, request: Request, time: float) -> tuple[Rank, Shares]:
        """The virtual end of the client's last request, but not in the past."""
        tags, limit = state.tags, state.limit
        begin = max(state.now, tags.get(request.client, 0.0))
        if request.client not in tags and len(tags) >= limit:
            tags = Map({name: tag for name, tag in tags.items() if tag > state.now})
            limit = max(self.clients, 2 * len(tags))
        cost = len(request.prompt) + request.n * request.max_tokens
        tags = tags.set(
            request.client, begin + cost / self.weights.get(request.client, 1.0)
        )
        return (begin,), Shares(state.now, tags, limit)

    def admitted(self, state: Shares, rank: Rank, request: Request, load: Load) -> Shares:
        """Set virtual time to the start of the request admitted last."""
        return evolve(state, now=max(state.now, rank[0]))

    def ended(self, state: Shares, request: Request, output: int, ran: bool) -> Shares:
        """Refund the unused part of the cost."""
        unused = (
            request.max_tokens - output + (0 if ran else len(request.prompt) / request.n)
        )
        if not unused or request.client not in state.tags:
            return state
        tag = state.tags[request.client] - unused / self.weights.get(request.client, 1.0)
        return evolve(state, tags=state.tags.set(request.client, tag))


@frozen
class Gathering:
    """A window: until when it may wait, for how many, and the pace of arrivals."""

    due: float = math.inf  # seconds
    # samples that arrived since the last admission; other waiting samples need not wait
    fresh: int = 0
    last: float = -math.inf  # arrival
    gap: float = math.inf  # seconds between arrivals, smoothed


@frozen
class Window(Ageing):
    """Waits for a fuller batch, so that prefills that start together disturb the running
    ones once.

    Admits when `fill` samples wait; when one of priority `urgent` or lower waits; or, by
    load, when at the pace of recent arrivals the batch would not fill in time. Guarantee:
    the policy defers no request longer than `wait` seconds after its arrival, or than the
    share `part` of its deadline. The order is that of `Ageing`.
    """

    wait: float = field(default=0.05, validator=_number(0))  # seconds
    fill: int = field(default=8, validator=_number(1))  # samples
    urgent: int = -1
    part: float = field(default=0.1, validator=_number(0, above=True))

    def start(self) -> Gathering:
        return Gathering()

    def rank(
        self, state: Gathering, request: Request, time: float
    ) -> tuple[Rank, Gathering]:
        """Open the window, or shorten it; a later round of a search does not count as an
        arrival.
        """
        rank, _ = super().rank(None, request, time)
        if request.continues:
            return rank, state
        limit = 0.0 if request.priority <= self.urgent else self.wait
        deadline = min(state.due, time + min(limit, self.part * request.deadline))
        gap = state.gap
        if state.last > -math.inf:
            # longer gaps count as this one
            new_gap = min(time - state.last, 2 * self.wait)
            gap = new_gap if gap == math.inf else (gap + new_gap) / 2
        return rank, Gathering(deadline, state.fresh + request.n, time, gap)

    def admit_from(self, state: Gathering, load: Load) -> float:
        """Now if the window is full, due, or cannot fill in time; else the time when it
        is due.
        """
        if load.waiting > state.fresh or load.waiting >= self.fill:
            return load.time
        full_at = load.time + (self.fill - load.waiting) * state.gap
        return load.time if full_at > state.due else state.due

    def admitted(
        self, state: Gathering, rank: Rank, request: Request, load: Load
    ) -> Gathering:
        """Close the window: all that wait now are admitted with this one."""
        return evolve(state, due=math.inf, fresh=0)

    def ended(
        self, state: Gathering, request: Request, output: int, ran: bool
    ) -> Gathering:
        """Uncount a sample that ended before it ran."""
        if ran or not state.fresh or request.continues:  # not counted, either
            return state
        return evolve(state, fresh=state.fresh - 1)


# the opening of the running batch, seconds, and its members so far
Batch = tuple[float, int]


@frozen
class Static(FirstCome):
    """Static batching, for ablations: a batch runs until its last member has ended.

    Guarantee: at most `size` samples to a batch, all of which had arrived when it was
    opened; first come, first served.
    """

    size: int = field(default=8, validator=_number(1))

    def start(self) -> Batch:
        return -math.inf, 0

    def admit_from(self, state: Batch, load: Load) -> float:
        opened, members = state
        may_join = members < self.size and load.arrived <= opened
        return load.time if may_join or not load.running else math.inf

    def admitted(self, state: Batch, rank: Rank, request: Request, load: Load) -> Batch:
        if load.running and request.continues:  # a later round of a member's search
            return state
        return (state[0], state[1] + 1) if load.running else (load.time, 1)


POLICIES: Final[dict[str, type[Policy]]] = {
    "fcfs": FirstCome,
    "priority": Priority,
    "ageing": Ageing,
    "deadline": Deadline,
    "shortest": Shortest,
    "fair": FairSeats,
    "window": Window,
    "static": Static,
}


# Who goes first under each of them; the guarantees are in README.md.
SUMMARIES: Final = {
    "fcfs": "first come, first served",
    "priority": "the most urgent, which preempt others",
    "ageing": "the more urgent, until others have waited too long",
    "deadline": "the earliest deadline",
    "shortest": "the least work, until others have waited too long",
    "fair": "the most urgent, then clients in turn, with equal tokens",
    "window": "first come, but prefills wait for each other, to start together",
    "static": "first come, in batches that nobody joins, for comparison",
}
# Classes of a user's own with methods of a policy that are no policies.
INCOMPLETE: Final[dict[str, type]] = {}


def policy_named(text: str) -> Policy:
    """The policy for a text such as "ageing:seconds=5,levels=3". Raises ConfigError."""
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise ConfigError(_unknown_policy(text, name, rest))
    kind: Any = POLICIES[name]
    option_types = {
        attribute.name: attribute.type
        for attribute in attrs.fields(kind)
        if attribute.type in (int, float)
    }
    options = {}
    for option in rest.split(",") if rest else ():
        key, _, value = option.partition("=")
        if key not in option_types:
            raise ConfigError(_unknown_option(name, key, [*option_types]))
        try:
            options[key] = option_types[key](value)
        except ValueError:
            raise ConfigError(
                f"scheduling_policy: {key} must be a number, not {value!r}"
            ) from None
    try:
        policy: Policy = kind(**options)
    except FrozenInstanceError as error:
        raise ConfigError(f"scheduling_policy {name}: {FIELDS_ADVICE}") from error
    return policy


def _unknown_policy(text: str, name: str, rest: str) -> str:
    """What is wrong with a text whose `name` is that of no policy."""
    if name in INCOMPLETE:
        kind = INCOMPLETE[name]
        lacks = [method for method in METHODS if not hasattr(kind, method)]
        return (
            f"scheduling_policy {name}: its class is no policy: it lacks the base "
            f"FirstCome{''.join(f', {method}' for method in lacks)}. Write class {name}"
            "(FirstCome), with FirstCome from minfer.policy, which has all methods"
        )
    own = rest.partition(":")[0]
    if own and "=" not in own:  # a module and a class
        return (
            f"scheduling_policy {text!r}: a policy of your own is named by its class "
            f"alone, and its module by --policies: --policies {name} "
            f"--scheduling-policy {rest}"
        )
    return f"scheduling_policy must be one of {', '.join(POLICIES)}, not {name!r}"


def _unknown_option(name: str, key: str, options: list[str]) -> str:
    """What is wrong with an option `key` that a policy does not have."""
    written = ", written as in ageing:seconds=5,levels=3" if options else ""
    reason = (
        f"scheduling_policy: {name} has no option {key!r}; it has "
        f"{', '.join(options) or 'none'}{written}"
    )
    if name in SUMMARIES or not key.isidentifier():
        return reason
    return (
        f"{reason}. The options of a policy of your own are the fields of type int and "
        f"float of its class: write @attrs.frozen above the class, and {key}: float = "
        "1.0 in it"
    )
