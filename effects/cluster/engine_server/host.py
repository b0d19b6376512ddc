"""The engine's end of all links: the connected fronts, and the outputs for each of them.

    front 0 ---+                        +--- its rows of outputs ---> front 0
    front 1 ---+---> Host ---> engine --+--- its rows of outputs ---> front 1
    ...        |                        +--- ...

It listens to the engine's client as any front would, and sends each front the outputs of
its own requests (`output_routing`). Requests of a front that disconnects are cancelled.

Messages of fronts come in one thread, outputs in the engine's: a lock guards all.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.blocks.keys import block_keys, tail_keys
from minfer.effects.cluster.engine_server.front_counts import FrontCounts
from minfer.effects.cluster.engine_server.output_routing import OutputRouter, Session
from minfer.effects.cluster.engine_server.query_forwarding import pass_on
from minfer.effects.cluster.engine_server.replica_news import ReplicaNews
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashDenylist, CrashingRequest
from minfer.effects.cluster.link.crash_rule import REFUSAL_MESSAGE
from minfer.effects.cluster.link.quarantine import Held, Quarantine
from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    EngineMessage,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.live_requests import LiveRequests, Stage
from minfer.records.messages import Finish, Finished, clip
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition

STAGE: Final = 1800.0  # seconds that one stage of loading may take
# Seconds without a completed step, after which the engine may hang: a GPU's steps are
# short, and on a CPU a long prompt of a large model takes minutes.
_STEP: Final = 1.0
_CPU_STEP: Final = 600.0
PATIENCE: Final = 2.0  # seconds in which known fronts should be back


class Host:
    """The sessions of an engine that is passed to `open`, now or later."""

    def __init__(
        self,
        fronts: int | None = 1,
        died: Callable[[str], None] = print,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        block_size: int = 0,
    ) -> None:
        """`fronts` is the number of fronts; None: they are those of other machines, and
        their number is not known. Their requests' keys are computed again, which needs
        the engine's `block_size`. `died` gets the reason of the engine's end, once.
        `beat` is called in each tick in which the engine seems well; `clock` is for the
        time before it is ready.
        """
        self._lock = threading.RLock()
        self._died = died
        self._beat = beat
        self._clock = clock
        self._reported = clock()  # when the stage of loading began
        self._step = _STEP
        self._client: EngineClient | None = None
        self._ready: bytes = b""
        self._progress = wire.encode(wire.LoadingProgress("starting"))
        self._sessions: list[Session] = []
        self._live = LiveRequests()  # the client's, once there is one
        self._readers: dict[str, Session] = {}  # of outputs, by request id
        self._router = OutputRouter()
        self._resets = 0  # of the prefix cache, by all fronts so far
        self._quarantine = Quarantine()
        self._probing = wire.ProbingRequest()  # as fronts know it
        self._denylist = CrashDenylist(clock)
        self._fronts = fronts
        self._block_size = block_size
        self._missing = set(range(fronts or 0))
        self._opened = 0.0
        self._news: ReplicaNews | None = None
        self._counts = FrontCounts()

    # --- the engine ---------------------------------------------------------------------

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Report the engine's progress to all fronts; ignored once it is ready."""
        with self._lock:
            if self._client is not None:
                return
            self._reported = self._clock()
            self._progress = wire.encode(wire.LoadingProgress(stage, done, total))
            self._broadcast(self._progress)

    def open(
        self,
        client: EngineClient,
        ready: wire.EngineReady,
        news: ReplicaNews | None = None,
    ) -> None:
        """Serve all connected fronts: the engine is ready. `news` are for their routers,
        if it is one of several.
        """
        with self._lock:
            self._client = client
            self._news = news
            client.live.update(self._live)
            self._live = client.live
            self._opened = client.clock()
            self._step = _CPU_STEP if ready.device == "cpu" else _STEP
            client.listen(self.hear, early=True)
            self._ready = wire.encode(ready)
            self._broadcast(self._ready)
            self._serve_due()

    def end(self) -> None:
        """Tell all fronts that the engine ends, as it was asked to: no request is the
        cause.
        """
        with self._lock:
            self._broadcast(wire.encode(wire.LoadingProgress("ending")))

    def hear(self, message: EngineMessage) -> None:
        """Pass a message of the engine on, to each front its own part."""
        with self._lock:
            match message:
                case TurnOutputs():
                    self._send_outputs(message)
                case EngineDied():
                    self._died(message.why)

    def note_turn(self, before: EngineState, transition: Transition) -> None:
        """Pass on what a turn of the engine has changed in its cache, in its thread."""
        with self._lock:
            if self._news is not None:
                self._news.observe(before, transition)
                self._send_news(self._news.due(self._clock()))

    def _send_news(self, messages: Iterable[wire.ToFront]) -> None:
        for message in messages:
            data = wire.encode(message)
            for session in self._sessions:
                if session.front is not None:  # else it gets all after its hello
                    session.send(data)

    def tick(self) -> None:
        """Send the engine's state to all fronts, and call `beat` if it is well; to be
        called some times a second.
        """
        with self._lock:
            if self._client is None:
                if self._clock() - self._reported < STAGE:
                    self._beat()
                return
            if self._quarantine.is_over(self._client.clock()):
                self._note_cleared(self._quarantine.probing)
            self._serve_due()  # the wait for a front may be over
            snapshot = self._client.snapshot()
            if snapshot.stalled < self._step:
                self._beat()
            if self._sessions:
                self._broadcast(
                    wire.encode(wire.EngineStatus(self._with_front_counts(snapshot)))
                )
            if self._news is not None:
                self._send_news(self._news.regular(self._clock()))

    # --- fronts -------------------------------------------------------------------------

    def join(self, session: Session) -> None:
        """Add a new link."""
        with self._lock:
            self._sessions.append(session)
            session.send(self._ready or self._progress)
            if self._probing.id:
                session.send(wire.encode(self._probing))

    def leave(self, session: Session) -> None:
        """Remove a closed link, and cancel the requests that came over it."""
        with self._lock:
            self._sessions.remove(session)
            linked = self._readers.items()
            gone = {name for name, one in linked if one is session}
            for name in gone:
                self._release(name)
            held = {name for name in gone if self._quarantine.drop(name) is not None}
            if self._client is not None:
                self._client.cancel(gone - held)
            self._note_cleared(*gone)
            self._serve_due()

    def receive(self, session: Session, message: wire.ToEngine) -> None:
        """Handle a front's message. Raises LinkError for an invalid one."""
        with self._lock:
            if (session.front is None) is not isinstance(message, wire.Hello):
                raise wire.LinkError("a front says hello first, and once")
            match message:
                case wire.Hello():
                    self._accept_front(session, message)
                case wire.NewCrashingRequests(crashing):
                    self._deny(session, crashing)
                case wire.SubmitRequests(requests):
                    self._submit(session, requests)
                case wire.ResumeRequests(resumed):
                    self._resume(session, resumed)
                case wire.CancelRequests(ids):
                    self._cancel(session, ids)
                case wire.EndSamples(ends):
                    self._finish(session, ends)
                case wire.ResetCache():
                    self._resets += 1
                case wire.SendQuery() | wire.SendAnswer():
                    pass_on(session, message, self._sessions)
                case wire.FrontTotals(totals):
                    if session.front is not None:
                        self._counts.note(session.front, totals)

    def _accept_front(self, session: Session, hello: wire.Hello) -> None:
        if self._fronts is None:
            session.front = hello.life  # their numbers are of different servers
        elif 0 <= hello.front < self._fronts:
            session.front = hello.front
            self._counts.begin(hello.front, hello.life)
        else:
            raise wire.LinkError(f"there is no front {hello.front}")
        self._resets = max(self._resets, hello.resets)
        self._missing.discard(hello.front)
        if self._news is not None:
            for piece in self._news.whole():
                session.send(wire.encode(piece))
        if known := self._denylist.all():
            session.send(wire.encode(wire.NewCrashingRequests(known)))
        self._deny(session, hello.crashing)
        self._resume(session, hello.resumed)

    def _deny(self, session: Session, crashing: Sequence[CrashingRequest]) -> None:
        """Add requests to the denylist, and forward the new entries."""
        if new := self._denylist.add(crashing):
            data = wire.encode(wire.NewCrashingRequests(new))
            for other in self._sessions:
                if other is not session:
                    other.send(data)

    def _resume(self, session: Session, resumed: Sequence[wire.Resumed]) -> None:
        by_id = {resume.request.id: resume for resume in resumed}
        for request in self._register(session, [resume.request for resume in resumed]):
            resume = by_id[request.id]
            held = Held(request, resume.deaths, resume.to_clear, isolated=resume.isolated)
            self._quarantine.hold([held])
        self._serve_due()

    def _submit(self, session: Session, requests: Sequence[Request]) -> None:
        registered = self._register(session, requests)
        self._quarantine.hold([Held(request) for request in registered])
        self._serve_due()

    def _register(self, session: Session, requests: Sequence[Request]) -> list[Request]:
        """Register requests; returns them without those that are refused."""
        taken = []
        if self._fronts is None:
            requests = [self._with_own_keys(request) for request in requests]
        for request in requests:
            if self._is_of(session, request.id):
                raise wire.LinkError(f"request {clip(request.id)!r} was asked for twice")
            try:
                self._live.add(request, read=True)
            except RequestError as error:
                self._refuse(session, request, "rejected", str(error))
            else:
                self._readers[request.id] = session
                taken.append(request)
        return taken

    def _release(self, name: str) -> None:
        """Note that the outputs of a request are not sent any more."""
        self._readers.pop(name, None)
        self._live.release(name)

    def _with_own_keys(self, request: Request) -> Request:
        """Returns a request of another server with keys that are computed here."""
        root, prompt, size = request.root, request.prompt, self._block_size
        keys = block_keys(root, prompt, size) if request.keys else ()
        continuation = request.continuation
        if continuation.tail_keys is not None:
            tails = tail_keys(root, keys, prompt, size)
            continuation = evolve(continuation, tail_keys=tails)
        return evolve(request, keys=keys, continuation=continuation)

    def _is_of(self, session: Session, name: str) -> bool:
        """Returns whether a live request came over this link."""
        return self._readers.get(name) is session

    def _cancel(self, session: Session, ids: Sequence[str]) -> None:
        waiting, running = list[Request](), list[str]()
        for name in ids:
            if not self._is_of(session, name):
                continue
            held = self._quarantine.drop(name)
            if held is None:
                running.append(name)
            else:
                waiting.append(held)
                self._release(name)
                self._refuse(session, held, "cancelled")
        if self._client is not None:
            self._client.cancel(running)
        if waiting:  # one of them may have been the next suspect
            self._serve_due()

    def _finish(self, session: Session, ends: Sequence[Finish]) -> None:
        if self._client is not None:
            self._client.finish([end for end in ends if self._is_of(session, end.id)])

    def _refuse(
        self, session: Session, request: Request, reason: str, why: str = ""
    ) -> None:
        """End a request that never reached the engine."""
        length = len(request.output)
        ended = tuple(
            Finished(request.id, sample, reason, length, why)
            for sample in range(request.n)
        )
        time = 0.0 if self._client is None else self._client.clock()
        session.send(wire.encode(wire.FrontOutputs(time, finished=ended)))

    # --- between fronts and engine ------------------------------------------------------

    def _serve_due(self) -> None:
        """Submit to the engine what is not in quarantine."""
        client = self._client
        if client is None or self._awaits_fronts(client):
            return
        due = self._quarantine.due(self._running, client.clock())
        due = self._without_crashing(due)
        probing = wire.ProbingRequest(self._quarantine.probing, self._quarantine.started)
        if not probing.id:
            probing = wire.ProbingRequest()
        if probing != self._probing:
            self._probing = probing
            self._broadcast(wire.encode(probing))
        # Grammars may have to be compiled first, for which no other request should wait.
        bound = [one for one in due if one.sampling.structured_outputs is not None]
        free = tuple(one for one in due if one.sampling.structured_outputs is None)
        if free:
            self._submit_to_engine(client, free)
        for request in bound:
            self._submit_to_engine(client, (request,))

    def _running(self) -> set[str]:
        """Returns the ids of the requests that the engine has."""
        return self._readers.keys() - self._quarantine.waiting()

    def _submit_to_engine(self, client: EngineClient, due: tuple[Request, ...]) -> None:
        try:
            client.submit(due)
        except EngineDeadError:
            pass  # it is resubmitted to the next engine
        except RequestError as error:
            if len(due) > 1:  # one of them is invalid, the others are not
                for request in due:
                    self._submit_to_engine(client, (request,))
                return
            (request,) = due
            self._end_unserved(request, "rejected", str(error))

    def _awaits_fronts(self, client: EngineClient) -> bool:
        """Returns whether missing fronts may still come back with suspects of their
        own.
        """
        missing = self._fronts is None or bool(self._missing)
        return missing and client.clock() < self._opened + PATIENCE

    def _without_crashing(self, due: tuple[Request, ...]) -> tuple[Request, ...]:
        """Refuse requests on the denylist; returns the others."""
        served = list[Request]()
        for request in due:
            if self._denylist.refuses(request):
                self._end_unserved(request, "error", REFUSAL_MESSAGE)
            else:
                served.append(request)
        return tuple(served)

    def _end_unserved(self, request: Request, reason: str, error: str) -> None:
        """End a registered request that the engine does not have."""
        session = self._readers.get(request.id)
        self._release(request.id)
        if session is not None:
            self._refuse(session, request, reason, error)
        self._note_cleared(request.id)

    def _note_cleared(self, *names: str) -> None:
        """Note that requests are cleared, or are gone, and serve the requests that waited
        for that.
        """
        now = self._clock() if self._client is None else self._client.clock()
        if any(self._quarantine.clear(name, now) for name in names):  # only one runs
            self._serve_due()

    def _send_outputs(self, outputs: TurnOutputs) -> None:
        parts = self._router.route(outputs, self._sessions, self._readers)
        for session, part in parts:
            session.send(wire.encode(part))
        self._note_ends(outputs)

    def _note_ends(self, outputs: TurnOutputs) -> None:
        """Note which requests have ended, and whether the suspect is cleared."""
        for done in outputs.finished:
            one = self._live.get(done.id)
            if one is not None and one.stage is Stage.ENDED:
                self._release(done.id)
        probing = self._quarantine.probing
        if probing:
            each = zip(outputs.ids, outputs.tokens, strict=True)
            cleared = False
            for (name, sample), tokens in each:
                if name == probing and self._quarantine.give(sample, len(tokens)):
                    cleared = True
            if cleared or probing not in self._live:
                self._note_cleared(probing)
            if outputs.finished:
                self._serve_due()  # the suspect may be alone now

    def _broadcast(self, message: bytes) -> None:
        for session in list(self._sessions):
            session.send(message)

    def _with_front_counts(self, now: Snapshot) -> Snapshot:
        """Returns the engine's state, with the counts of fronts and resets."""
        return evolve(now, resets=self._resets, fronts=self._counts.total())
