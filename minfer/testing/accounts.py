"""What the specification's ledger keeps: an account per sample, a seat per generation.

Everything in here was learned from what the engine was told and what it said (events,
commands, reasons), never from its state; so that the state can be compared with it.
"""

from attrs import define, field, frozen

from minfer.config import EngineConfig
from minfer.messages import Finished, Voided
from minfer.plan import Plan
from minfer.request import Request
from minfer.sequence import SampleId
from minfer.speculate.drafting import Proposed
from minfer.testing.lifetime import Stage
from minfer.window import outside

NOT_SEEN = -1  # the generation of a seat that was begun anew and is in no plan yet


@define(eq=False)
class Seat:
    """A generation of a running sample, as far as plans and results tell of it."""

    account: "Account"
    gen: int
    row: int  # device row
    base: int  # tokens known when it began
    sched: int  # positions that are computed, or will be by plans in flight
    kv: int  # positions whose KV is there for certain
    table: tuple[int, ...]  # blocks, as the device knows them
    opened: bool = False  # the device has been told of it


@define(eq=False)
class Account:
    """One sample from its submission to its end."""

    request: Request
    sample: int
    known: tuple[int, ...]  # tokens: prompt and output
    last: int  # index of the last token it may have
    arrived: float  # seconds
    stage: Stage = Stage.NEW
    cached: int = 0  # prompt tokens that the cache gave at its first admission
    paused: bool = False  # the host has said that it is not ready for it
    proposed: Proposed | None = None  # what may follow, since the last plan was made
    faults: int = 0  # failed steps since its last good one
    seat: Seat | None = None  # while it runs

    @property
    def id(self) -> SampleId:
        """Request id and sample."""
        return self.request.id, self.sample

    @property
    def output(self) -> int:
        """Output tokens so far."""
        return len(self.known) - len(self.request.prompt)


@frozen(eq=False)
class Flight:
    """A plan in flight: whose rows it has, and the blocks that each may touch."""

    plan: Plan
    seats: tuple[Seat, ...]
    blocks: tuple[frozenset[int], ...]


@define
class Told:
    """What the engine has to say about the events of one turn."""

    tokens: dict[SampleId, tuple[int, ...]] = field(factory=dict)
    # what is said of prompts: vectors, log-probabilities
    pooled: dict[SampleId, bytes] = field(factory=dict)
    finished: list[Finished] = field(factory=list)  # but for errors
    ignored: list[str] = field(factory=list)  # kinds of events
    voided: list[Voided] = field(factory=list)  # but for errors
    progress: bool = False  # somebody who runs has the results of a good step


def account(config: EngineConfig, request: Request, sample: int, now: float) -> Account:
    """A sample that was just submitted."""
    last = min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1
    if request.ends_with_prompt:  # it never gets the token that follows its prompt
        last = len(request.prompt)
    return Account(request, sample, request.prompt + request.output, last, now)


def touched(config: EngineConfig, seat: Seat, start: int) -> frozenset[int]:
    """The blocks that a row may read or write in a plan that starts at `start`."""
    return frozenset(seat.table[outside(start, config.window, config.block_size) :])
