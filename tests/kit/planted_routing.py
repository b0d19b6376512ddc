"""Routing policies with one fault each, for `bench.policy_faults`."""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

from typing import Any, Final

from minfer.routing.messages import ReplicaChoice, RoutingRequest
from minfer.routing.policy import Candidate, Candidates, RoutingPolicy
from tests.kit.planted_policies import Fault


def _choice(candidate: Candidate, why: str) -> ReplicaChoice:
    return ReplicaChoice(candidate.replica.name, why)


class MostHits(RoutingPolicy):
    """The replica with the most of the prompt in its cache, however loaded it is."""

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice, Any]:
        return _choice(max(candidates, key=lambda one: one.hit), "hit"), state


class DividesByBlocks(RoutingPolicy):
    """The replica with the largest share of the prompt; a short prompt has no blocks."""

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice, Any]:
        def cost(candidate: Candidate) -> float:
            return candidate.replica.requests - candidate.hit / len(request.keys)

        return _choice(min(candidates, key=cost), "share"), state


class RoundRobin(RoutingPolicy):
    """One replica after the other, by a count of the object."""

    def __init__(self) -> None:
        self.count = 0

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice, Any]:
        self.count += 1
        return _choice(candidates[self.count % len(candidates)], "turn"), state


ROUTING_FAULTS: Final[dict[str, Fault]] = {
    "most hits": Fault(MostHits, ("bounded load",), "choose"),
    "rare input": Fault(DividesByBlocks, ("never raises",), "choose"),
    "hidden count": Fault(RoundRobin, ("hidden state",), "choose"),
}
