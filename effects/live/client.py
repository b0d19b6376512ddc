"""The engine client: the only way to an engine, and all that anybody may ask of one.

Theory. Text, HTTP and templates are on one side of this line, the engine is on the other.
What crosses it is requests and wishes one way, and messages the other way: frozen records
of plain data, so that they mean the same in this process and through a socket.

    submit, cancel, finish --->  +--------+
                                 | engine |     News: all that a turn brought, at once
    hear(News | Died)      <---  +--------+     Died: nobody will hear anything any more

A message is for a listener, which is a front: whoever keeps the requests that it has
submitted, spells their tokens and finds their stop strings (`minfer.effects.live.front`).
News come in the order of turns, and a turn is one message however many requests it
concerns, so that a step's outputs cross once.

Two forms: `minfer.effects.live.worker.Worker` runs the engine in a thread of this
process. One across processes is to come; the times here are those of the system's
monotonic clock, which all processes of a machine share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from minfer.effects.live.totals import NOTHING_COUNTED, Totals
from minfer.messages import (
    Admitted,
    Ended,
    Finish,
    Finished,
    Held,
    Missed,
    Preempted,
)
from minfer.plan import Logprobs, Pooled
from minfer.request import Request
from minfer.sequence import Place, SampleIds

# What the engine may say of a request besides its tokens and its end, with the time of
# the news that it is in.
About = Admitted | Held | Preempted | Missed | Ended


@frozen(kw_only=True)
class News:
    """What one turn of the engine brought to the requests of a listener."""

    time: float  # of the turn, in seconds
    # New tokens by sample, as two columns in the order of the batch: a sample may have
    # none, and never has any after its end.
    ids: SampleIds = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    # A column too, if anybody asked: a token's log-probabilities for each new token.
    logprobs: Logprobs = ()
    # A column too, if any prompt was pooled: the vectors of samples that ended with it.
    pooled: Pooled = ()
    # A column too, if anybody had some: drafts. Those that stood are tokens but the last.
    drafts: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()  # samples that ended, after these tokens
    arrived: tuple[str, ...] = ()  # requests that came in line, before the reasons
    # Of these, where rounds of searches are in line that did not say it themselves.
    places: Mapping[str, Place] = field(factory=dict)
    reasons: tuple[About, ...] = ()
    # Seconds in which somebody waited so far, by what who was next in line waited for: a
    # request's own are the difference from when it arrived to when it was admitted.
    waits: Mapping[str, float] = field(factory=dict)


@frozen
class Died:
    """The engine serves nobody any more; of these requests nothing more will come."""

    ids: tuple[str, ...]
    why: str


Message = News | Died
Listener = Callable[[Message], None]  # in the engine's thread: be quick, do not raise


@frozen(kw_only=True)
class Snapshot:
    """How an engine is at a moment, for metrics and health."""

    time: float  # seconds
    dead: str  # why it serves nobody any more, or nothing
    draining: bool  # it takes no new requests
    requests: int  # being served
    running: int  # samples
    waiting: int  # samples
    # Samples that wait, by what for: who is next in line for its cause, the others for
    # their turn.
    waiting_for: Mapping[str, int]
    blocks: int  # KV blocks there are
    blocks_free: int  # that could be handed out; some of them are cached:
    blocks_cached: int  # on which nobody stands, kept until the space is needed
    resets: int  # how often the prefix cache was reset
    # Seconds in which requests waited and no step was planned. 0 if nobody waits, or the
    # policy has them wait.
    stalled: float
    failing: int  # steps that failed since the last good one
    totals: Totals  # since the start
    # Whether turns are written to a journal now; None: nobody asked for one.
    journal_writing: bool | None = None
    journal_errors: int = 0  # attempts to write one that failed
    # What all fronts have counted, where they are processes of their own.
    fronts: Totals = NOTHING_COUNTED


class EngineClient(Protocol):
    """An engine, as its callers see it. Methods may be called from any thread."""

    @property
    def dead(self) -> BaseException | None:
        """Why the engine serves nobody any more, if so."""
        ...

    @property
    def unready(self) -> str:
        """Why requests have to wait for the engine itself now, or nothing: it is in
        another process, and is being loaded.
        """
        ...

    @property
    def working(self) -> bool:
        """Whether news may come. False: nobody is served, or nobody ever will be."""
        ...

    @property
    def resets(self) -> int:
        """How often the prefix cache was reset; see `reset_cache`."""
        ...

    def clock(self) -> float:
        """The time, in seconds, on the clock of all messages."""
        ...

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """Have a listener hear all messages from now on.

        With `early`, in a turn in which samples start, who came and all reasons are told
        before the step runs, and the rest of its news after that: should that step kill
        the engine's process, it is known whose it was.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise what a request would be refused with now, as far as that is known.

        EngineDeadError (DrainingError if it drains), RequestError if one with this id is
        being served, OverloadedError if the line is full.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Serve requests: all of them enter the same turn, or none.

        A request whose `output` has tokens goes on after them: news hold what comes then,
        and lengths count from the first. Raises EngineDeadError, and RequestError for an
        id that is being served. A line that is full is told as an end, "rejected".
        """
        ...

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """End requests; returns those that were being served.

        Their last news come as ever. Unknown ids are left alone.
        """
        ...

    def finish(self, ends: Sequence[Finish]) -> None:
        """End samples at a length in output tokens, for a reason, such as a stop string.

        The engine may have told of more tokens by then, which do not count.
        """
        ...

    def reset_cache(self) -> None:
        """Find nothing any more of what the prefix cache holds now.

        The engine has no event for that. Blocks are found by content keys, and a key
        covers all that is before it, so the edge makes the keys of new requests from
        `resets` too: no request made from now on meets a key from before. What is cached
        goes as its space is needed, requests that run are not disturbed, and a journal of
        it replays as any other. Raises EngineDeadError.
        """
        ...

    def snapshot(self) -> Snapshot:
        """How the engine is now."""
        ...

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait until nobody is served, at most `timeout` s.

        Returns whether that is so. From then on `submit` raises DrainingError.
        """
        ...

    def close(self) -> None:
        """Cancel everything and let go of the engine. May be called again."""
        ...
