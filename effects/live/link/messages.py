"""What crosses the line between fronts and an engine, as a schema.

Both ends check what they read against it; nothing that is read can run code. A step's
outputs are one message for each front that has rows in it. The ids of a batch are sent
when they change: while the same sequences decode, a message holds little more than their
new tokens.
"""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import Totals
from minfer.messages import Admitted, Ended, Finish, Finished, Held, Missed, Preempted
from minfer.plan import Logprobs, Pooled
from minfer.request import Request
from minfer.sequence import Place, SampleIds

# --- from a front to the engine ---------------------------------------------------------


class Resumed(Struct, frozen=True):
    """A request that an engine of before served, with what came of it as its `output`."""

    request: Request
    deaths: int  # of engines in a row that served it and did not clear it
    deaths_alone: int  # of engines that served nobody else


class Hello(Struct, tag="hello", frozen=True):
    """A front is there, with the requests that it has."""

    front: int  # its number, from 0
    life: int  # another one for each process that has had this number
    resets: int  # of the prefix cache, as many as it has heard of
    resumed: tuple[Resumed, ...]


class Submit(Struct, tag="submit", frozen=True):
    """Serve requests: all of them in the same turn."""

    requests: tuple[Request, ...]


class Cancel(Struct, tag="cancel", frozen=True):
    """End requests."""

    ids: tuple[str, ...]


class End(Struct, tag="end", frozen=True):
    """End samples at a length."""

    ends: tuple[Finish, ...]


class ResetCache(Struct, tag="reset", frozen=True):
    """Find nothing any more of what the prefix cache holds now."""


class Counted(Struct, tag="counted", frozen=True):
    """What a front has counted since it began, for metrics."""

    totals: Totals


class Wanted(Struct, frozen=True):
    """A request that a front looks for: what is known of it?"""

    name: str  # its answer's id, or what its client chose
    owner: str = ""  # the name of the key of who asks
    cancel: bool = False  # whoever has it is to end it


class Ask(Struct, tag="ask", frozen=True):
    """Ask all other fronts."""

    number: int  # of the question; no other one of this server has it
    wanted: Wanted


class Told(Struct, tag="told", frozen=True):
    """What one front knows of what another one asked."""

    number: int  # of the question
    others: int  # fronts that were asked; each of them answers
    record: bytes = b""  # JSON, or nothing


class Answer(Struct, tag="answer", frozen=True):
    """What this front knows of what it was `Asked`, for the front that asks."""

    front: int
    told: Told


ToEngine: TypeAlias = Hello | Submit | Cancel | End | ResetCache | Counted | Ask | Answer

# --- from the engine to a front ---------------------------------------------------------


class Progress(Struct, tag="progress", frozen=True):
    """How far an engine is that is not ready yet."""

    stage: str
    done: int = 0
    total: int = 0  # 0: that is not known


class Ready(Struct, tag="ready", frozen=True):
    """The engine serves; with what a front has to know of how it was set up."""

    device: str  # its kind
    num_blocks: int
    fingerprint: bytes


class AdmittedReason(Struct, tag="admitted", frozen=True):
    """Carries the reason of that name; as do those below."""

    of: Admitted


class HeldReason(Struct, tag="held", frozen=True):
    """See `AdmittedReason`."""

    of: Held


class PreemptedReason(Struct, tag="preempted", frozen=True):
    """See `AdmittedReason`."""

    of: Preempted


class MissedReason(Struct, tag="missed", frozen=True):
    """See `AdmittedReason`."""

    of: Missed


class EndedReason(Struct, tag="ended", frozen=True):
    """See `AdmittedReason`."""

    of: Ended


Reason: TypeAlias = (
    AdmittedReason | HeldReason | PreemptedReason | MissedReason | EndedReason
)
REASONS: Final = {
    Admitted: AdmittedReason,
    Held: HeldReason,
    Preempted: PreemptedReason,
    Missed: MissedReason,
    Ended: EndedReason,
}


class News(Struct, tag="news", frozen=True, omit_defaults=True):
    """What a turn brought to the requests of one front: see `client.News`."""

    time: float
    ids: SampleIds | None = ()  # of the batch; None: those of the batch before
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: Logprobs = ()
    pooled: Pooled = ()
    drafts: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    arrived: tuple[str, ...] = ()
    places: dict[str, Place] = {}
    reasons: tuple[Reason, ...] = ()
    waits: dict[str, float] = {}


class State(Struct, tag="state", frozen=True):
    """How the engine is, said several times a second; with all resets that there ever
    were, and what all fronts have counted.
    """

    snapshot: Snapshot


class Probing(Struct, tag="probing", frozen=True):
    """From now on the engine serves this request alone, or, without one, any again."""

    id: str = ""


class Asked(Struct, tag="asked", frozen=True):
    """Another front asks."""

    front: int  # that asks
    number: int  # of its question
    others: int  # fronts that are asked
    wanted: Wanted


ToFront: TypeAlias = Progress | Ready | News | State | Probing | Asked | Told

_encoder: Final = msgspec.msgpack.Encoder()
# Of unions, which type checkers take for no types.
_to_engine: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_to_front: Final[msgspec.msgpack.Decoder[ToFront]] = msgspec.msgpack.Decoder(ToFront)


class LinkError(ValueError):
    """What came over a link is not what its other end says."""


# What msgspec raises for bytes that are no message; the last two are not of its family.
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encoded(message: ToEngine | ToFront) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def read_to_engine(data: bytes) -> ToEngine:
    """What a front says. Raises LinkError."""
    try:
        return _to_engine.decode(data)
    except _UNREADABLE as error:
        raise LinkError(f"a front says what it must not: {error}") from None


def read_to_front(data: bytes) -> ToFront:
    """What the engine says. Raises LinkError."""
    try:
        return _to_front.decode(data)
    except _UNREADABLE as error:
        raise LinkError(f"the engine says what it must not: {error}") from None
