"""The engine's state: one frozen value."""

from bisect import bisect_left
from operator import attrgetter
from typing import Any

from attrs import frozen

from minfer.blocks.keys import Keys
from minfer.blocks.ownership import Blocks
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import PrefixIndex
from minfer.records.adapters import NO_ADAPTERS, Adapters, AdapterSlot
from minfer.records.config import EngineConfig
from minfer.records.drafting import NOTHING_DRAFTED, Drafting
from minfer.records.messages import (
    Command,
    Emit,
    Ended,
    Event,
    Finished,
    Ignored,
    PolicyOverride,
    Reason,
)
from minfer.records.plan import Plan, Pooled, Yields
from minfer.records.policy import Rank
from minfer.records.sequence import Place, Running, SampleId, SampleIds, Sequence
from minfer.records.step_times import NOT_MEASURED, StepTimes
from minfer.records.tiers import NO_TIERS, Tiers
from minfer.records.token_logprobs import Logprobs
from minfer.records.waiting import WaitingQueue
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map


@frozen
class LiveRequest:
    """A request that has not ended: the queue places of its samples, and how many have
    ended.
    """

    place: Place  # of sample 0; the others differ in the sample only
    samples: int
    ended: int = 0
    # samples that got a better rank when preempted
    moved: tuple[tuple[int, Rank], ...] = ()

    def place_of(self, sample: int) -> Place:
        """The place of a sample in the order, waiting or running."""
        rank, arrival, first = self.place
        if self.moved:
            rank = dict(self.moved).get(sample, rank)
        return rank, arrival, first + sample


@frozen
class Fence:
    """Blocks released while plans in flight may use them: free once step `until` is
    over.
    """

    until: int
    published: Keys
    private: tuple[int, ...]


@frozen
class BlockedHead:
    """The last reason why the head of the queue was not admitted."""

    place: Place
    cause: str  # as in `QueueBlocked`


@frozen(slots=False)  # changed ten times a turn, and read little more often
class EngineState:
    """All that decisions depend on: equal states lead to equal decisions."""

    blocks: Blocks
    free_rows: tuple[int, ...]  # free device rows, the next one last
    policy: Any  # the policy's own state
    time: float = 0.0  # seconds
    next_step: int = 0
    next_run_id: int = 0
    arrivals: int = 0
    waiting: WaitingQueue = WaitingQueue()
    running: Running = Running()
    stops: frozenset[int] = frozenset()  # at least the stop ids of all running sequences
    filling: bool = False  # whether a running sequence may be in prefill
    needs_host_mask: bool = False  # whether a running sequence may be unable to run ahead
    requests: Map[str, LiveRequest] = Map()
    inflight: tuple[Plan, ...] = ()  # in order of execution
    fences: tuple[Fence, ...] = ()
    faults: tuple[tuple[SampleId, int], ...] = ()  # failed steps since the last good one
    paused: frozenset[SampleId] = frozenset()  # those for which the host is not ready
    drafting: Drafting = NOTHING_DRAFTED
    tiers: Tiers = NO_TIERS
    blocked: BlockedHead | None = None  # the last one that was reported
    deferred_clients: frozenset[str] = frozenset()  # clients that the last plan deferred
    overrides: tuple[PolicyOverride, ...] = ()  # within a turn; they leave it as reasons
    adapters: Adapters = NO_ADAPTERS
    step_times: StepTimes = NOT_MEASURED  # measured if there is an `itl_target`


def head_of_queue(state: EngineState) -> Sequence:
    """The head of the queue for the last plan: the first sequence whose client was not
    deferred, whose blocks are not on their way and whose adapter was ready; or if there
    is none, the first of all. The queue must not be empty.
    """
    deferred, loading = state.deferred_clients, state.tiers.loading
    unready = state.adapters.unready
    return state.waiting.first_but(deferred, loading, unready) or state.waiting.first()


def waiting_sample(state: EngineState, name: SampleId) -> Sequence | None:
    """The sequence of a sample, if it waits. Its place alone does not tell: a request
    that goes on with an earlier one may have the place next to it.
    """
    request, sample = name
    live = state.requests.get(request)
    if live is None or not 0 <= sample < live.samples:
        return None
    seq = state.waiting.find(live.place_of(sample))
    return seq if seq is not None and seq.id == name else None


def place_is_taken(state: EngineState, place: Place) -> bool:
    """Whether a sequence waits or runs at a place."""
    seqs = state.running.seqs
    index = bisect_left(seqs, place, key=attrgetter("place"))
    runs = any(seq.place == place for seq in seqs[index : index + 1])
    return runs or state.waiting.find(place) is not None


def pages_coming(state: EngineState) -> bool:
    """Whether pages are about to be available, though nothing ends or is preempted: those
    behind a fence, written by a load, or for a state that is being saved.
    """
    return (
        bool(state.fences)
        or any(transfer.kind.to_device for transfer in state.tiers.transfers)
        or any(plan.saves for plan in state.inflight)
    )


@frozen
class Transition:
    """The result of a turn: the next state, commands and reasons."""

    state: EngineState
    commands: tuple[Command, ...] = ()
    reasons: tuple[Reason, ...] = ()


@frozen
class Turn:
    """One turn with its input and output: a journal replays it, and a simulation makes
    it.
    """

    number: int  # from 0
    before: EngineState
    events: tuple[Event, ...]
    transition: Transition


def emit(
    state: EngineState,
    finished: tuple[Finished, ...],
    ids: SampleIds = (),
    tokens: Yields = (),
    logprobs: Logprobs = (),
    pooled: Pooled = (),
) -> Transition:
    """The transition that emits tokens and ends, with a reason for each sample that
    ended.
    """
    ended = [Ended(end.id, end.sample, end.reason, end.error) for end in finished]
    return Transition(
        state, (Emit(ids, tokens, finished, logprobs, pooled),), tuple(ended)
    )


def ignore(state: EngineState, event: str, detail: str) -> Transition:
    """The transition of an event that has no meaning in this state."""
    return Transition(state, (), (Ignored(event, detail),))


def initial(config: EngineConfig) -> EngineState:
    """The state before the first event. Raises ConfigError for a policy that cannot
    start.
    """
    rows = tuple(reversed(range(config.max_num_seqs)))
    index = PrefixIndex(
        unstored=() if config.has_tiers else None, state_group=config.state_group or 0
    )
    blocks = Blocks(Pool(config.num_blocks, config.freed_run), index)
    try:
        policy = config.policy.start()
    except Exception as error:
        kind = type(config.policy).__name__
        raise ConfigError(
            f"scheduling policy {kind}: start() raised {error!r}"
        ) from error
    slots = Adapters((AdapterSlot(),) * config.adapter_slots)
    return EngineState(
        blocks, rows, policy, tiers=Tiers.under(config.host), adapters=slots
    )
