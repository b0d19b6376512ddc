"""A policy from outside minfer that looks reasonable, works in every demo, and starves
people.
"""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

from attrs import field, frozen

from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request


@frozen
class AdaptiveLastIn(FirstCome):
    """First come, first served, until the line is long; under overload the newest go
    first.

    The idea is respectable: under overload those at the front have waited so long that
    they have given up, and the newest can still be served in time. But while the overload
    lasts, who came just before it began never starts, however patient.
    """

    long: int = field(default=4)  # requests in line

    def start(self) -> int:
        """Samples that wait."""
        return 0

    def rank(self, state: int, request: Request, time: float) -> tuple[Rank, int]:
        return (-time if state >= self.long else time,), state + request.n

    def admitted(self, state: int, rank: Rank, request: Request, load: Load) -> int:
        return state - 1

    def ended(self, state: int, request: Request, output: int, ran: bool) -> int:
        return state if ran else state - 1
