"""The next step while it is planned."""

from attrs import define, field

from minfer.planning.admit import Admission
from minfer.planning.grow import Grown
from minfer.records.adapters import ALL_READY, UnreadyAdapters
from minfer.records.config import EngineConfig
from minfer.records.messages import LoadAdapter, Reason, TransferCommand, WakeAt
from minfer.records.plan import Copy
from minfer.records.request import Request
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState


def token_cost(config: EngineConfig, request: Request) -> int:
    """Budget that a prefill token takes, but for the first of its row in a step."""
    return 1 if request.sampling.prompt_logprobs is None else config.scored_cost


def row_cost(config: EngineConfig, request: Request, tokens: int) -> int:
    """Budget that the tokens of a row take; there is at least one."""
    return 1 + token_cost(config, request) * (tokens - 1)


@define
class StepBuilder:
    """What has been decided about the next step. Never kept, never shared.

    A sequence is named by its generation: positions shift when others are preempted.
    """

    config: EngineConfig
    state: EngineState
    skipped: set[int] = field(factory=set)  # generations that skip this step
    grown: Grown = field(factory=dict)  # growth of tables
    # Where blocks are taken chunk by chunk: generation in prefill -> the most tokens
    # that it may take.
    bounds: dict[int, int] = field(factory=dict)
    shares: dict[int, int] = field(factory=dict)  # generation in prefill -> its tokens
    room: int = 0  # tokens of the budget that are left
    bounded: bool = False  # whether prefill is bounded by the `itl_target`
    newcomers: list[Admission] = field(factory=list)
    admitted: dict[str, int] = field(factory=dict)  # newcomers by client
    max_sampled_tokens: tuple[int, ...] | None = None  # by row; None: one
    # Generation with drafts -> those from the host; none: the executor's drafter
    # makes them.
    drafts: dict[int, tuple[int, ...]] = field(factory=dict)
    copies: tuple[Copy, ...] = ()  # of kept states
    reasons: list[Reason] = field(factory=list)
    wakes: tuple[WakeAt, ...] = ()
    loads: list[TransferCommand | LoadAdapter] = field(factory=list)  # that begin
    unready: UnreadyAdapters = ALL_READY  # whose samples are passed over
    slot_blocked: Sequence | None = None  # the first that waits for a slot
    max_passes: int = 0  # of each slot's adapter, in a stay, before that one

    def forget(self, preempted: set[int]) -> None:
        """Remove generations that were preempted from the step."""
        self.skipped -= preempted
        for run_id in preempted:
            self.shares.pop(run_id, None)
        self.grown = {
            key: growth for key, growth in self.grown.items() if key[0] not in preempted
        }
