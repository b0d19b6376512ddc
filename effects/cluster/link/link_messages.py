"""The messages between API servers and an engine, as a schema.

Both ends check what they read against it; reading a message can never run code. A step's
outputs are one message for each API server that has rows in it. The ids of a batch are
sent when they change: while the same sequences decode, a message holds little more than
their new tokens.
"""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from minfer.blocks.keys import Keys
from minfer.effects.cluster.link.crash_denylist import CrashingRequest
from minfer.effects.cluster.link.crash_rule import CLEARING_TOKENS
from minfer.effects.live.client import Snapshot
from minfer.effects.live.totals import Totals
from minfer.effects.net.framing import UNREADABLE, PeerError
from minfer.records.messages import (
    Admitted,
    Finish,
    Finished,
    Missed,
    Preempted,
    QueueBlocked,
)
from minfer.records.plan import Pooled
from minfer.records.request import Request
from minfer.records.sequence import Place, SampleIds
from minfer.records.token_logprobs import Logprobs

MAX_MESSAGE_BYTES: Final = 2**30

# --- from an API server to the engine ---------------------------------------------------


class Resumed(Struct, frozen=True):
    """A request, or one of its samples, that another engine has served, with its tokens
    so far as its `output`; or a new one of a client whose requests run alone.
    """

    request: Request
    deaths: int  # engines in a row that served it, did not clear it and died
    to_clear: int = CLEARING_TOKENS  # more tokens than these of an engine clear it
    isolated: bool = False  # it runs alone whatever its deaths are


class ApiServerHello(Struct, tag="hello", frozen=True):
    """An API server is connected, with those of its requests that wait for this
    engine.
    """

    api_server: int  # its number, from 0
    life: int  # different for each process with this number
    resets: int  # of the prefix cache, as far as this API server knows
    resumed: tuple[Resumed, ...]
    crashing: tuple[CrashingRequest, ...] = ()  # the API server's denylist


class SubmitRequests(Struct, tag="submit", frozen=True):
    """Serve requests: all of them in the same turn."""

    requests: tuple[Request, ...]


class ResumeRequests(Struct, tag="resume", frozen=True):
    """Serve requests that come with a history: see `Resumed`."""

    resumed: tuple[Resumed, ...]


class CancelRequests(Struct, tag="cancel", frozen=True):
    """End requests."""

    ids: tuple[str, ...]


class EndSamples(Struct, tag="end", frozen=True):
    """End samples at a length."""

    ends: tuple[Finish, ...]


class ResetCache(Struct, tag="reset", frozen=True):
    """Make all blocks in the prefix cache unusable for new requests."""


class UnloadAdapter(Struct, tag="unload_adapter", frozen=True):
    """Free the places of an adapter that has no name any more."""

    digest: str


class ApiServerTotals(Struct, tag="counted", frozen=True):
    """An API server's counts since it began, for metrics."""

    totals: Totals


class NewCrashingRequests(Struct, tag="crashing_requests", frozen=True):
    """New entries of the denylist, in both directions: an engine forwards entries that
    are new to it to its other API servers.
    """

    crashing: tuple[CrashingRequest, ...]


class RequestQuery(Struct, frozen=True):
    """A question about a request."""

    name: str  # its answer's id, or the client's own id
    owner: str = ""  # the name of the asking client's key
    cancel: bool = False  # the API server that has it should cancel it


class SendQuery(Struct, tag="send_query", frozen=True):
    """Ask all other API servers."""

    number: int  # of the question; unique in this server
    query: RequestQuery


class QueryAnswer(Struct, tag="query_answer", frozen=True):
    """An API server's answer to another one's question."""

    number: int  # of the question
    others: int  # API servers that were asked; each of them answers
    record: bytes = b""  # JSON, or nothing


class SendAnswer(Struct, tag="answer", frozen=True):
    """This API server's answer to a `ReceivedQuery`, for the API server that asks."""

    api_server: int
    answer: QueryAnswer


ToEngine: TypeAlias = (
    ApiServerHello
    | SubmitRequests
    | ResumeRequests
    | CancelRequests
    | EndSamples
    | ResetCache
    | UnloadAdapter
    | ApiServerTotals
    | NewCrashingRequests
    | SendQuery
    | SendAnswer
)

# --- from the engine to an API server ---------------------------------------------------


class LoadingProgress(Struct, tag="progress", frozen=True):
    """What an engine does that takes no requests: it is loading, or ends as it was asked
    to, so that no request is the cause.
    """

    stage: str
    done: int = 0
    total: int = 0  # 0: unknown


class EngineReady(Struct, tag="ready", frozen=True):
    """The engine is ready; with the facts of its setup that an API server needs."""

    device: str  # its type
    num_blocks: int
    fingerprint: bytes
    max_model_len: int | None = None  # None: that of the API server's own settings


class AdmittedReason(Struct, tag="admitted", frozen=True):
    """Carries the reason of that name; so do those below."""

    reason: Admitted


class BlockedReason(Struct, tag="blocked", frozen=True):
    """See `AdmittedReason`."""

    reason: QueueBlocked


class PreemptedReason(Struct, tag="preempted", frozen=True):
    """See `AdmittedReason`."""

    reason: Preempted


class MissedReason(Struct, tag="missed", frozen=True):
    """See `AdmittedReason`."""

    reason: Missed


WireReason: TypeAlias = AdmittedReason | BlockedReason | PreemptedReason | MissedReason
REASONS: Final = {
    Admitted: AdmittedReason,
    QueueBlocked: BlockedReason,
    Preempted: PreemptedReason,
    Missed: MissedReason,
}


class ApiServerOutputs(Struct, tag="outputs", frozen=True, omit_defaults=True):
    """A turn's outputs for the requests of one API server: see `client.TurnOutputs`."""

    time: float
    ids: SampleIds | None = ()  # of the batch; None: the same as in the last batch
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: Logprobs = ()
    pooled: Pooled = ()
    drafts: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    arrived: tuple[str, ...] = ()
    places: dict[str, Place] = {}
    reasons: tuple[WireReason, ...] = ()
    waits: dict[str, float] = {}


class EngineStatus(Struct, tag="state", frozen=True):
    """The engine's state, sent several times a second; with all resets so far, and the
    counts of all API servers.
    """

    snapshot: Snapshot


class ProbingRequest(Struct, tag="probing", frozen=True):
    """The request that the engine serves alone from now on; with an empty id, it serves
    all requests again. While other requests still run, `alone` is false, and this
    request has not started.
    """

    id: str = ""
    alone: bool = True


class CachedKeys(Struct, tag="cached", frozen=True, omit_defaults=True):
    """Blocks that entered and left the engine's prefix cache: sent if there are other
    engines.
    """

    published: Keys = ()
    evicted: Keys = ()
    cleared: bool = False  # before that: all that are known from earlier messages


class EngineLoad(Struct, tag="load", frozen=True):
    """The engine's load, sent if there are other engines: see `routing.messages`."""

    waiting: int  # sequences
    running: int  # sequences
    prefill: int  # tokens of both that are still to be computed
    pages: int  # that can be allocated
    adapters: tuple[str, ...] | None = None  # on its device; None: it has none


class ReceivedQuery(Struct, tag="received_query", frozen=True):
    """A question of another API server."""

    api_server: int  # that asks
    number: int  # of its question
    others: int  # API servers that are asked
    query: RequestQuery


ToApiServer: TypeAlias = (
    LoadingProgress
    | EngineReady
    | ApiServerOutputs
    | EngineStatus
    | ProbingRequest
    | CachedKeys
    | EngineLoad
    | NewCrashingRequests
    | ReceivedQuery
    | QueryAnswer
)

_encoder: Final = msgspec.msgpack.Encoder()
# Of unions, which type checkers do not accept as types.
_to_engine: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_to_api_server: Final[msgspec.msgpack.Decoder[ToApiServer]] = msgspec.msgpack.Decoder(
    ToApiServer
)


class LinkError(PeerError):
    """A message on a link that violates the schema or protocol."""


def encode(message: ToEngine | ToApiServer) -> bytes:
    """Returns a message as bytes."""
    return _encoder.encode(message)


def read_to_engine(data: bytes) -> ToEngine:
    """Returns an API server's message. Raises LinkError."""
    try:
        return _to_engine.decode(data)
    except UNREADABLE as error:
        raise LinkError(f"an API server says what it must not: {error}") from None


def read_to_api_server(data: bytes) -> ToApiServer:
    """Returns the engine's message. Raises LinkError."""
    try:
        return _to_api_server.decode(data)
    except UNREADABLE as error:
        raise LinkError(f"the engine says what it must not: {error}") from None
