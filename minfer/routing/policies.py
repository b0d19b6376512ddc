"""The routing policies that come with minfer, each with its guarantee, by name."""

import math
from bisect import bisect_right
from functools import partial
from typing import Any, Final

from attrs import field, frozen

from minfer.routing.messages import Choice, Estimate, RoutingRequest
from minfer.routing.policy import (
    Candidate,
    Candidates,
    RoutingPolicy,
    fewest_requests,
)
from minfer.routing.rendezvous import best, text_key
from minfer.values.checks import ConfigError, number

# Seconds, requests, name, blocks hit: in that order one is better than another.
Cost = tuple[float, int, str, int]
SHOWN: Final = 3  # alternatives in a reason

_number: Final = partial(number, prefix="routing policy: ")


@frozen
class RoundRobin(RoutingPolicy):
    """One replica after the other, by name.

    Guarantee: if none joins or leaves, the numbers of requests differ by one at most.
    """

    def start(self) -> str:
        return ""  # the replica chosen last

    def choose(
        self, state: str, request: RoutingRequest, candidates: Candidates
    ) -> tuple[Choice, str]:
        names = [one.replica.name for one in candidates]
        name = names[bisect_right(names, state) % len(names)]
        return Choice(name, "turn"), name


@frozen
class LeastLoaded(RoutingPolicy):
    """The replica with the fewest waiting and running sequences, then with the fewest
    prefill tokens to come.
    """

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[Choice, Any]:
        return Choice(fewest_requests(candidates).replica.name, "load"), state


@frozen
class PrefixHash(RoutingPolicy):
    """Requests with equal first blocks go to the same replica, unless it has many more
    requests than others: for replicas that do not report what they cache.

    A prompt without as many blocks is hashed by those that it has; one without a full
    block by its session, or by its id. Bounded loads: a replica that has `load` times the
    average number of requests, with this one, is passed over for the next best (Mirrokni,
    Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018).

    Guarantees: no replica gets a request that takes it above that bound; as long as loads
    are below it, a replica that joins or leaves moves no more than its share of prefixes.
    """

    blocks: int = field(default=4, validator=_number(1))
    load: float = field(default=1.25, validator=_number(1))

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[Choice, Any]:
        live = {one.replica.name: len(one.replica.live) for one in candidates}
        bound = math.ceil(self.load * (sum(live.values()) + 1) / len(live))
        key = self._key(request)
        name = best(live, key)
        if live[name] < bound:
            return Choice(name, "hash"), state
        name = best([one for one, count in live.items() if count < bound], key)
        return Choice(name, "hash, load"), state

    def _key(self, request: RoutingRequest) -> bytes:
        """What is hashed; the key of a block stands for all blocks before it, too."""
        if request.keys:
            return request.keys[: self.blocks][-1]
        return text_key(request.session or request.id)


@frozen
class Prefix(RoutingPolicy):
    """The replica with the least cost, in seconds:

        token * (prefill tokens that wait there + miss * those of the request that it has
        not cached) + row * (expected output tokens) * (sequences there)

    that is, the time until the first token, and what the sequences there add to all other
    tokens. A token to be computed counts `miss` times, since it delays later requests,
    too, and takes space in the cache. Of the replicas within `affinity` seconds of the
    best, that of the session, by rendezvous hashing: so a session stays where it is while
    that costs little, and leaves a replica that is hot.

    Guarantees:

    - No replica is chosen that is more than `affinity` seconds worse than the best, but
      for fair shares:
    - A tenant gets no more than its share of what waits on a replica: while prefill
      tokens of n tenants wait there, no request of one of them is added that takes it
      above 1 / n of all, unless it has `least` tokens there or fewer.
    - It goes to another replica then, if that costs `patience` seconds more at most; else
      it is deferred. So a request is deferred only while some of its tenant wait on a
      replica that costs less.

    The numbers are those of a 7B model on an H200; `row` grows with contexts.
    """

    token: float = field(default=19e-6, validator=_number(0))  # seconds
    miss: float = field(default=2.0, validator=_number(0))
    row: float = field(default=19e-6, validator=_number(0))  # seconds a step
    output: int = field(default=256, validator=_number(0))  # tokens, if none are expected
    affinity: float = field(default=0.05, validator=_number(0))  # seconds
    least: int = field(default=8192, validator=_number(0))  # tokens
    patience: float = field(default=0.5, validator=_number(0))  # seconds

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[Choice | None, Any]:
        costs = self._costs(request, candidates)
        if not costs:
            return None, state
        at, why = 0, "cost"
        if request.session:
            at, why = self._session(costs, request.session), "session"
        seconds, _, name, _ = costs.pop(at)
        others = tuple(
            Estimate(other, hit, cost) for cost, _, other, hit in costs[:SHOWN]
        )
        return Choice(name, why, seconds, others), state

    def _costs(self, request: RoutingRequest, candidates: Candidates) -> list[Cost]:
        """The costs of all replicas that the request may go to, the least first."""
        output = self.output if request.output is None else request.output
        token, miss, each = self.token, self.miss, self.row * output
        tenant = request.tenant
        costs, unfair = list[Cost](), list[float]()
        for one in candidates:
            replica = one.replica
            requests, waiting = replica.requests, replica.waiting
            cost = token * (replica.backlog + miss * one.prefill) + each * requests
            if tenant in waiting and not self._is_fair(one, tenant):
                unfair.append(cost)
            else:
                costs.append((cost, requests, replica.name, one.hit))
        if unfair:
            most = min(unfair) + self.patience
            costs = [pair for pair in costs if pair[0] <= most]
        costs.sort()
        return costs

    def _session(self, costs: list[Cost], session: str) -> int:
        """The place of the session's replica, of those that cost little more than the
        first.
        """
        most = costs[0][0] + self.affinity
        near = [name for cost, _, name, _ in costs if cost <= most]
        return near.index(best(near, text_key(session)))

    def _is_fair(self, one: Candidate, tenant: str) -> bool:
        """Whether a tenant that waits on a replica gets no more than its share there:
        alone it has all.
        """
        replica = one.replica
        tenants = len(replica.waiting)
        mine = replica.waiting[tenant] + one.prefill
        total = replica.waiting_tokens + one.prefill
        return mine <= self.least or mine * tenants <= total


ROUTING_POLICIES: Final[dict[str, type[RoutingPolicy]]] = {
    "prefix": Prefix,
    "prefix_hash": PrefixHash,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def routing_policy_named(name: str) -> RoutingPolicy:
    """The routing policy of that name. Raises ConfigError."""
    if name not in ROUTING_POLICIES:
        raise ConfigError(
            f"there is no routing policy {name!r}, only {', '.join(ROUTING_POLICIES)}"
        )
    return ROUTING_POLICIES[name]()
