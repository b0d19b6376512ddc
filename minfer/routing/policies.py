"""The routing policies that come with minfer, each with its guarantee, by name."""

import math
from bisect import bisect_right
from functools import partial
from typing import Any, Final

from attrs import field, frozen

from minfer.routing.messages import Estimate, ReplicaChoice, RoutingRequest
from minfer.routing.policy import (
    Candidate,
    Candidates,
    RoutingPolicy,
    fewest_requests,
)
from minfer.routing.rendezvous import best_replica, text_key
from minfer.values.checks import ConfigError, number

# Seconds, requests, name, blocks hit: in that order one is better than another.
Cost = tuple[float, int, str, int]
MAX_ALTERNATIVES: Final = 3  # alternatives in a reason

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
    ) -> tuple[ReplicaChoice, str]:
        names = [candidate.replica.name for candidate in candidates]
        name = names[bisect_right(names, state) % len(names)]
        return ReplicaChoice(name, "turn"), name


@frozen
class LeastLoaded(RoutingPolicy):
    """The replica with the fewest waiting and running sequences, then with the fewest
    prefill tokens to come.
    """

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice, Any]:
        return ReplicaChoice(fewest_requests(candidates).replica.name, "load"), state


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
    ) -> tuple[ReplicaChoice, Any]:
        live = {
            candidate.replica.name: len(candidate.replica.live)
            for candidate in candidates
        }
        bound = math.ceil(self.load * (sum(live.values()) + 1) / len(live))
        key = self._key(request)
        name = best_replica(live, key)
        if live[name] < bound:
            return ReplicaChoice(name, "hash"), state
        name = best_replica(
            [replica_name for replica_name, count in live.items() if count < bound], key
        )
        return ReplicaChoice(name, "hash, load"), state

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
        + adapter, if the request's adapter is not on its device

    that is, the time until the first token, and what the sequences there add to all other
    tokens. A token to be computed counts `miss` times, since it delays later requests,
    too, and takes space in the cache. Of the replicas within `affinity` seconds of the
    best, that of the session, by rendezvous hashing: so a session stays where it is while
    that costs little, and leaves a replica that is hot. Requests of an adapter without a
    session are one: so adapters are spread over idle replicas.

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
    # Seconds of a load, and of the later load of what it replaces.
    adapter: float = field(default=0.1, validator=_number(0))
    least: int = field(default=8192, validator=_number(0))  # tokens
    patience: float = field(default=0.5, validator=_number(0))  # seconds

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice | None, Any]:
        costs = self._costs(request, candidates)
        if not costs:
            return None, state
        index, reason = 0, "cost"
        if request.session:
            index, reason = self._session(costs, request.session), "session"
        elif request.adapter:
            index, reason = self._session(costs, request.adapter), "adapter"
        seconds, _, name, _ = costs.pop(index)
        alternatives = tuple(
            Estimate(other_name, hit, cost)
            for cost, _, other_name, hit in costs[:MAX_ALTERNATIVES]
        )
        return ReplicaChoice(name, reason, seconds, alternatives), state

    def _costs(self, request: RoutingRequest, candidates: Candidates) -> list[Cost]:
        """The costs of all replicas that the request may go to, the least first."""
        output = self.output if request.output is None else request.output
        token, miss, row_seconds = self.token, self.miss, self.row * output
        tenant = request.tenant
        costs, unfair = list[Cost](), list[float]()
        for candidate in candidates:
            replica = candidate.replica
            requests, waiting = replica.requests, replica.waiting
            cost = (
                token * (replica.backlog + miss * candidate.prefill)
                + row_seconds * requests
            )
            if request.adapter and request.adapter not in replica.adapters:
                cost += self.adapter
            if tenant in waiting and not self._is_fair(candidate, tenant):
                unfair.append(cost)
            else:
                costs.append((cost, requests, replica.name, candidate.hit))
        if unfair:
            max_cost = min(unfair) + self.patience
            costs = [entry for entry in costs if entry[0] <= max_cost]
        costs.sort()
        return costs

    def _session(self, costs: list[Cost], session: str) -> int:
        """The place of the session's replica, of those that cost little more than the
        first.
        """
        max_cost = costs[0][0] + self.affinity
        near = [name for cost, _, name, _ in costs if cost <= max_cost]
        return near.index(best_replica(near, text_key(session)))

    def _is_fair(self, candidate: Candidate, tenant: str) -> bool:
        """Whether a tenant that waits on a replica gets no more than its share there:
        alone it has all.
        """
        replica = candidate.replica
        tenants = len(replica.waiting)
        tenant_tokens = replica.waiting[tenant] + candidate.prefill
        all_tokens = replica.waiting_tokens + candidate.prefill
        return tenant_tokens <= self.least or tenant_tokens * tenants <= all_tokens


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
