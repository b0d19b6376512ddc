"""A policy from outside minfer that keeps every law: two classes, each with a guaranteed
share.
"""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

from typing import Any

from attrs import field, frozen

from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request


@frozen
class Meters:
    """Virtual time, and where the next request of each class starts:
    interactive, batch.
    """

    now: float = 0.0
    tags: tuple[float, float] = (0.0, 0.0)


def _share(_: object, __: object, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"share must be between 0 and 1, not {value!r}")


@frozen
class TwoClasses(FirstCome):
    """Interactive requests (priority 0 or below) and batch work (above 0) share the
    engine.

    Guarantee: while both classes wait, interactive requests are let in for `share` of the
    tokens and batch work for the rest, within the largest request of each; a class that
    is alone has everything, and saves nothing up. First come, first served within a
    class. An interactive request that is due takes the place of batch work, so a full
    machine does not keep it waiting.
    """

    share: float = field(default=0.8, validator=_share)

    def start(self) -> Meters:
        return Meters()

    def rank(self, state: Meters, request: Request, time: float) -> tuple[Rank, Meters]:
        """Start where the last one of the class ends, but not in the past."""
        batch = request.priority > 0
        begin = max(state.now, state.tags[batch])
        cost = len(request.prompt) + request.n * request.max_tokens
        end = begin + cost / (1 - self.share if batch else self.share)
        tags = (state.tags[0], end) if batch else (end, state.tags[1])
        return (begin, float(batch)), Meters(state.now, tags)

    def admitted(self, state: Meters, rank: Rank, request: Request, load: Load) -> Meters:
        """Virtual time is the start of the last admitted."""
        return Meters(max(state.now, rank[0]), state.tags)

    def may_preempt(self, state: Any, waiting: Rank, running: Rank) -> bool:
        return waiting[1] < running[1] and waiting < running
