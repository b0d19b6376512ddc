"""The engine's end of all links: which fronts are there, and what each of them hears.

    front 0 ---+                        +--- its rows of the news ---> front 0
    front 1 ---+---> Host ---> engine --+--- its rows of the news ---> front 1
    ...        |                        +--- ...

It listens to the engine's client as any front would, and tells each front of its own
requests. What of a batch is whose is found out when the batch changes, not at each step.
What a front that has gone had asked for is cancelled.

Messages of fronts come in one thread, news in the engine's: a lock is around all.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from minfer.effects.live.client import Died, EngineClient, Message, News, Snapshot
from minfer.effects.live.errors import EngineDeadError
from minfer.effects.live.link import messages as wire
from minfer.effects.live.link.quarantine import SUSPECT, Quarantine
from minfer.effects.live.totals import (
    NOTHING_COUNTED,
    Histogram,
    Totals,
    joined_totals,
)
from minfer.messages import Finished
from minfer.plan import Logprobs
from minfer.request import Request
from minfer.sequence import SampleIds

PATIENCE: Final = 2.0  # seconds in which fronts that were there before should be back


@define(eq=False)
class Session:
    """A front, for as long as its link holds; `send` must not wait, nor raise."""

    send: Callable[[bytes], None]
    front: int | None = None  # its number, once it has said hello
    ids: set[str] = field(factory=set)  # of requests that it has here
    rows: tuple[int, ...] = ()  # its positions in the batch
    batch_told: bool = False  # it knows the batch of the last news


class Host:
    """The sessions of an engine that is, or will be, behind `open`."""

    def __init__(self, fronts: int = 1, died: Callable[[str], None] = print) -> None:
        """`fronts` is how many will come; `died` hears why the engine broke, once."""
        self._lock = threading.RLock()
        self._died = died
        self._client: EngineClient | None = None
        self._ready: bytes = b""
        self._progress = wire.encoded(wire.Progress("starting"))
        self._sessions: list[Session] = []
        self._owners: dict[str, Session] = {}
        self._left: dict[str, int] = {}  # samples that have not ended, by request
        self._batch: SampleIds = ()
        self._resets = 0  # of the prefix cache, by all fronts that there ever were
        self._quarantine = Quarantine()
        self._missing = set(range(fronts))
        self._opened = 0.0
        self._counted: dict[int, Totals] = {}  # by front
        self._retired = NOTHING_COUNTED  # what fronts had counted that have gone

    # --- the engine ---------------------------------------------------------------------

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Tell all fronts how far the engine is that is not ready yet."""
        with self._lock:
            self._progress = wire.encoded(wire.Progress(stage, done, total))
            self._broadcast(self._progress)

    def open(self, client: EngineClient, ready: wire.Ready) -> None:
        """The engine is ready: serve all who are there."""
        with self._lock:
            self._client = client
            self._opened = client.clock()
            client.listen(self.hear, early=True)
            self._ready = wire.encoded(ready)
            self._broadcast(self._ready)
            self._serve_due()

    def hear(self, message: Message) -> None:
        """Hand on what the engine said, to each front what concerns it."""
        with self._lock:
            match message:
                case News():
                    self._spread(message)
                case Died():
                    self._died(message.why)

    def tick(self) -> None:
        """Tell all fronts how the engine is; to be called some times a second."""
        with self._lock:
            if self._client is None:
                return
            self._serve_due()  # somebody may have been waited for
            if self._sessions:
                snapshot = self._client.snapshot()
                self._broadcast(wire.encoded(self._state(snapshot)))

    # --- fronts -------------------------------------------------------------------------

    def join(self, session: Session) -> None:
        """A link was made."""
        with self._lock:
            self._sessions.append(session)
            session.send(self._ready or self._progress)

    def leave(self, session: Session) -> None:
        """A link is over: nobody wants what was asked for over it."""
        with self._lock:
            self._sessions.remove(session)
            gone = set(session.ids)
            for name in gone:
                self._forget(name)
            held = {name for name in gone if self._quarantine.drop(name) is not None}
            if self._client is not None:
                self._client.cancel(gone - held)
            if session.front is not None:
                last = self._counted.pop(session.front, None)
                self._retired = joined_totals([self._retired, *([last] if last else [])])
            if self._quarantine.probing in gone:
                self._cleared(self._quarantine.probing)

    def receive(self, session: Session, message: wire.ToEngine) -> None:
        """Do what a front wants."""
        with self._lock:
            match message:
                case wire.Hello():
                    self._greet(session, message)
                case wire.Submit(requests):
                    self._submit(session, requests)
                case wire.Cancel(ids):
                    self._cancel(session, ids)
                case wire.End(ends):
                    if self._client is not None:
                        self._client.finish(ends)
                case wire.ResetCache():
                    self._resets += 1
                case wire.Counted(totals):
                    if session.front is not None:
                        self._counted[session.front] = _from_wire(totals)

    def _greet(self, session: Session, hello: wire.Hello) -> None:
        session.front = hello.front
        self._resets = max(self._resets, hello.resets)
        self._missing.discard(hello.front)
        ordinary = [one.request for one in hello.resumed if one.deaths < SUSPECT]
        for one in hello.resumed:
            self._own(session, one.request)
            if one.deaths >= SUSPECT:
                self._quarantine.suspect(one.request)
        for request in ordinary:
            self._own(session, request)
        self._quarantine.hold(ordinary)
        self._serve_due()

    def _submit(self, session: Session, requests: Sequence[Request]) -> None:
        twice = [one for one in requests if one.id in self._owners]
        for request in twice:
            why = "a request with this id is being served; ids must differ"
            self._refuse(session, request, "rejected", why)
        new = [one for one in requests if one.id not in self._owners]
        for request in new:
            self._own(session, request)
        self._quarantine.hold(new)
        self._serve_due()

    def _cancel(self, session: Session, ids: Sequence[str]) -> None:
        running = []
        for name in ids:
            if name not in session.ids:
                continue
            waiting = self._quarantine.drop(name)
            if waiting is None:
                running.append(name)
            else:
                self._forget(name)
                self._refuse(session, waiting, "cancelled")
        if self._client is not None:
            self._client.cancel(running)

    def _own(self, session: Session, request: Request) -> None:
        self._owners[request.id] = session
        self._left[request.id] = request.n
        session.ids.add(request.id)

    def _forget(self, name: str) -> None:
        session = self._owners.pop(name, None)
        self._left.pop(name, None)
        if session is not None:
            session.ids.discard(name)

    def _refuse(
        self, session: Session, request: Request, reason: str, why: str = ""
    ) -> None:
        """End a request that the engine never had."""
        length = len(request.output)
        ended = tuple(
            Finished(request.id, sample, reason, length, why)
            for sample in range(request.n)
        )
        time = 0.0 if self._client is None else self._client.clock()
        session.send(wire.encoded(wire.News(time, finished=ended)))

    # --- from one to the other ----------------------------------------------------------

    def _serve_due(self) -> None:
        """Have the engine serve what is not held back."""
        client = self._client
        if client is None or self._is_waiting(client):
            return
        before = self._quarantine.probing
        due = self._quarantine.due()
        if self._quarantine.probing != before:
            self._broadcast(wire.encoded(wire.Probing(self._quarantine.probing)))
        if due:
            with contextlib.suppress(EngineDeadError):  # it is asked again of the next
                client.submit(due)

    def _is_waiting(self, client: EngineClient) -> bool:
        """Whether fronts may come back with suspects of their own."""
        return bool(self._missing) and client.clock() < self._opened + PATIENCE

    def _cleared(self, name: str) -> None:
        """A request has something new, or is gone; who waited for that is served."""
        if self._quarantine.clear(name):
            if not self._quarantine.closed:
                self._broadcast(wire.encoded(wire.Probing()))
            self._serve_due()

    def _spread(self, news: News) -> None:
        if news.ids is not self._batch and news.ids:
            self._regroup(news.ids)
        parts = dict[int, _Part]()
        for done in news.finished:
            _part(parts, self._owners.get(done.id)).finished.append(done)
        for name in news.arrived:
            _part(parts, self._owners.get(name)).arrived.append(name)
        for reason in news.reasons:
            part = _part(parts, self._owners.get(reason.id))
            part.reasons.append(wire.REASONS[type(reason)](reason))
        for session in self._sessions:
            part = parts.get(id(session), _NOTHING)
            if part is not _NOTHING or (news.ids and session.rows):
                session.send(wire.encoded(_told(session, news, part)))
        self._settle(news)

    def _regroup(self, batch: SampleIds) -> None:
        """Find out which rows of a new batch are whose."""
        self._batch = batch
        rows: dict[int, list[int]] = {id(one): [] for one in self._sessions}
        for at, (name, _) in enumerate(batch):
            owner = self._owners.get(name)
            if owner is not None:
                rows[id(owner)].append(at)
        for session in self._sessions:
            session.rows = tuple(rows[id(session)])
            session.batch_told = False

    def _settle(self, news: News) -> None:
        """Note who has ended, and whether the suspect has something new."""
        for done in news.finished:
            if done.id in self._left:
                self._left[done.id] -= 1
                if not self._left[done.id]:
                    self._forget(done.id)
        probing = self._quarantine.probing
        if probing:
            each = zip(news.ids, news.tokens, strict=True)
            moved = any(tokens for (name, _), tokens in each if name == probing)
            if moved or probing not in self._owners:
                self._cleared(probing)

    def _broadcast(self, message: bytes) -> None:
        for session in list(self._sessions):
            session.send(message)

    def _state(self, now: Snapshot) -> wire.State:
        fronts = joined_totals([self._retired, *self._counted.values()])
        return wire.State(
            time=now.time,
            draining=now.draining,
            requests=now.requests,
            running=now.running,
            waiting=now.waiting,
            waiting_for=dict(now.waiting_for),
            blocks=now.blocks,
            blocks_free=now.blocks_free,
            blocks_cached=now.blocks_cached,
            resets=self._resets,
            stalled=now.stalled,
            failing=now.failing,
            totals=to_wire(now.totals),
            fronts=to_wire(fronts),
        )


@define(eq=False)
class _Part:
    """What news hold for one front besides its rows."""

    finished: list[Finished] = field(factory=list)
    arrived: list[str] = field(factory=list)
    reasons: list[wire.Reason] = field(factory=list)


_NOTHING: Final = _Part()


def _part(parts: dict[int, _Part], session: Session | None) -> _Part:
    return parts.setdefault(id(session), _Part())


def _told(session: Session, news: News, part: _Part) -> wire.News:
    """The news as one front is told them."""
    rows = session.rows if news.ids else ()
    whole = len(rows) == len(news.ids)
    ids: SampleIds | None = ()
    if rows and session.batch_told:
        ids = None
    elif rows:
        ids = news.ids if whole else tuple([news.ids[at] for at in rows])
        session.batch_told = True
    return wire.News(
        time=news.time,
        ids=ids,
        tokens=news.tokens if whole else tuple([news.tokens[at] for at in rows]),
        logprobs=_own_rows(news, rows),
        pooled=tuple([news.pooled[at] for at in rows]) if news.pooled else (),
        finished=tuple(part.finished),
        arrived=tuple(part.arrived),
        reasons=tuple(part.reasons),
        waits=dict(news.waits) if part.arrived or part.reasons else {},
    )


def _own_rows(news: News, rows: Sequence[int]) -> Logprobs:
    return tuple([news.logprobs[at] for at in rows]) if news.logprobs else ()


def to_wire(totals: Totals) -> wire.Totals:
    """Totals as they cross the line."""
    told = {
        name: wire.Histogram(one.bounds, one.counts, one.total)
        for name, one in totals.histograms.items()
    }
    return wire.Totals(dict(totals.counts), told)


def _from_wire(totals: wire.Totals) -> Totals:
    found = {
        name: Histogram(one.bounds, one.counts, one.total)
        for name, one in totals.histograms.items()
    }
    return Totals(totals.counts, found)
