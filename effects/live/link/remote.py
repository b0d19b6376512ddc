"""A front's end of the link: an `EngineClient` whose engine is in another process.

It keeps each request and every token that came. When the link is over it waits for the
next one, and resubmits what has not ended, with the tokens as history: listeners notice
only a pause. Samples of one request continue as requests of their own, each with its
number in the draws of the seed, so that sampling continues exactly as before.

    submit ---> link ---> outputs ---> link is over ---> resubmit ---> outputs ---> ended
                                    (tokens are kept) (as history)

It has no socket: the owner of the socket calls `connect`, `receive` and `disconnect`, all
in one thread, which is the thread in which listeners are called. The other methods are an
`EngineClient`'s; those that send to the engine belong to that thread, too.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.effects.live.client import (
    EngineDied,
    EngineMessage,
    Listener,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import (
    DrainingError,
    EngineDeadError,
    check_queue,
)
from minfer.effects.live.link import link_messages as wire
from minfer.effects.live.link.engine_status import reported_snapshot, unknown_snapshot
from minfer.effects.live.link.front_requests import FrontRequests
from minfer.effects.live.link.request_queries import RequestQueries
from minfer.effects.live.live_requests import LiveRequests
from minfer.effects.live.totals import Totals
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request

POLL: Final = 0.02  # seconds between two checks while waiting for the end


class Remote:
    """The client of an engine in another process."""

    def __init__(
        self,
        front: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 2**20,
    ) -> None:
        self.front = front
        self.life = secrets.randbits(62)  # of this process and its counts: see `count`
        self.clock = clock
        self.max_waiting = max_waiting
        self.dead: BaseException | None = None
        self.draining = False
        self.resets = 0
        self.links = 0  # links so far
        self.queries = RequestQueries()
        # Progress of an engine that is not ready; None: it is ready.
        self.progress: wire.LoadingProgress | None = wire.LoadingProgress(
            "waiting for the engine"
        )
        self.ready: wire.EngineReady | None = (
            None  # the engine's facts, once it was ready
        )
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._listeners: list[Listener] = []
        self._sending = False
        self.live = LiveRequests()
        self._requests = FrontRequests(self.live)
        self._probing = ""  # by its name on the link
        self._snapshot: Snapshot | None = None  # the engine's last state
        self._last_message = clock()

    # --- what callers ask for -----------------------------------------------------------

    @property
    def unready(self) -> str:
        """As `EngineClient` says."""
        if self.progress is None:
            return ""
        of = f" ({self.progress.done} of {self.progress.total})"
        return self.progress.stage + (of if self.progress.total else "")

    @property
    def working(self) -> bool:
        """As `EngineClient` says."""
        return (bool(self._requests.all()) or self._sending) and self.dead is None

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says; `early` depends on the engine's process."""
        del early
        self._listeners.append(listener)

    def check(self, request: Request) -> None:
        """As `EngineClient` says."""
        self._check_new(request)
        check_queue(self._waiting(), request.n, self.max_waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """As `EngineClient` says; without a link, requests wait for one."""
        for request in requests:
            self._check_new(request)
        for request in requests:
            self._requests.add(request)
        if self._send is not None:
            self._send(wire.SubmitRequests(tuple(requests)))

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """As `EngineClient` says."""
        known = [name for name in ids if self.live.known(name)]
        names = self._requests.cancel(known)
        if self._send is None:
            self._end(self._requests.pending_ends())
        elif known:
            self._send(wire.CancelRequests(names))
        return frozenset(known)

    def finish(self, ends: Sequence[Finish]) -> None:
        """As `EngineClient` says."""
        named_ends = self._requests.finish(ends)
        if self._send is None:
            self._end(self._requests.pending_ends())
        elif named_ends:
            self._send(wire.EndSamples(named_ends))

    def reset_cache(self) -> None:
        """As `EngineClient` says."""
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        self.resets += 1
        if self._send is not None:
            self._send(wire.ResetCache())

    def count(self, totals: Totals) -> None:
        """Send this front's counts since it began to the engine."""
        if self._send is not None:
            self._send(wire.FrontTotals(totals))

    def snapshot(self) -> Snapshot:
        """As `EngineClient` says: as last reported."""
        now = self.clock()
        if self._snapshot is None:
            found = unknown_snapshot(now, len(self.live.served()))
        else:
            quiet = now - self._last_message if self._requests.all() else 0.0
            found = reported_snapshot(
                now, self._snapshot, quiet, ready=self.progress is None
            )
        return evolve(
            found,
            dead="" if self.dead is None else repr(self.dead),
            draining=self.draining or found.draining,
            resets=self.resets,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """As `EngineClient` says; must not be called in the link's own thread."""
        self.draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while self.working and (end is None or time.monotonic() < end):
            time.sleep(POLL)
        return not self.working

    def close(self) -> None:
        """As `EngineClient` says; the engine keeps running, for others."""
        if self.dead is None:
            self.dead = EngineDeadError("it was closed")
            ids = tuple(self.live.served())
            names = self._requests.cancel(ids)
            if self._send is not None and names:
                self._send(wire.CancelRequests(names))
            for name in ids:
                self.live.end(name)
            self._send_to_listeners(EngineDied(ids, "the engine client was closed"))

    # --- the link -----------------------------------------------------------------------

    def connect(self, send: Callable[[wire.ToEngine], None]) -> None:
        """Introduce this front on a new link, and resubmit what has not ended."""
        self.links += 1
        self._send = send
        self.queries.connect(send)
        self._last_message = self.clock()
        self.progress = wire.LoadingProgress("connecting")
        resumed = self._requests.resumed()
        send(wire.Hello(self.front, self.life, self.resets, resumed))

    def receive(self, message: wire.ToFront) -> None:
        """Handle a message of the engine."""
        self._last_message = self.clock()
        match message:
            case wire.FrontOutputs():
                outputs = self._requests.take(message)
                self._requests.end(outputs.finished)
                self._send_to_listeners(outputs)
            case wire.EngineStatus(snapshot):
                self._snapshot = snapshot
                self.resets = max(self.resets, snapshot.resets)
            case wire.ProbingRequest(name):
                self._probing = name
            case wire.ReceivedQuery():
                self.queries.answer_query(message)
            case wire.QueryAnswer():
                self.queries.take_answer(message)
            case wire.LoadingProgress():
                self.progress = message
            case wire.EngineReady():
                self.progress = None
                self.ready = message

    def disconnect(self) -> None:
        """Note that the link is over: end what had to end, and note which samples may
        have been the cause.
        """
        self._send = None
        self.queries.disconnect()
        abandoned = self._requests.lose(self._probing, served=self.progress is None)
        self.progress = wire.LoadingProgress("waiting for the engine")
        self._probing = ""
        self._end(abandoned)
        self._end(self._requests.pending_ends())

    def _end(self, finished: tuple[Finished, ...]) -> None:
        """Report ends of samples that no engine will report."""
        if finished:
            self._requests.end(finished)
            self._send_to_listeners(TurnOutputs(time=self.clock(), finished=finished))

    def _send_to_listeners(self, message: EngineMessage) -> None:
        self._sending = True  # a listener may submit a follow-up
        for listener in self._listeners:
            listener(message)
        self._sending = False

    def _waiting(self) -> int:
        """Returns the number of waiting samples: as last reported, or, for an engine that
        is not ready, all samples here.
        """
        if self.progress is not None:
            return self._requests.samples
        return 0 if self._snapshot is None else self._snapshot.waiting

    def _check_new(self, request: Request) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        if self.draining and request.place is None:
            raise DrainingError("the server finishes what it serves, and takes no more")
        self.live.check_new(request)
