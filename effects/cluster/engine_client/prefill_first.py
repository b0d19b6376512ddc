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
from minfer.effects.cluster.engine_client.front_request import (
    FrontRequest,
    Handover,
    HandoverStage,
)
from minfer.effects.cluster.engine_client.front_router import FrontRouter
from minfer.effects.cluster.engine_client.replica_link import ReplicaLink
from minfer.records.messages import Finished
from minfer.routing.messages import Placed

# Tokens of a prompt, at most, that a decode replica computes itself: they hardly make its
# steps longer, and sending their KV would take as long.
DIRECT: Final = 256
Assigned = Sequence[Assignment[FrontRequest]]


@define(eq=False)
class PrefillFirst:
    """Chooses which requests are prefilled by another replica; `router` is that of the
    replicas that prefill.
    """

    router: FrontRouter
    max_model_len: int = 2**31
    direct: int = DIRECT
    handed_over: int = 0  # requests

    def deliver(
        self,
        replicas: Sequence[ReplicaLink],
        send: Callable[[Iterable[Assignment[FrontRequest]]], None],
        assigned: Assigned,
    ) -> None:
        """Send requests to the replicas that they are assigned to, or first to others,
        which compute their prompts.
        """
        send([self._prefill_first(one, replicas) for one in assigned])

    def _prefill_first(
        self, assigned: Assignment[FrontRequest], replicas: Sequence[ReplicaLink]
    ) -> Assignment[FrontRequest]:
        """Returns the assignment of a request to the replica that computes its prompt:
        another one than that which decodes it, or the same.
        """
        kept, decode = assigned.item, assigned.placed
        target = replicas[int(decode.replica)]
        if target.prefills or not self._pays(kept, decode):
            return assigned
        placed = self.router.decide(assigned.request)
        if not isinstance(placed, Placed):
            return assigned
        kept.handover = Handover(
            target=target.number,
            push_to=replicas[int(placed.replica)].pushes_to(target),
            held=decode.hit,
            cached=None if kept.handover is None else kept.handover.cached,
        )
        return Assignment(kept, assigned.request, placed)

    def _pays(self, kept: FrontRequest, decode: Placed) -> bool:
        """Whether another replica should compute the prompt of a request."""
        request = kept.request
        known = len(request.prompt) + len(request.output) + len(kept.tokens[0])
        least = known + 2  # the first one yields a token, and the second one another
        return (
            decode.prefill > self.direct
            and request.n == 1
            and request.most_known(self.max_model_len) >= least
            and request.reads_cache
            and request.continuation.beam_round is None
            and not kept.suspect
        )

    def handover_of(self, kept: FrontRequest, done: Finished) -> Handover | None:
        """Returns the handover of a request if only its prefill has ended; or if it was
        refused, by an engine with less memory than the one that is to decode it.
        """
        handover = kept.handover
        if handover is None or handover.stage is not HandoverStage.PREFILL:
            return None
        return handover if done.reason in ("length", "rejected") else None
