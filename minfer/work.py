"""The next step in the making: what is known of it while it is planned."""

from collections import Counter

from attrs import define, field

from minfer.admit import Newcomer
from minfer.config import EngineConfig
from minfer.grow import Grown
from minfer.messages import Reason, WakeAt
from minfer.state import EngineState


@define
class Work:
    """What was decided about the next step so far. Never kept, never shared.

    A sequence is named by its generation: positions shift when others give way.
    """

    config: EngineConfig
    state: EngineState
    idle: set[int] = field(factory=set)  # who sits this step out
    grown: Grown = field(factory=dict)  # what tables get
    shares: dict[int, int] = field(factory=dict)  # who is being filled -> its tokens
    room: int = 0  # tokens of the budget that nobody has yet
    newcomers: list[Newcomer] = field(factory=list)
    came: Counter[str] = field(factory=Counter)  # of newcomers, how many a client has
    most: tuple[int, ...] | None = None  # tokens each row may yield; None: one
    # Who has drafts -> those that the host says; none: the draft model says them.
    drafts: dict[int, tuple[int, ...]] = field(factory=dict)
    reasons: list[Reason] = field(factory=list)
    wakes: tuple[WakeAt, ...] = ()

    def forget(self, gone: set[int]) -> None:
        """These generations gave way: they have no part in the step."""
        self.idle -= gone
        for gen in gone:
            self.grown.pop(gen, None)
            self.shares.pop(gen, None)
