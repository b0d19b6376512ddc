"""The records of the specification's ledger: an account per sample, a seat per
generation.

They are built from the engine's inputs and outputs only (events, commands, reasons),
never from its state; so that the state can be compared with them.
"""

from collections.abc import Iterable, Sized

from attrs import define, field, frozen

from minfer.blocks.keys import Key, block_keys, group_key
from minfer.blocks.prefix import Pages
from minfer.blocks.window import outside
from minfer.lifecycle.transitions import Stage
from minfer.records.adapters import NO_SLOT
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.drafting import Proposed
from minfer.records.messages import AdapterLost, Discarded, Finished
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import Running, SampleId

SeatTables = tuple[tuple[int, ...], ...]
NOT_SEEN = -1  # the generation of a restarted seat that is in no plan yet


@define(eq=False)
class Seat:
    """A generation of a running sample, as plans and results show it."""

    account: "SampleAccount"
    run_id: int
    row: int  # device row
    num_known_at_admission: int  # tokens
    scheduled: int  # positions that are computed, or will be by plans in flight
    kv: int  # positions whose KV is computed
    tables: SeatTables  # by group: pages, as the device knows them
    opened: bool = False  # an `Open` was sent to the device
    # whether it has taken the pages of the kept state from which it starts
    took_state: bool = False
    last_state: int = 0  # position of the last state that it started from, or saved
    adapter_slot: int = NO_SLOT  # that its row reads, as the device was told


@define(eq=False)
class SampleAccount:
    """One sample from its submission to its end."""

    request: Request
    sample: int
    tokens: tuple[int, ...]  # of prompt and output
    last_index: int  # of the last token it may have
    arrived: float  # seconds
    stage: Stage = Stage.NEW
    cached: int = 0  # prompt tokens from the cache at its first admission
    paused: bool = False  # by the last `Pause` of the host
    proposed: Proposed | None = None  # the last proposal since the last plan was made
    faults: int = 0  # failed steps since its last good one
    seat: Seat | None = None  # while it runs

    @property
    def id(self) -> SampleId:
        """Request id and sample."""
        return self.request.id, self.sample

    @property
    def output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)


@frozen(eq=False)
class SavedState:
    """A state of recurrent layers that a plan has saved, which is over."""

    seat: Seat
    key: Key  # under which it may be kept
    pages: Pages
    tokens: tuple[int, ...]  # before it


@frozen(eq=False)
class PlanInFlight:
    """A plan in flight: the seats of its rows, and the pages that each may touch."""

    plan: Plan
    seats: tuple[Seat, ...]
    pages: tuple[frozenset[int], ...]


@define
class TurnReport:
    """What the engine must report about the events of one turn."""

    tokens: dict[SampleId, tuple[int, ...]] = field(factory=dict)
    # results of prompts: vectors, log-probabilities
    pooled: dict[SampleId, bytes] = field(factory=dict)
    finished: list[Finished] = field(factory=list)  # without errors
    ignored: list[str] = field(factory=list)  # kinds of events
    discarded: list[Discarded] = field(factory=list)  # without errors
    # Samples whose working state is lost: their known tokens, and those with KV.
    requeued: dict[SampleId, tuple[int, int]] = field(factory=dict)
    lost: int = 0  # transfers that failed
    lost_adapters: list[AdapterLost] = field(factory=list)  # without errors
    progress: bool = False  # a running sample has the results of a good step


def new_account(
    config: EngineConfig, request: Request, sample: int, now: float
) -> SampleAccount:
    """The account of a sample that was just submitted."""
    last_index = min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1
    if request.prompt_only is not None:  # it never gets the token after its prompt
        last_index = len(request.prompt)
    return SampleAccount(
        request, sample, request.prompt + request.output, last_index, now
    )


def touched_pages(config: EngineConfig, seat: Seat, start: int) -> frozenset[int]:
    """The pages that a row may read or write in a plan that starts at `start`."""
    pages = set[int]()
    for table, group in zip(seat.tables, config.groups, strict=False):
        low = outside(start, group.window, config.block_size)
        sinks = group.sink_blocks(config.block_size)
        pages.update(table[low * group.pages :], table[: sinks * group.pages])
    return frozenset(pages)


def held_blocks(
    config: EngineConfig, group: CacheGroup, blocks: range, low: int
) -> list[int]:
    """Those of some blocks of a running sequence that it holds in a group of which the
    blocks below `low`, but for those of sink tokens, were released.
    """
    size = config.block_size
    return [block for block in blocks if block >= low or block * size < group.sink_tokens]


def state_key(config: EngineConfig, seat: Seat, position: int) -> Key:
    """The key of the state of a row's recurrent layers after `position` tokens."""
    request, tokens = seat.account.request, seat.account.tokens[:position]
    keys = block_keys(request.root, tokens, config.block_size)
    return group_key(keys[-1], len(config.block_groups))


def capacity(config: EngineConfig, tables: Iterable[Sized]) -> int:
    """How many positions all tables of a row have room for."""
    pairs = zip(tables, config.block_groups, strict=False)
    return config.block_size * min(len(table) // group.pages for table, group in pairs)


def tables_of(run: Running, i: int) -> SeatTables:
    """The tables of the sequence at `i`."""
    return tuple(tuple(table) for table in run.tables[i])
