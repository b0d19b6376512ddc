"""Routing policy: which replica gets a request, or that its tenant has to wait.

A policy is an object with two pure functions. The router ensures, whatever a policy
answers, that a request goes to a replica that takes requests, and that no tenant waits
forever. A policy's own state is part of `RouterState` and is passed in; policy objects
hold none.
"""

from typing import Any, Protocol

from attrs import frozen

from minfer.routing.messages import ReplicaChoice, RoutingRequest
from minfer.routing.state import Replica


@frozen(slots=False)  # sixteen are made for a decision: that takes less time so
class Candidate:
    """A replica that takes requests, as a request finds it."""

    replica: Replica
    hit: int  # leading blocks of the prompt in its cache
    prefill: int  # tokens that it would have to compute, at least one


Candidates = tuple[Candidate, ...]  # by name, at least one


class RoutingPolicy(Protocol):
    """The questions of the router. Every answer must be a function of the arguments
    alone.
    """

    def start(self) -> Any:
        """Return the policy's first state: an immutable value."""
        return None

    def choose(
        self, state: Any, request: RoutingRequest, candidates: Candidates
    ) -> tuple[ReplicaChoice | None, Any]:
        """Return the choice of a replica, and the new state.

        None defers the request until one of its tenant has started or ended; it is used
        only if prefill tokens of the tenant wait on a candidate.
        """
        ...


def fewest_requests(candidates: Candidates) -> Candidate:
    """The candidate with the fewest requests; of several, that with the fewest prefill
    tokens to come, and then the first.
    """
    return min(candidates, key=_load)


def _load(candidate: Candidate) -> tuple[int, int, str]:
    replica = candidate.replica
    return replica.requests, replica.backlog, replica.name
