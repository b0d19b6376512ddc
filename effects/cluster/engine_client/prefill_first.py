"""Disaggregation: prompts are computed by some replicas, and outputs by others.

    prefill replica                       decode replica
    the prompt, and the first token
       its KV, block by block  ---------> inbox
       the first token: hand over ------> the request with that token as history: its
                                          blocks are fetched, and it decodes

Theory. Handing over is the resumption of a request on another engine, as after a crash:
the second one has the same history, the same draws, and needs no more than to find the KV
of the prompt in its keyed tier. If that did not come, it computes the prompt. So whatever
dies or is cut, a request goes on.
"""

from typing import Final

from attrs import define

from minfer.effects.cluster.engine_client.front_request import FrontRequest
from minfer.effects.cluster.engine_client.front_router import FrontRouter
from minfer.records.messages import Finished
from minfer.routing.messages import Placed

# Tokens of a prompt, at most, that a decode replica computes itself: they hardly make its
# steps longer, and sending their KV would take as long.
DIRECT: Final = 256


@define(eq=False)
class PrefillFirst:
    """Chooses which requests are prefilled by another replica; `router` is that of the
    replicas that prefill.
    """

    router: FrontRouter
    max_model_len: int = 2**31
    direct: int = DIRECT
    handed_over: int = 0  # requests

    def place(self, kept: FrontRequest, decode: Placed, session: str) -> Placed | None:
        """Returns the replica that computes the prompt of a request first, which
        `decode` will decode; None: that one computes it, too.
        """
        request = kept.request
        known = len(request.prompt) + len(request.output) + len(kept.tokens[0])
        least = known + 2  # the first one yields a token, and the second one another
        if (
            decode.prefill <= self.direct
            or request.n > 1
            or request.most_known(self.max_model_len) < least
            or not request.reads_cache
            or request.search is not None
            or kept.suspect
        ):
            return None
        placed = self.router.route(request, session, again=kept.sent)
        if not isinstance(placed, Placed):
            return None
        kept.target, kept.held = int(decode.replica), decode.hit
        return placed

    def is_first_half(self, kept: FrontRequest, done: Finished) -> bool:
        """Returns whether what ended is only the prefill of a request; or it was refused,
        by an engine with less memory than the one that is to decode it.
        """
        return kept.target is not None and done.reason in ("length", "rejected")
