"""An API server's end of the links: an `EngineClient` whose engine is in another process,
or is several, its replicas.

It keeps each request and every token that came. When a link is over, its requests go to
another replica, or wait for the next link, and are resubmitted, with the tokens as
history: listeners notice only a pause. Samples of one request continue as requests of
their own, each with its number in the draws of the seed, so that sampling continues
exactly as before.

    submit ---> link ---> outputs ---> link is over ---> resubmit ---> outputs ---> ended
                                    (tokens are kept) (as history)

It has no socket: the owner of the sockets calls `connect`, `receive` and `disconnect`,
all in one thread, which is the thread in which listeners are called. What a listener
raises is logged: it harms neither the link nor other listeners. The other methods are an
`EngineClient`'s; those that send to an engine belong to that thread, too.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from attrs import evolve

from minfer.effects.cluster.engine_client.api_server_request import ApiServerRequest
from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.engine_status import (
    summed_snapshot,
    unknown_snapshot,
)
from minfer.effects.cluster.engine_client.placement import Placement
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.replica_link import (
    MAX_FAILED_LOADS,
    ReplicaLink,
)
from minfer.effects.cluster.engine_client.request_queries import RequestQueries
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashingRequest, request_digest
from minfer.effects.cluster.link.crash_rule import (
    GIVEN_UP,
    REFUSAL_MESSAGE,
    EngineEnd,
)
from minfer.effects.live.client import (
    EngineDied,
    EngineMessage,
    Listener,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import (
    CrashingRequestError,
    DrainingError,
    EngineDeadError,
    check_queue,
)
from minfer.effects.live.request_registry import RequestRegistry
from minfer.effects.live.totals import Totals, sum_totals
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request

POLL_SECONDS: Final = 0.02  # between two checks while waiting for the end
_log = logging.getLogger("minfer.link")
_GIVEN_UP_MESSAGE: Final = f"{GIVEN_UP}: the request itself is the cause"


class RemoteEngine:
    """The client of an engine in another process, or of its replicas."""

    def __init__(
        self,
        api_server: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 2**20,
        replicas: int = 1,
        router: ApiServerRouter | None = None,
        prefill: PrefillFirst | None = None,
        prefillers: int = 0,
        external: int = 0,
        last_end: Callable[[int], EngineEnd] = lambda _: EngineEnd(),
    ) -> None:
        """`max_waiting` is each replica's; several need a `router`. There are `replicas`
        of this server (on this machine, or on a Ray cluster), of which the first
        `prefillers` compute prompts for the others, and behind these `external` of other
        servers, all of which do that, too. `last_end` returns the last end of an engine
        of a replica of this server.
        """
        self._last_end = last_end
        self.api_server = api_server
        self.life = secrets.randbits(62)  # of this process and its counts: see `count`
        self.clock = clock
        self.max_waiting = max_waiting
        self.dead: BaseException | None = None
        self.draining = False
        self.resets = 0
        self.links = 0  # links so far
        self.queries = RequestQueries()
        self.live = RequestRegistry()
        self.replicas = tuple(
            ReplicaLink(number, number < prefillers or number >= replicas)
            for number in range(replicas + external)
        )
        for link in self.replicas[replicas:]:
            link.is_external = True
        self._placement = Placement(self.live, self.replicas, router, prefill, clock)
        self._requests = self._placement.requests
        self._router = router
        self._listeners: list[Listener] = []
        self._sending = False

    # --- what callers ask for -----------------------------------------------------------

    @property
    def unready(self) -> str:
        """As `EngineClient` says: nothing, once a replica is ready."""
        linked = [link for link in self.replicas if link.send is not None]
        states = [link.unready for link in linked or self.replicas]
        return "" if "" in states else states[0]

    @property
    def machine(self) -> str:
        """As `EngineClient` says."""
        return self.replicas[0].machine

    @property
    def ready(self) -> wire.EngineReady | None:
        """The facts of this server's first engine that was ready, if any was."""
        return next(
            (link.ready for link in self.own_replicas if link.ready is not None), None
        )

    @property
    def sent(self) -> Mapping[str, int]:
        """How many requests were sent, by the name of the replica, a space, and why."""
        return self._placement.sender.sent

    @property
    def own_replicas(self) -> list[ReplicaLink]:
        """The replicas of this server."""
        return [link for link in self.replicas if not link.is_external]

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
        num_ready = sum(link.progress is None for link in self.replicas)
        check_queue(self._waiting(), request.n, self.max_waiting * max(1, num_ready))

    def submit(self, requests: Sequence[Request]) -> None:
        """As `EngineClient` says; without a replica that takes them, requests wait for
        one. Those that go to the same one enter the same turn.
        """
        for request in requests:
            self._check_new(request)
        self._placement.submit([self._requests.add(request) for request in requests])

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """As `EngineClient` says."""
        served = [name for name in ids if self.live.is_served(name)]
        for number, names in self._requests.cancel(served).items():
            self._send(number, wire.CancelRequests(tuple(names)))
        self._end(self._requests.pending_ends())
        return frozenset(served)

    def finish(self, ends: Sequence[Finish]) -> None:
        """As `EngineClient` says."""
        for number, named_ends in self._requests.finish(ends).items():
            self._send(number, wire.EndSamples(tuple(named_ends)))
        self._end(self._requests.pending_ends())

    def bound_lengths(self, max_model_len: int) -> None:
        """Note how many tokens a sequence may have."""
        if self._placement.prefill is not None:
            self._placement.prefill.max_model_len = max_model_len

    def reset_cache(self) -> None:
        """As `EngineClient` says, of all replicas."""
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        self.resets += 1
        self._broadcast(wire.ResetCache())

    def drop_adapter(self, digest: str) -> None:
        """As `EngineClient` says, of all replicas."""
        self._broadcast(wire.UnloadAdapter(digest))

    def count(self, totals: Totals) -> None:
        """Send this API server's counts since it began to all replicas of this server."""
        for link in self.own_replicas:
            self._send(link.number, wire.ApiServerTotals(totals))

    def snapshot(self) -> Snapshot:
        """As `EngineClient` says: as last reported."""
        now = self.clock()
        reporting = [link for link in self.replicas if link.snapshot is not None]
        ready = [link for link in reporting if link.progress is None] or reporting
        busy = {request_state.replica for request_state in self._requests.all()}
        snapshots = [
            link.current_snapshot(now, busy=link.number in busy) for link in ready
        ]
        if not snapshots:
            snapshot = unknown_snapshot(now, len(self.live.served()))
        else:
            snapshot = summed_snapshot(
                [reported for reported in snapshots if reported is not None]
            )
        if self._router is not None:
            unplaced = list(self._requests.unplaced.values())  # this may be any thread
            count = sum(len(request_state.left()) for request_state in unplaced)
            waiting_here = {"replica": count} if count else {}
            has_prefillers = self._placement.prefill is not None
            snapshot = evolve(
                snapshot,
                waiting=snapshot.waiting + count,
                waiting_for={**snapshot.waiting_for, **waiting_here},
                totals=sum_totals(link.totals for link in reporting),
                replicas=tuple(
                    [link.state(has_prefillers=has_prefillers) for link in self.replicas]
                ),
            )
        return evolve(
            snapshot,
            dead="" if self.dead is None else repr(self.dead),
            draining=self.draining or snapshot.draining,
            resets=self.resets,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """As `EngineClient` says. In the links' own thread, in which outputs come, only
        with a timeout of 0, which does not wait.
        """
        self.draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while self.working and (end is None or time.monotonic() < end):
            time.sleep(POLL_SECONDS)
        return not self.working

    def close(self) -> None:
        """As `EngineClient` says; the engine keeps running, for others."""
        if self.dead is None:
            self.dead = EngineDeadError("it was closed")
            ids = tuple(self.live.served())
            for number, names in self._requests.cancel(ids).items():
                self._send(number, wire.CancelRequests(tuple(names)))
            self._requests.close()
            self._send_to_listeners(EngineDied(ids, "the engine client was closed"))

    # --- the links ----------------------------------------------------------------------

    def connect(
        self,
        send: Callable[[wire.ToEngine], None],
        replica: int = 0,
        local_address: str = "",
    ) -> None:
        """Introduce this API server on a new link to a replica, and resubmit what waits
        for that. `local_address`: this machine's address on the link, if that is to
        another machine.
        """
        self.links += 1
        link = self.replicas[replica]
        if not link.is_external:  # there are other servers' API servers and engines
            # Before anything is sent: the first message is a hello.
            end = link.end_of_last(self._last_end(replica))
            self._give_up(self._requests.causes(replica, end))
            self.queries.connect(send)
        link.connect(send, self.clock(), local_address)
        resumed = self._placement.resumed_by(link)
        crashing = () if link.is_external else self._placement.denylist.all()
        send(
            wire.ApiServerHello(
                self.api_server, self.life, self.resets, resumed, crashing
            )
        )
        self._placement.place_waiting()

    def receive(self, message: wire.ToApiServer, replica: int = 0) -> None:
        """Handle a message of a replica."""
        link = self.replicas[replica]
        link.last_message = self.clock()
        match message:
            case wire.ApiServerOutputs():
                self._take_outputs(message, replica)
            case wire.EngineStatus(snapshot):
                link.note_status(snapshot)
                self.resets = max(self.resets, snapshot.resets)
                self._placement.note_time()
            case wire.ProbingRequest():
                self._note_probing(link, message)
            case wire.NewCrashingRequests(crashing):
                self._deny(crashing)
                self._placement.place_waiting()  # a client may be isolated from now on
            case wire.CachedKeys() if router := self._placement.router_of(link):
                router.note_keys(link.name, message)
            case wire.EngineLoad() if router := self._placement.router_of(link):
                router.note_load(link.name, message)
            case wire.ReceivedQuery() if link.send is not None:
                self.queries.answer_query(message, link.send)
            case wire.QueryAnswer():
                self.queries.take_answer(message)
            case wire.LoadingProgress():
                self._note_progress(link, message)
            case wire.EngineReady():
                link.ready = message
                self._note_progress(link, None)

    def _note_progress(
        self, link: ReplicaLink, progress: wire.LoadingProgress | None
    ) -> None:
        """Note that an engine loads, is ready, or ends."""
        changed = (link.progress is None) != (progress is None)
        link.progress = progress
        if changed:
            self._placement.note_ready(link)

    def _note_probing(self, link: ReplicaLink, message: wire.ProbingRequest) -> None:
        """Note that an engine serves a request alone, soon will, or serves all again."""
        changed = bool(link.probing) != bool(message.id)
        link.probing, link.alone = message.id, message.alone
        if changed and link.progress is None:
            self._placement.note_ready(link)
        if link.probing:
            self._placement.move_others(link)
            self._end(self._requests.pending_ends())
        self._placement.place_waiting()

    def _deny(self, crashing: Iterable[CrashingRequest]) -> tuple[CrashingRequest, ...]:
        """Add requests to the denylist, and end equal ones; returns the new entries."""
        denylist = self._placement.denylist
        new_entries = denylist.add(crashing)
        if not new_entries:
            return ()
        denied = [
            request_state
            for request_state in self._requests.all()
            if denylist.refuses(request_state.request)
        ]
        for request_state in denied:
            self._fail(request_state, REFUSAL_MESSAGE)
        return new_entries

    def _fail(self, request_state: ApiServerRequest, error: str) -> None:
        """End a request with an error."""
        if request_state.replica is not None:
            self._send(
                request_state.replica, wire.CancelRequests(tuple(request_state.names))
            )
        self._end(tuple(request_state.fail(error)))

    def _give_up(self, causes: Sequence[ApiServerRequest]) -> None:
        """End requests that killed engines, and refuse equal ones."""
        for request_state in causes:
            request = request_state.request
            crashing = CrashingRequest(
                request.client, request_digest(request), request_state.deaths
            )
            self._fail(request_state, _GIVEN_UP_MESSAGE)
            if new_entries := self._deny([crashing]):
                for link in self.own_replicas:
                    self._send(link.number, wire.NewCrashingRequests(new_entries))

    def _take_outputs(self, message: wire.ApiServerOutputs, replica: int) -> None:
        own_outputs = self._requests.take(message, replica)
        outputs = self._placement.hand_over(own_outputs)
        ended = self._requests.end(outputs.finished)
        self._send_to_listeners(outputs)
        if outputs is not own_outputs:  # requests were handed over
            self._end(self._requests.pending_ends())
        self._placement.note_progress(ended)

    def disconnect(self, replica: int = 0, *, cut: bool = False) -> None:
        """Note that a link is over: end what had to end, note which samples may have been
        the cause, and move the others. `cut`: no engine has ended, as the network failed
        or this API server has cut the link.
        """
        link = self.replicas[replica]
        had_served = link.progress is None and not cut
        probing = link.probing if link.alone else ""
        if link.send is not None and not link.is_external:
            self.queries.disconnect(link.send)
        link.disconnect(self.clock())
        self._requests.lose(replica, probing, served=had_served)
        self._placement.note_gone(link)
        self._end(self._requests.pending_ends())
        self._placement.place_waiting()

    def give_up(self, replica: int) -> None:
        """Note that a replica may have no next engine: nothing waits for it any more."""
        self.replicas[replica].failures = MAX_FAILED_LOADS
        self._placement.place_waiting()

    def _send(self, replica: int, message: wire.ToEngine) -> None:
        if (send := self.replicas[replica].send) is not None:
            send(message)

    def _broadcast(self, message: wire.ToEngine) -> None:
        for link in self.replicas:
            self._send(link.number, message)

    def _end(self, finished: tuple[Finished, ...]) -> None:
        """Report ends of samples that no engine will report."""
        if finished:
            ended = self._requests.end(finished)
            self._send_to_listeners(TurnOutputs(time=self.clock(), finished=finished))
            self._placement.note_progress(ended)

    def _send_to_listeners(self, message: EngineMessage) -> None:
        self._sending = True  # a listener may submit a follow-up
        for listener in self._listeners:
            try:
                listener(message)
            except Exception:  # of any kind: the link serves others, too
                _log.exception("a listener of the engine failed")
        self._sending = False

    def _waiting(self) -> int:
        """Returns the number of waiting samples: as last reported, and those of which no
        engine that is ready could report.
        """
        ready = [link for link in self.replicas if link.progress is None]
        reported = sum(
            link.snapshot.waiting for link in ready if link.snapshot is not None
        )
        if not self._requests.unplaced and len(ready) == len(self.replicas):
            return reported
        served = {link.number for link in ready}
        unreported = [
            request_state
            for request_state in self._requests.all()
            if request_state.replica not in served
        ]
        return reported + sum(len(request_state.left()) for request_state in unreported)

    def _check_new(self, request: Request) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}")
        if self.draining and not request.continues:
            raise DrainingError("the server finishes what it serves, and takes no more")
        if self._placement.denylist.refuses(request):
            raise CrashingRequestError(REFUSAL_MESSAGE)
        self.live.check_new(request)
