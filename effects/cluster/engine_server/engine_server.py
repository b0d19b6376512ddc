"""The engine's end of all links: the connected API servers, and the outputs for each of
them.

    api 0 ---+                                +--- its rows of outputs ---> api 0
    api 1 ---+---> EngineServer ---> engine --+--- its rows of outputs ---> api 1
    ...      |                                +--- ...

It listens to the engine's client as any API server would, and sends each API server the
outputs of its own requests (`output_routing`). Requests of an API server that disconnects
are cancelled.

Messages of API servers come in one thread, outputs in the engine's: a lock guards all.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import evolve

from minfer.blocks.keys import block_keys, tail_keys
from minfer.effects.cluster.engine_server.api_server_counts import ApiServerCounts
from minfer.effects.cluster.engine_server.cache_event_publisher import CacheEventPublisher
from minfer.effects.cluster.engine_server.output_routing import OutputRouter, Session
from minfer.effects.cluster.engine_server.query_forwarding import forward_query
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_denylist import CrashDenylist, CrashingRequest
from minfer.effects.cluster.link.crash_rule import REFUSAL_MESSAGE
from minfer.effects.cluster.link.quarantine import Quarantine, QuarantinedRequest
from minfer.effects.live.client import (
    EngineClient,
    EngineDied,
    EngineMessage,
    Snapshot,
    TurnOutputs,
)
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from minfer.records.messages import Finish, Finished, clip
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition
from minfer.values.checks import ParameterError

LOADING_STAGE_SECONDS: Final = 1800.0  # that one stage of loading may take
# Without a completed step, after which the engine may hang: a GPU's steps are
# short, and on a CPU a long prompt of a large model takes minutes.
_GPU_STEP_SECONDS: Final = 1.0
_CPU_STEP_SECONDS: Final = 600.0
API_SERVER_RETURN_SECONDS: Final = 2.0  # in which known API servers should be back


class EngineServer:
    """The sessions of an engine that is passed to `open`, now or later."""

    def __init__(
        self,
        api_servers: int | None = 1,
        on_death: Callable[[str], None] = print,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        block_size: int = 0,
    ) -> None:
        """`api_servers` is the number of API servers; None: they are those of other
        machines, and their number is not known. Their requests' keys are computed again,
        which needs the engine's `block_size`. `on_death` gets the reason of the engine's
        end, once. `beat` is called in each tick in which the engine seems well; `clock`
        is for the time before it is ready.
        """
        self._lock = threading.RLock()
        self._on_death = on_death
        self._beat = beat
        self._clock = clock
        self._reported = clock()  # when the stage of loading began
        self._step = _GPU_STEP_SECONDS
        self._client: EngineClient | None = None
        self._ready: bytes = b""
        self._progress = wire.encode(wire.LoadingProgress("starting"))
        self._sessions: list[Session] = []
        self._live = RequestRegistry()  # the client's, once there is one
        self._readers: dict[str, Session] = {}  # of outputs, by request id
        self._router = OutputRouter()
        self._resets = 0  # of the prefix cache, by all API servers so far
        self._quarantine = Quarantine()
        self._probing = wire.ProbingRequest()  # as API servers know it
        self._denylist = CrashDenylist(clock)
        self._api_servers = api_servers
        self._block_size = block_size
        self._missing = set(range(api_servers or 0))
        self._opened = 0.0
        self._publisher: CacheEventPublisher | None = None
        self._counts = ApiServerCounts()

    # --- the engine ---------------------------------------------------------------------

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Report the engine's progress to all API servers; ignored once it is ready."""
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
        publisher: CacheEventPublisher | None = None,
    ) -> None:
        """Serve all connected API servers: the engine is ready. `publisher` is for their
        routers, if it is one of several.
        """
        with self._lock:
            self._client = client
            self._publisher = publisher
            client.live.update(self._live)
            self._live = client.live
            self._opened = client.clock()
            self._step = _CPU_STEP_SECONDS if ready.device == "cpu" else _GPU_STEP_SECONDS
            client.listen(self.handle_message, early=True)
            self._ready = wire.encode(ready)
            self._broadcast(self._ready)
            self._serve_due()

    def end(self) -> None:
        """Tell all API servers that the engine ends, as it was asked to: no request is
        the cause.
        """
        with self._lock:
            self._broadcast(wire.encode(wire.LoadingProgress("ending")))

    def handle_message(self, message: EngineMessage) -> None:
        """Pass a message of the engine on, to each API server its own part."""
        with self._lock:
            match message:
                case TurnOutputs():
                    self._send_outputs(message)
                case EngineDied():
                    self._on_death(message.reason)

    def count_resets(self) -> int:
        """How often API servers have reset the prefix cache."""
        return self._resets

    def note_turn(self, before: EngineState, transition: Transition) -> None:
        """Pass on what a turn of the engine has changed in its cache, in its thread."""
        with self._lock:
            if self._publisher is not None:
                self._publisher.observe(before, transition)
                self._send_cache_events(self._publisher.due_changes(self._clock()))

    def _send_cache_events(self, messages: Iterable[wire.ToApiServer]) -> None:
        for message in messages:
            data = wire.encode(message)
            for session in self._sessions:
                if session.api_server is not None:  # else it gets all after its hello
                    session.send(data)

    def tick(self) -> None:
        """Send the engine's state to all API servers, and call `beat` if it is well; to
        be called some times a second.
        """
        with self._lock:
            if self._client is None:
                if self._clock() - self._reported < LOADING_STAGE_SECONDS:
                    self._beat()
                return
            if self._quarantine.is_over(self._client.clock()):
                self._note_cleared(self._quarantine.probing)
            self._serve_due()  # the wait for an API server may be over
            snapshot = self._client.snapshot()
            if snapshot.stalled < self._step:
                self._beat()
            if self._sessions:
                self._broadcast(
                    wire.encode(wire.EngineStatus(self._with_api_server_counts(snapshot)))
                )
            if self._publisher is not None:
                self._send_cache_events(self._publisher.periodic_messages(self._clock()))

    # --- API servers --------------------------------------------------------------------

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
            readers = self._readers.items()
            names = {name for name, reader in readers if reader is session}
            for name in names:
                self._release(name)
            quarantined = {
                name for name in names if self._quarantine.drop(name) is not None
            }
            if self._client is not None:
                self._client.cancel(names - quarantined)
            self._note_cleared(*names)
            self._serve_due()

    def receive(self, session: Session, message: wire.ToEngine) -> None:
        """Handle an API server's message. Raises LinkError for an invalid one."""
        with self._lock:
            if (session.api_server is None) is not isinstance(
                message, wire.ApiServerHello
            ):
                raise wire.LinkError("an API server says hello first, and once")
            match message:
                case wire.ApiServerHello():
                    self._accept_api_server(session, message)
                case wire.NewCrashingRequests(crashing):
                    self._deny(session, crashing)
                case (
                    wire.SubmitRequests() | wire.ResumeRequests() | wire.CancelRequests()
                ):
                    self._receive_requests(session, message)
                case wire.EndSamples(ends):
                    self._finish(session, ends)
                case wire.ResetCache():
                    self._resets += 1
                case wire.UnloadAdapter(digest):
                    self._drop_adapter(digest)
                case wire.SendQuery() | wire.SendAnswer():
                    forward_query(session, message, self._sessions)
                case wire.ApiServerTotals(totals):
                    if session.api_server is not None:
                        self._counts.note(session.api_server, totals)

    def _receive_requests(
        self,
        session: Session,
        message: wire.SubmitRequests | wire.ResumeRequests | wire.CancelRequests,
    ) -> None:
        match message:
            case wire.SubmitRequests(requests):
                self._submit(session, requests)
            case wire.ResumeRequests(resumed):
                self._resume(session, resumed)
            case wire.CancelRequests(ids):
                self._cancel(session, ids)

    def _accept_api_server(self, session: Session, hello: wire.ApiServerHello) -> None:
        if self._api_servers is None:
            session.api_server = hello.life  # their numbers are of different servers
        elif 0 <= hello.api_server < self._api_servers:
            session.api_server = hello.api_server
            self._counts.begin(hello.api_server, hello.life)
        else:
            raise wire.LinkError(f"there is no api {hello.api_server}")
        self._resets = max(self._resets, hello.resets)
        self._missing.discard(hello.api_server)
        if self._publisher is not None:
            for cached_keys in self._publisher.all_keys():
                session.send(wire.encode(cached_keys))
        if denied := self._denylist.all():
            session.send(wire.encode(wire.NewCrashingRequests(denied)))
        self._deny(session, hello.crashing)
        self._resume(session, hello.resumed)

    def _deny(self, session: Session, crashing: Sequence[CrashingRequest]) -> None:
        """Add requests to the denylist, and forward the new entries."""
        if new_entries := self._denylist.add(crashing):
            data = wire.encode(wire.NewCrashingRequests(new_entries))
            for receiver in self._sessions:
                if receiver is not session:
                    receiver.send(data)

    def _resume(self, session: Session, resumed: Sequence[wire.Resumed]) -> None:
        by_id = {resume.request.id: resume for resume in resumed}
        for request in self._register(session, [resume.request for resume in resumed]):
            resume = by_id[request.id]
            quarantined = QuarantinedRequest(
                request, resume.deaths, resume.to_clear, isolated=resume.isolated
            )
            self._quarantine.add([quarantined])
        self._serve_due()

    def _submit(self, session: Session, requests: Sequence[Request]) -> None:
        registered = self._register(session, requests)
        self._quarantine.add([QuarantinedRequest(request) for request in registered])
        self._serve_due()

    def _register(self, session: Session, requests: Sequence[Request]) -> list[Request]:
        """Register requests; returns them without those that are refused."""
        registered = []
        if self._api_servers is None:
            requests = [self._with_own_keys(request) for request in requests]
        for request in requests:
            if self._is_from(session, request.id):
                raise wire.LinkError(f"request {clip(request.id)!r} was asked for twice")
            try:
                self._live.add(request, read=True)
            except RequestError as error:
                self._refuse(session, request, "rejected", str(error))
            else:
                self._readers[request.id] = session
                registered.append(request)
        return registered

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

    def _is_from(self, session: Session, name: str) -> bool:
        """Returns whether a live request came over this link."""
        return self._readers.get(name) is session

    def _cancel(self, session: Session, ids: Sequence[str]) -> None:
        waiting, running = list[Request](), list[str]()
        for name in ids:
            if not self._is_from(session, name):
                continue
            quarantined = self._quarantine.drop(name)
            if quarantined is None:
                running.append(name)
            else:
                waiting.append(quarantined)
                self._release(name)
                self._refuse(session, quarantined, "cancelled")
        if self._client is not None:
            self._client.cancel(running)
        if waiting:  # one of them may have been the next suspect
            self._serve_due()

    def _finish(self, session: Session, ends: Sequence[Finish]) -> None:
        if self._client is not None:
            self._client.finish([end for end in ends if self._is_from(session, end.id)])

    def _drop_adapter(self, digest: str) -> None:
        """Raises LinkError for what is no digest."""
        try:
            if self._client is not None:
                self._client.drop_adapter(digest)
        except ParameterError as error:
            raise wire.LinkError(f"an API server unloads no adapter: {error}") from None

    def _refuse(
        self, session: Session, request: Request, reason: str, error: str = ""
    ) -> None:
        """End a request that never reached the engine."""
        length = len(request.output)
        ended = tuple(
            Finished(request.id, sample, reason, length, error)
            for sample in range(request.n)
        )
        time = 0.0 if self._client is None else self._client.clock()
        session.send(wire.encode(wire.ApiServerOutputs(time, finished=ended)))

    # --- between API servers and engine -------------------------------------------------

    def _serve_due(self) -> None:
        """Submit to the engine what is not in quarantine."""
        client = self._client
        if client is None or self._awaits_api_servers(client):
            return
        requests = self._quarantine.take_due(self._running, client.clock())
        requests = self._without_crashing(requests)
        probing = wire.ProbingRequest(self._quarantine.probing, self._quarantine.started)
        if not probing.id:
            probing = wire.ProbingRequest()
        if probing != self._probing:
            self._probing = probing
            self._broadcast(wire.encode(probing))
        # Grammars may have to be compiled first, for which no other request should wait.
        constrained = [
            request
            for request in requests
            if request.sampling.structured_outputs is not None
        ]
        unconstrained = tuple(
            request for request in requests if request.sampling.structured_outputs is None
        )
        if unconstrained:
            self._submit_to_engine(client, unconstrained)
        for request in constrained:
            self._submit_to_engine(client, (request,))

    def _running(self) -> set[str]:
        """Returns the ids of the requests that the engine has."""
        return self._readers.keys() - self._quarantine.waiting()

    def _submit_to_engine(
        self, client: EngineClient, requests: tuple[Request, ...]
    ) -> None:
        try:
            client.submit(requests)
        except EngineDeadError:
            pass  # it is resubmitted to the next engine
        except RequestError as error:
            if len(requests) > 1:  # one of them is invalid, the others are not
                for request in requests:
                    self._submit_to_engine(client, (request,))
                return
            (request,) = requests
            self._end_unserved(request, "rejected", str(error))

    def _awaits_api_servers(self, client: EngineClient) -> bool:
        """Returns whether missing API servers may still come back with suspects of their
        own.
        """
        may_be_missing = self._api_servers is None or bool(self._missing)
        return (
            may_be_missing and client.clock() < self._opened + API_SERVER_RETURN_SECONDS
        )

    def _without_crashing(self, requests: tuple[Request, ...]) -> tuple[Request, ...]:
        """Refuse requests on the denylist; returns the others."""
        accepted = list[Request]()
        for request in requests:
            if self._denylist.refuses(request):
                self._end_unserved(request, "error", REFUSAL_MESSAGE)
            else:
                accepted.append(request)
        return tuple(accepted)

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
        api_server_outputs = self._router.route(outputs, self._sessions, self._readers)
        for session, own_outputs in api_server_outputs:
            session.send(wire.encode(own_outputs))
        self._note_ends(outputs)

    def _note_ends(self, outputs: TurnOutputs) -> None:
        """Note which requests have ended, and whether the suspect is cleared."""
        for end in outputs.finished:
            record = self._live.get(end.id)
            if record is not None and record.stage is RequestStage.ENDED:
                self._release(end.id)
        probing = self._quarantine.probing
        if probing:
            rows = zip(outputs.ids, outputs.tokens, strict=True)
            cleared = False
            for (name, sample), tokens in rows:
                if name == probing and self._quarantine.count_tokens(sample, len(tokens)):
                    cleared = True
            if cleared or probing not in self._live:
                self._note_cleared(probing)
            if outputs.finished:
                self._serve_due()  # the suspect may be alone now

    def _broadcast(self, message: bytes) -> None:
        for session in list(self._sessions):
            session.send(message)

    def _with_api_server_counts(self, snapshot: Snapshot) -> Snapshot:
        """Returns the engine's state, with the counts of API servers and resets."""
        return evolve(snapshot, resets=self._resets, api_servers=self._counts.total())
