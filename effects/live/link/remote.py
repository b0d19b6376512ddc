"""A front's end of the line: an `EngineClient` whose engine is in another process.

It remembers, of each request, what was asked and every token that came. When the link is
over it waits for the next one, and asks again for what has not ended, with the tokens as
history: whoever listens hears nothing of it but a pause. Samples of one request go on as
requests of their own, each with its number in the draws of the seed, so that sampling
goes on as if nothing had been.

    asked ---> link ---> news ---> link is over ---> asked again ---> news ---> ended
                                   (tokens are kept)  (as history)

It knows no socket: whoever has one calls `connect`, `receive` and `disconnect`, all in
one thread, which is the thread in which listeners hear. The other methods are an
`EngineClient`'s; those that speak to the engine belong to that thread too.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final

from attrs import define, evolve, field

from minfer.effects.live.client import Died, Listener, Message, News, Snapshot
from minfer.effects.live.errors import (
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from minfer.effects.live.link import messages as wire
from minfer.effects.live.link.quarantine import GUILTY
from minfer.effects.live.link.questions import Inquirer
from minfer.effects.live.link.totals import from_wire
from minfer.effects.live.totals import NOTHING_COUNTED
from minfer.messages import Finish, Finished, clip
from minfer.request import Request
from minfer.sequence import SampleId

QUIET: Final = 2.0  # seconds without a word of the engine, after which it may be stuck
POLL: Final = 0.02  # seconds from one look to the next, of who waits for the end


@define(eq=False)
class _Kept:
    """A request, and what came of it."""

    request: Request
    tokens: list[list[int]]  # new ones, by sample
    names: list[str]  # by which it, or parts of it, go on the link
    over: set[int] = field(factory=set)  # samples that have ended
    ends: dict[int, Finish] = field(factory=dict)  # that the engine was told of
    cancelled: bool = False
    admitted: bool = False  # by the engine that has it now
    moved: bool = False  # that engine gave it something
    deaths: int = 0  # see `quarantine`
    deaths_alone: int = 0

    def left(self) -> list[int]:
        """The samples that have not ended."""
        return [i for i in range(self.request.n) if i not in self.over]


class Remote:
    """An engine in another process, as this one sees it."""

    def __init__(
        self,
        front: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 2**20,
    ) -> None:
        self.front = front
        self.life = secrets.randbits(62)  # of who counts: see `count`
        self.clock = clock
        self.max_waiting = max_waiting
        self.dead: BaseException | None = None
        self.draining = False
        self.resets = 0
        self.links = 0  # that there were so far
        self.inquirer = Inquirer()
        # How far an engine is that is not ready; None: it is.
        self.progress: wire.Progress | None = wire.Progress("waiting for the engine")
        self.ready: wire.Ready | None = None  # what the engine said when it was
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._listeners: list[Listener] = []
        self._kept: dict[str, _Kept] = {}
        # What goes by which name on the link: the request's own id, or, for what was
        # asked for again, one that nobody else had.
        self._names: dict[str, tuple[str, int | None]] = {}
        self._batch: tuple[SampleId, ...] = ()  # of the last news that had one
        self._rows: tuple[tuple[_Kept, int] | None, ...] = ()  # whose they are
        self._again = count(1)
        self._probing = ""  # by its name on the link
        self._state: wire.State | None = None
        self._heard = clock()

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
        return bool(self._kept) and self.dead is None

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        """As `EngineClient` says; news come as early as they do."""
        del early
        self._listeners.append(listener)

    def check(self, request: Request) -> None:
        """As `EngineClient` says."""
        self._check_new(request)
        waiting = self._waiting()
        if waiting + request.n > self.max_waiting:
            why = f"{waiting} samples wait already, of at most {self.max_waiting}"
            raise OverloadedError(f"{why} (max_waiting); try again later")

    def submit(self, requests: Sequence[Request]) -> None:
        """As `EngineClient` says; without a link, they wait for one."""
        for request in requests:
            self._check_new(request)
        for request in requests:
            tokens: list[list[int]] = [[] for _ in range(request.n)]
            self._kept[request.id] = _Kept(request, tokens, [request.id])
            self._names[request.id] = (request.id, None)
        if self._send is not None:
            self._send(wire.Submit(tuple(requests)))

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        """As `EngineClient` says."""
        known = [name for name in ids if name in self._kept]
        for name in known:
            self._kept[name].cancelled = True
        if self._send is None:
            self._end_at_once(known)
        elif known:
            names = [name for id_ in known for name in self._kept[id_].names]
            self._send(wire.Cancel(tuple(names)))
        return frozenset(known)

    def finish(self, ends: Sequence[Finish]) -> None:
        """As `EngineClient` says."""
        told = []
        for end in ends:
            kept = self._kept.get(end.id)
            if kept is None or end.sample in kept.over:
                continue
            kept.ends[end.sample] = end
            told.append(self._as_named(kept, end))
        if self._send is None:
            self._end_at_once([end.id for end in ends if end.id in self._kept])
        elif told:
            self._send(wire.End(tuple(told)))

    def reset_cache(self) -> None:
        """As `EngineClient` says."""
        if self.dead is not None:
            raise EngineDeadError(f"the engine serves nobody any more: {self.dead}")
        self.resets += 1
        if self._send is not None:
            self._send(wire.ResetCache())

    def count(self, totals: wire.Totals) -> None:
        """Tell the engine what this front has counted since it began."""
        if self._send is not None:
            self._send(wire.Counted(totals))

    def snapshot(self) -> Snapshot:
        """As `EngineClient` says: as it was told some moments ago."""
        now = self.clock()
        state = self._state
        dead = "" if self.dead is None else repr(self.dead)
        if state is None:
            return Snapshot(
                time=now,
                dead=dead,
                draining=self.draining,
                requests=len(self._kept),
                running=0,
                waiting=0,
                waiting_for={},
                blocks=1,
                blocks_free=1,
                blocks_cached=0,
                resets=self.resets,
                stalled=0.0,
                failing=0,
                totals=NOTHING_COUNTED,
            )
        # One that is being started does not stall: `unready` says what it does.
        there = self.progress is None
        quiet = now - self._heard if self._kept else 0.0
        stalled = max(state.stalled, quiet if quiet > QUIET else 0.0)
        return Snapshot(
            time=now,
            dead=dead,
            draining=self.draining,
            requests=state.requests,
            running=state.running,
            waiting=state.waiting,
            waiting_for=state.waiting_for,
            blocks=state.blocks,
            blocks_free=state.blocks_free,
            blocks_cached=state.blocks_cached,
            resets=self.resets,
            failing=state.failing if there else 0,
            stalled=stalled if there else 0.0,
            totals=from_wire(state.totals),
            fronts=from_wire(state.fronts),
            journal_writing=state.journal_writing,
            journal_errors=state.journal_errors,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """As `EngineClient` says; not to be called in the link's own thread."""
        self.draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while self.working and (end is None or time.monotonic() < end):
            time.sleep(POLL)
        return not self.working

    def close(self) -> None:
        """As `EngineClient` says; the engine goes on, for others."""
        if self.dead is None:
            self.dead = EngineDeadError("it was closed")
            if self._send is not None and self._names:
                self._send(wire.Cancel(tuple(self._names)))
            ids = tuple(self._kept)
            self._kept.clear()
            self._names.clear()
            self._tell(Died(ids, "the engine client was closed"))

    # --- the link -----------------------------------------------------------------------

    def connect(self, send: Callable[[wire.ToEngine], None]) -> None:
        """A link was made: say who is there, and ask again for what has not ended."""
        self.links += 1
        self._send = send
        self.inquirer.connect(send)
        self._heard = self.clock()
        self.progress = wire.Progress("connecting")
        resumed = [one for kept in self._kept.values() for one in self._resumed(kept)]
        send(wire.Hello(self.front, self.life, self.resets, tuple(resumed)))

    def receive(self, message: wire.ToFront) -> None:
        """Take in what the engine says."""
        self._heard = self.clock()
        match message:
            case wire.News():
                self._news(message)
            case wire.State():
                self._state = message
                self.resets = max(self.resets, message.resets)
            case wire.Probing(name):
                self._probing = name
            case wire.Asked():
                self.inquirer.asked(message)
            case wire.Told():
                self.inquirer.told(message)
            case wire.Progress():
                self.progress = message
            case wire.Ready():
                self.progress = None
                self.ready = message

    def disconnect(self) -> None:
        """The link is over. What ended with it ends; of what goes on, note who may have
        been the cause.
        """
        self._send = None
        self.inquirer.disconnect()
        self.progress = wire.Progress("waiting for the engine")
        probing = self._probing
        guilty = []
        for kept in self._kept.values():
            if probing:
                alone = probing in kept.names
                kept.deaths_alone += alone
                if kept.deaths_alone >= GUILTY and alone:
                    guilty.append(kept)
            elif kept.admitted:
                kept.deaths = 1 if kept.moved else kept.deaths + 1
            kept.admitted = kept.moved = False
            kept.names.clear()
        self._names.clear()
        self._batch = ()
        self._rows = ()
        self._probing = ""
        for kept in guilty:
            self._give_up(kept)
        self._end_at_once(list(self._kept))

    def _resumed(self, kept: _Kept) -> list[wire.Resumed]:
        """A request as it is asked for again: what has not ended of it."""
        request = kept.request
        untouched = not kept.over and not any(kept.tokens)
        parts: list[tuple[Request, int | None]] = []
        if untouched or request.n == 1:
            more = request.output + tuple(kept.tokens[0] if request.n == 1 else ())
            parts.append((evolve(request, output=more), None))
        else:
            for one in kept.left():
                number = request.first_sample + one
                more = tuple(kept.tokens[one])
                part = evolve(request, n=1, first_sample=number, output=more)
                parts.append((part, one))
        found = []
        for part, sample in parts:
            name = f"{request.id}#{next(self._again)}"
            self._names[name] = (request.id, sample)
            kept.names.append(name)
            again = evolve(part, id=name)
            found.append(wire.Resumed(again, kept.deaths, kept.deaths_alone))
        return found

    def _end_at_once(self, ids: Sequence[str]) -> None:
        """End, without an engine, what was to end."""
        finished = []
        for name in ids:
            kept = self._kept[name]
            for sample in kept.left():
                length = len(kept.request.output) + len(kept.tokens[sample])
                end = kept.ends.get(sample)
                if end is not None:
                    done = Finished(name, sample, end.reason, min(length, end.length))
                elif kept.cancelled:
                    done = Finished(name, sample, "cancelled", length)
                else:
                    continue
                finished.append(done)
        if finished:
            self._hear(News(time=self.clock(), finished=tuple(finished)))

    def _give_up(self, kept: _Kept) -> None:
        """End a request for which engines died while they served nobody else."""
        before = len(kept.request.output)
        why = f"the engine died {GUILTY} times while it served this request alone"
        finished = [
            Finished(kept.request.id, i, "error", before + len(kept.tokens[i]), why)
            for i in kept.left()
        ]
        self._hear(News(time=self.clock(), finished=tuple(finished)))

    # --- news ---------------------------------------------------------------------------

    def _news(self, told: wire.News) -> None:
        if told.ids:
            self._regroup(told.ids)
        has_batch = told.ids is None or len(told.ids) > 0
        if has_batch:
            for row, tokens in zip(self._rows, told.tokens, strict=True):
                if tokens and row is not None:
                    kept, at = row
                    kept.tokens[at] += tokens
                    kept.moved = True
        reasons = []
        for one in told.reasons:
            known = self._names.get(one.of.id)
            if known is None:
                continue
            name, sample = known
            if isinstance(one, wire.AdmittedReason) and name in self._kept:
                self._kept[name].admitted = True
            at = one.of.sample if sample is None else sample
            reasons.append(evolve(one.of, id=name, sample=at))
        self._hear(
            News(
                time=told.time,
                ids=self._batch if has_batch else (),
                tokens=told.tokens,
                logprobs=told.logprobs,
                pooled=told.pooled,
                finished=tuple([self._done(one) for one in told.finished]),
                arrived=tuple(
                    [self._names[n][0] for n in told.arrived if n in self._names]
                ),
                reasons=tuple(reasons),
                waits=told.waits,
            )
        )

    def _regroup(self, ids: tuple[SampleId, ...]) -> None:
        """Learn whose the rows of a new batch are."""
        batch: list[SampleId] = []
        rows: list[tuple[_Kept, int] | None] = []
        for wire_name, number in ids:
            name, sample = self._names.get(wire_name, ("", None))
            at = number if sample is None else sample
            kept = self._kept.get(name)
            batch.append((name, at))
            rows.append(None if kept is None else (kept, at))
        self._batch = tuple(batch)
        self._rows = tuple(rows)

    def _done(self, done: Finished) -> Finished:
        name, sample = self._names.get(done.id, (done.id, None))
        return evolve(done, id=name, sample=done.sample if sample is None else sample)

    def _hear(self, news: News) -> None:
        """Note who has ended, and tell the listeners."""
        for done in news.finished:
            kept = self._kept.get(done.id)
            if kept is not None:
                kept.over.add(done.sample)
                if not kept.left():
                    del self._kept[done.id]
                    for name in kept.names:
                        del self._names[name]
        self._tell(news)

    def _tell(self, message: Message) -> None:
        for hear in self._listeners:
            hear(message)

    def _waiting(self) -> int:
        """How many samples wait: as it was told, or, for an engine that is not ready, all
        that are here.
        """
        if self.progress is not None:
            return sum(len(kept.left()) for kept in self._kept.values())
        return 0 if self._state is None else self._state.waiting

    def _check_new(self, request: Request) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine serves nobody any more: {self.dead}")
        if self.draining:
            raise DrainingError("the server finishes what it serves, and takes no more")
        if request.id in self._kept:
            name = clip(request.id)
            raise RequestError(
                f"a request with the id {name!r} is being served; ids must differ"
            )

    def _as_named(self, kept: _Kept, end: Finish) -> Finish:
        """An end, by the name that its sample goes by on the link."""
        for name in kept.names:
            _, sample = self._names[name]
            if sample is None or sample == end.sample:
                return evolve(end, id=name, sample=end.sample if sample is None else 0)
        return end  # there is no link
