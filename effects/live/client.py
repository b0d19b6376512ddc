"""The engine client: the only interface to an engine.

Theory. Text, HTTP and templates are on one side of this interface, the engine is on the
other. Requests and commands cross it one way, and messages the other way: frozen records
of plain data, so that they mean the same in this process and through a socket.

    submit, cancel, finish --->  +--------+
                                 | engine |     all outputs of a turn, at once
    TurnOutputs, EngineDied <--  +--------+     or that no more messages will come

A message is for a listener, which is an API server: the API server keeps the requests
that it has submitted, detokenizes their tokens and finds their stop strings
(`minfer.effects.live.frontend`). Outputs come in the order of turns, and a turn is one
message however many requests it concerns, so that a step's outputs cross once.

Two implementations: `EngineWorker` (live/engine/engine_worker.py) runs the engine in a
thread of this process, `RemoteEngine` (cluster/engine_client/remote_engine.py) speaks to
one in another process. Times are those of the system's monotonic clock, which all
processes of a machine share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from attrs import field, frozen

from minfer.effects.live.request_registry import RequestRegistry
from minfer.effects.live.totals import NO_TOTALS, Totals
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

# What an engine does: all of a request, or its prompt, or what comes after that.
BOTH: Final = "both"
PREFILL: Final = "prefill"
DECODE: Final = "decode"

# What the engine reports of a request besides its tokens and its end, with the time of
# the outputs that it is in.
RequestReason = Admitted | QueueBlocked | Preempted | Missed


@frozen(kw_only=True)
class TurnOutputs:
    """One turn's outputs and events, for the requests of a listener."""

    time: float  # of the turn, in seconds
    # New tokens by sample, as two columns in the order of the batch: a sample may have
    # none, and never has any after its end.
    ids: SampleIds = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    # Also a column, if requested: a token's log-probabilities for each new token.
    logprobs: Logprobs = ()
    # Also a column, if any prompt was pooled: the vectors of samples that ended with it.
    pooled: Pooled = ()
    # Also a column, if there were any: drafts. Accepted ones are all tokens but the last.
    drafts: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()  # samples that ended, after these tokens
    # requests that entered the waiting queue, before the reasons
    arrived: tuple[str, ...] = ()
    # Of these, the queue places of search rounds that did not have one of their own.
    places: Mapping[str, Place] = field(factory=dict)
    reasons: tuple[RequestReason, ...] = ()
    # Seconds in which requests waited so far, by what blocked the head of the queue: a
    # request's own are the difference between its arrival and its admission.
    waits: Mapping[str, float] = field(factory=dict)


@frozen
class EngineDied:
    """The engine serves no requests any more; for these requests nothing more will
    come.
    """

    ids: tuple[str, ...]
    reason: str


EngineMessage = TurnOutputs | EngineDied
# Called in the engine's thread or, in an API server's process, in its event loop: be
# quick, do not raise.
Listener = Callable[[EngineMessage], None]


@frozen(kw_only=True)
class ReplicaState:
    """One of several engines, at a moment."""

    name: str
    machine: str = ""  # where it is now; nothing while it is nowhere
    role: str = BOTH
    unready: str  # what it waits for, or nothing
    running: int  # samples
    waiting: int  # samples
    blocks: int  # all KV blocks
    blocks_free: int  # that can be allocated

    @property
    def usage(self) -> float:
        """The share of its KV cache that running samples hold."""
        return 1 - self.blocks_free / self.blocks if self.blocks else 0.0


@frozen(kw_only=True)
class Snapshot:
    """An engine's state at a moment, for metrics and health; of several engines, sums."""

    time: float  # seconds
    dead: str  # why it serves no requests any more, or nothing
    draining: bool  # it takes no new requests
    requests: int  # being served
    running: int  # samples
    waiting: int  # samples
    # Waiting samples, by cause: what blocks the head of the queue; the others wait for
    # their turn.
    waiting_for: Mapping[str, int]
    blocks: int  # all KV blocks
    blocks_free: int  # that can be allocated; some of them are cached:
    blocks_cached: int  # not in use, kept until the space is needed
    resets: int  # how often the prefix cache was reset
    # Seconds in which requests waited and no step was planned. 0 if no request waits, or
    # the policy lets them wait.
    stalled: float
    failing: int  # steps that failed since the last good one
    totals: Totals  # since the start
    # Whether turns are written to a journal now; None: no journal is configured.
    journal_writing: bool | None = None
    journal_errors: int = 0  # failed attempts to write one
    # Adapters (digests) of running samples; and of requests of which no sample runs.
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    # Counts of all API servers, where they are processes of their own.
    api_servers: Totals = NO_TOTALS
    replicas: tuple[ReplicaState, ...] = ()  # if there are several


class EngineClient(Protocol):
    """An engine's interface for its callers. Methods of an `EngineWorker` may be called
    from any thread; those of a `RemoteEngine` that send to an engine, only in the thread
    of its links, which is the event loop's.
    """

    @property
    def dead(self) -> BaseException | None:
        """Why the engine serves no requests any more, if so."""
        ...

    @property
    def live(self) -> RequestRegistry:
        """The live requests of this process."""
        ...

    @property
    def unready(self) -> str:
        """Why requests have to wait for the engine itself now, or nothing: it is in
        another process, and is being loaded.
        """
        ...

    @property
    def machine(self) -> str:
        """The engine's machine, by its name; of several engines, that of the first. Empty
        while it has none.
        """
        ...

    @property
    def working(self) -> bool:
        """Whether outputs may come: requests are served, and the engine lives."""
        ...

    @property
    def resets(self) -> int:
        """How often the prefix cache was reset; see `reset_cache`."""
        ...

    def clock(self) -> float:
        """The time, in seconds, on the clock of all messages."""
        ...

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """Have a listener get all messages from now on.

        With `early`, in a turn in which samples start, arrivals and all reasons are
        reported before the step runs, and the rest of its outputs after that: if that
        step kills the engine's process, the requests in it are known.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise the error with which a request would be refused now, as far as that is
        known.

        EngineDeadError (DrainingError if it drains), RequestError if one with this id is
        being served, OverloadedError if the waiting queue is full.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Serve requests: all of them enter the same turn, or none.

        A request whose `output` has tokens continues after them: outputs hold what comes
        then, and lengths count from the first. Raises EngineDeadError, and RequestError
        for an id that is being served. If the queue is full, requests end with the reason
        "rejected".
        """
        ...

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """End requests; returns those that were being served.

        Their last outputs come as usual. Unknown ids are ignored.
        """
        ...

    def finish(self, ends: Sequence[Finish]) -> None:
        """End samples at a length in output tokens, for a reason, such as a stop string.

        The engine may have reported more tokens by then, which do not count.
        """
        ...

    def reset_cache(self) -> None:
        """Make all blocks in the prefix cache unusable for new requests.

        The engine has no event for that. Blocks are found by content keys, and a key
        covers all tokens before it, so the keys of new requests also depend on `resets`:
        no request made from now on matches an earlier key. Cached blocks are evicted as
        their space is needed, running requests are not disturbed, and a journal of it
        replays as any other. Raises EngineDeadError.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Free the places of an adapter that was unloaded, once no request uses it."""
        ...

    def snapshot(self) -> Snapshot:
        """Returns the engine's state now."""
        ...

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait until none is served, at most `timeout` s.

        Returns whether that is so. From then on `submit` raises DrainingError.
        """
        ...

    def close(self) -> None:
        """Cancel all requests and release the engine. May be called again."""
        ...
