"""Routing policies with one fault each, for `bench.policy_faults`."""

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


class KeepsSessions(RoutingPolicy):
    """A session stays where it began, by a table of the object."""

    def __init__(self) -> None:
        self.places = dict[str, str]()

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice, Any]:
        least = min(candidates, key=lambda one: one.replica.requests)
        place = self.places.setdefault(request.session, least.replica.name)
        return ReplicaChoice(place, "session"), state


ROUTING_FAULTS: Final[dict[str, Fault]] = {
    "most hits": Fault(MostHits, ("bounded load",), "choose"),
    "rare input": Fault(DividesByBlocks, ("never raises",), "choose"),
    "hidden sessions": Fault(KeepsSessions, ("hidden state", "policy"), "choose"),
}
