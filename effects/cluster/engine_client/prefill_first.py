"""Disaggregation: prompts are computed by some replicas, and outputs by others.

    prefill replica                       decode replica
    the prompt, and the first token
       its KV, block by block  ---------> inbox
       the first token: hand over ------> the request with that token as history: its
                                          blocks are fetched, and it decodes

Theory. Handing over is the resumption of a request on another engine, as after a crash:
the second one has the same history, the same draws, and needs no more than to find the KV
of the prompt in its external store. If that did not come, it computes the prompt. So
whatever dies or is cut, a request goes on.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import define

from minfer.effects.cluster.dispatch.dispatcher import Assignment
from minfer.effects.cluster.engine_client.api_server_request import (
    ApiServerRequest,
    Handover,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.records.messages import Finished
from minfer.routing.messages import Placed

# Tokens of a prompt, at most, that a decode replica computes itself: they hardly make its
# steps longer, and sending their KV would take as long.
MAX_DIRECT_TOKENS: Final = 256
Assigned = Sequence[Assignment[ApiServerRequest]]


@define(eq=False)
class PrefillFirst:
    """Chooses which requests are prefilled by another replica; `router` is that of the
    replicas that prefill.
    """

    router: ApiServerRouter
    max_model_len: int = 2**31
    max_direct_tokens: int = MAX_DIRECT_TOKENS
    handed_over: int = 0  # requests

    def deliver(
        self,
        replicas: Sequence[ReplicaLink],
        send: Callable[[Iterable[Assignment[ApiServerRequest]]], None],
        assigned: Assigned,
    ) -> None:
        """Send requests to the replicas that they are assigned to, or first to others,
        which compute their prompts.
        """
        send([self._prefill_first(assignment, replicas) for assignment in assigned])

    def _prefill_first(
        self, assignment: Assignment[ApiServerRequest], replicas: Sequence[ReplicaLink]
    ) -> Assignment[ApiServerRequest]:
        """Returns the assignment of a request to the replica that computes its prompt:
        another one than that which decodes it, or the same.
        """
        request_state, decode = assignment.item, assignment.placed
        target = replicas[int(decode.replica)]
        if target.prefills or not self._should_prefill_elsewhere(request_state, decode):
            return assignment
        placed = self.router.decide(assignment.request)
        if not isinstance(placed, Placed):
            return assignment
        request_state.handover = Handover(
            target=target.number,
            push_to=replicas[int(placed.replica)].pushes_to(target),
            target_blocks=decode.hit,
            cached=None
            if request_state.handover is None
            else request_state.handover.cached,
        )
        return Assignment(request_state, assignment.request, placed)

    def _should_prefill_elsewhere(
        self, request_state: ApiServerRequest, decode: Placed
    ) -> bool:
        """Returns whether another replica should compute the prompt of a request."""
        request = request_state.request
        num_known = (
            len(request.prompt) + len(request.output) + len(request_state.tokens[0])
        )
        min_length = num_known + 2  # each of the two replicas yields a token
        return (
            decode.prefill > self.max_direct_tokens
            and request.n == 1
            and request.most_known(self.max_model_len) >= min_length
            and request.reads_cache
            and request.continuation.beam_round is None
            and not request_state.suspect
        )

    def handover_of(
        self, request_state: ApiServerRequest, end: Finished
    ) -> Handover | None:
        """Returns the handover of a request if only its prefill has ended; or if it was
        refused, by an engine with less memory than the one that is to decode it.
        """
        handover = request_state.handover
        if handover is None or handover.stage is not HandoverStage.PREFILL:
            return None
        return handover if end.reason in ("length", "rejected") else None
