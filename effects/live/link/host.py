"""The engine's end of all links: the connected fronts, and the outputs for each of them.

    front 0 ---+                        +--- its rows of outputs ---> front 0
    front 1 ---+---> Host ---> engine --+--- its rows of outputs ---> front 1
    ...        |                        +--- ...

It listens to the engine's client as any front would, and sends each front the outputs of
its own requests (`shares`). Requests of a front that disconnects are cancelled.

Messages of fronts come in one thread, outputs in the engine's: a lock guards all.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from attrs import evolve

from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    EngineMessage,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.link import link_messages as wire
from minfer.effects.live.link.output_routing import LinkedRequest, OutputRouter, Session
from minfer.effects.live.link.quarantine import SUSPECT_DEATHS, Quarantine
from minfer.effects.live.totals import NO_TOTALS, Totals, sum_totals
from minfer.records.messages import Finished, clip
from minfer.records.request import Request

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
        fronts: int = 1,
        died: Callable[[str], None] = print,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fronts` is the number of fronts; `died` gets why the engine broke, once.
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
        self._requests: dict[str, LinkedRequest] = {}  # of all fronts, by id
        self._router = OutputRouter()
        self._resets = 0  # of the prefix cache, by all fronts so far
        self._quarantine = Quarantine()
        self._fronts = fronts
        self._missing = set(range(fronts))
        self._opened = 0.0
        self._processes: dict[
            int, int
        ] = {}  # by front: which of its processes is connected
        self._front_totals: dict[int, Totals] = {}  # by front
        self._past_totals = NO_TOTALS  # counts of fronts' earlier processes

    # --- the engine ---------------------------------------------------------------------

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Report the engine's progress to all fronts; ignored once it is ready."""
        with self._lock:
            if self._client is not None:
                return
            self._reported = self._clock()
            self._progress = wire.encode(wire.LoadingProgress(stage, done, total))
            self._broadcast(self._progress)

    def open(self, client: EngineClient, ready: wire.EngineReady) -> None:
        """Serve all connected fronts: the engine is ready."""
        with self._lock:
            self._client = client
            self._opened = client.clock()
            self._step = _CPU_STEP if ready.device == "cpu" else _STEP
            client.listen(self.hear, early=True)
            self._ready = wire.encode(ready)
            self._broadcast(self._ready)
            self._serve_due()

    def hear(self, message: EngineMessage) -> None:
        """Pass a message of the engine on, to each front its own part."""
        with self._lock:
            match message:
                case TurnOutputs():
                    self._send_outputs(message)
                case EngineDied():
                    self._died(message.why)

    def tick(self) -> None:
        """Send the engine's state to all fronts, and call `beat` if it is well; to be
        called some times a second.
        """
        with self._lock:
            if self._client is None:
                if self._clock() - self._reported < STAGE:
                    self._beat()
                return
            self._serve_due()  # the wait for a front may be over
            snapshot = self._client.snapshot()
            if snapshot.stalled < self._step:
                self._beat()
            if self._sessions:
                self._broadcast(
                    wire.encode(wire.EngineStatus(self._with_front_counts(snapshot)))
                )

    # --- fronts -------------------------------------------------------------------------

    def join(self, session: Session) -> None:
        """Add a new link."""
        with self._lock:
            self._sessions.append(session)
            session.send(self._ready or self._progress)

    def leave(self, session: Session) -> None:
        """Remove a closed link, and cancel the requests that came over it."""
        with self._lock:
            self._sessions.remove(session)
            gone = set(session.ids)
            for name in gone:
                self._remove(name)
            held = {name for name in gone if self._quarantine.drop(name) is not None}
            if self._client is not None:
                self._client.cancel(gone - held)
            if self._quarantine.probing in gone:
                self._note_cleared(self._quarantine.probing)

    def receive(self, session: Session, message: wire.ToEngine) -> None:
        """Handle a front's message. Raises LinkError for an invalid one."""
        with self._lock:
            if (session.front is None) is not isinstance(message, wire.Hello):
                raise wire.LinkError("a front says hello first, and once")
            match message:
                case wire.Hello():
                    self._accept_front(session, message)
                case wire.SubmitRequests(requests):
                    self._submit(session, requests)
                case wire.CancelRequests(ids):
                    self._cancel(session, ids)
                case wire.EndSamples(ends):
                    if self._client is not None:
                        self._client.finish([e for e in ends if e.id in session.ids])
                case wire.ResetCache():
                    self._resets += 1
                case wire.SendQuery() | wire.SendAnswer():
                    self._pass_on(session, message)
                case wire.FrontTotals(totals):
                    if session.front is not None:
                        self._front_totals[session.front] = totals

    def _pass_on(
        self, session: Session, message: wire.SendQuery | wire.SendAnswer
    ) -> None:
        """Pass a front's question on to all others, or an answer to the front that
        asked.
        """
        if isinstance(message, wire.SendAnswer):
            for one in self._sessions:
                if one.front == message.front:
                    one.send(wire.encode(message.answer))
            return
        others = [one for one in self._sessions if one.front not in (None, session.front)]
        for one in others:
            fields = (session.front or 0, message.number, len(others), message.query)
            one.send(wire.encode(wire.ReceivedQuery(*fields)))
        if not others:
            session.send(wire.encode(wire.QueryAnswer(message.number, 0)))

    def _accept_front(self, session: Session, hello: wire.Hello) -> None:
        if not 0 <= hello.front < self._fronts:
            raise wire.LinkError(f"there is no front {hello.front}")
        session.front = hello.front
        if (
            self._processes.get(hello.front) != hello.life
        ):  # a new process counts from zero
            last = self._front_totals.pop(hello.front, NO_TOTALS)
            self._past_totals = sum_totals([self._past_totals, last])
            self._processes[hello.front] = hello.life
        self._resets = max(self._resets, hello.resets)
        self._missing.discard(hello.front)
        resumed = {one.request.id: one for one in hello.resumed}
        for request in self._register(session, [one.request for one in hello.resumed]):
            deaths = resumed[request.id].deaths
            if deaths >= SUSPECT_DEATHS:
                self._quarantine.suspect(request, deaths)
            else:
                self._quarantine.hold([request])
        self._serve_due()

    def _submit(self, session: Session, requests: Sequence[Request]) -> None:
        self._quarantine.hold(self._register(session, requests))
        self._serve_due()

    def _register(self, session: Session, requests: Sequence[Request]) -> list[Request]:
        """Register requests; returns them without those that are refused."""
        taken = []
        for request in requests:
            if request.id in session.ids:
                raise wire.LinkError(f"request {clip(request.id)!r} was asked for twice")
            if request.id in self._requests:
                why = "a request with this id is being served; ids must differ"
                self._refuse(session, request, "rejected", why)
                continue
            self._requests[request.id] = LinkedRequest(session, request.n)
            session.ids.add(request.id)
            taken.append(request)
        return taken

    def _cancel(self, session: Session, ids: Sequence[str]) -> None:
        running = []
        for name in ids:
            if name not in session.ids:
                continue
            waiting = self._quarantine.drop(name)
            if waiting is None:
                running.append(name)
            else:
                self._remove(name)
                self._refuse(session, waiting, "cancelled")
        if self._client is not None:
            self._client.cancel(running)

    def _remove(self, name: str) -> None:
        if (request := self._requests.pop(name, None)) is not None:
            request.session.ids.discard(name)

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
        before = self._quarantine.probing
        due = self._quarantine.due()
        probing = self._quarantine.probing
        if probing != before:
            # If earlier requests still run beside the suspect, a death would prove
            # nothing.
            is_solo = self._requests.keys() - self._quarantine.waiting() <= {probing}
            self._broadcast(wire.encode(wire.ProbingRequest(probing if is_solo else "")))
        # Grammars may have to be compiled first, for which no other request should wait.
        bound = [one for one in due if one.sampling.structured_outputs is not None]
        free = tuple(one for one in due if one.sampling.structured_outputs is None)
        if free:
            self._submit_to_engine(client, free)
        for request in bound:
            self._submit_to_engine(client, (request,))

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
            session = self._requests[request.id].session
            self._remove(request.id)
            self._refuse(session, request, "rejected", str(error))
            self._note_cleared(request.id)

    def _awaits_fronts(self, client: EngineClient) -> bool:
        """Returns whether missing fronts may still come back with suspects of their
        own.
        """
        return bool(self._missing) and client.clock() < self._opened + PATIENCE

    def _note_cleared(self, name: str) -> None:
        """Note that a request is cleared, or is gone, and serve the requests that waited
        for that.
        """
        if self._quarantine.clear(name):
            if not self._quarantine.closed:
                self._broadcast(wire.encode(wire.ProbingRequest()))
            self._serve_due()

    def _send_outputs(self, outputs: TurnOutputs) -> None:
        parts = self._router.route(outputs, self._sessions, self._requests)
        for session, part in parts:
            session.send(wire.encode(part))
        self._note_ends(outputs)

    def _note_ends(self, outputs: TurnOutputs) -> None:
        """Note which requests have ended, and whether the suspect is cleared."""
        for done in outputs.finished:
            if (request := self._requests.get(done.id)) is not None:
                request.unfinished -= 1
                if not request.unfinished:
                    self._remove(done.id)
        probing = self._quarantine.probing
        if probing:
            each = zip(outputs.ids, outputs.tokens, strict=True)
            cleared = False
            for (name, sample), tokens in each:
                if name == probing and self._quarantine.give(sample, len(tokens)):
                    cleared = True
            if cleared or probing not in self._requests:
                self._note_cleared(probing)

    def _broadcast(self, message: bytes) -> None:
        for session in list(self._sessions):
            session.send(message)

    def _with_front_counts(self, now: Snapshot) -> Snapshot:
        """Returns the engine's state, with the counts of fronts and resets."""
        fronts = sum_totals([self._past_totals, *self._front_totals.values()])
        return evolve(now, resets=self._resets, fronts=fronts)
