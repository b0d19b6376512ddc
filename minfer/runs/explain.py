"""Why a request took as long as it did: a fold over turns.

Theory. Between two turns a sample is in one place, which the state says, so all its time
is of some kind, and the kinds add up to its latency:

    line       waits to be let in, for the cause of the first in line: itself, or one
               before it
    queued     planned, while a step before that executes
    prefill    in a step, without a token of its own; `recompute`: with, but their KV was
               given up
    decode     in a step, for its next token
    stalled    runs, but is in no step in flight: it needs blocks, or another one runs
               alone
    failed     in a step that failed, or queued behind it; `before`: until the run's first
               turn

What could have been cached follows from the tokens that others leave, four bytes each.
"""

from array import array
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import compress, count
from operator import add, ne

from attrs import define, evolve, field, frozen

from minfer.committed import committed
from minfer.config import EngineConfig
from minfer.messages import (
    Admitted,
    Emit,
    Ended,
    Finished,
    Preempted,
    Reason,
    Submit,
    Voided,
)
from minfer.plan import Plan
from minfer.pmap import Map
from minfer.request import Request
from minfer.runs.redact import redacted_config
from minfer.schedule import waits_for
from minfer.sequence import SampleId, Sequence
from minfer.state import EngineState, Turn

Where = tuple[str, str, bool, int]  # kind; in line: cause, behind others; times preempted
Spent = tuple[
    int, float, int, int, int
]  # turns, seconds; good steps, its tokens, others' inputs
_Known = tuple[
    Sequence, "array[int]", int, int
]  # tokens; with KV; that are or were cached


class UnknownRequestError(ValueError):
    """A run has no request of that id; the message names near ones."""


@frozen
class Life:
    """What became of one sample. Times are in seconds on the engine's clock."""

    id: SampleId
    arrived: float
    turn: int  # its end, or the run's; and the time of that
    upto: float
    ahead: int = 0  # samples in line before it when it arrived
    preempted: int = 0  # times
    early: bool = False  # had tokens before the run: when its first came is not known
    parts: Map[Where, Spent] = Map()  # all of its time from `arrived` to `upto`
    reasons: tuple[
        tuple[int, Reason], ...
    ] = ()  # by turn; also of others who gave way for it
    first: float | None = None  # when its first tokens came
    last: tuple[int, float] = (0, 0.0)  # turn and time of its last ones
    # The longest time between two outputs: seconds, the turn of the first, and that of
    # the second.
    gap: tuple[float, int, Turn] | None = field(default=None, repr=False)
    end: Finished | None = None  # None: it goes on


@frozen
class Prefix:
    """What the cache gave at sample 0's first admission, and could have
    given, in tokens.
    """

    known: int
    hit: int  # the first block that missed begins here
    earlier: int = 0  # sequences before it with its cache salt
    shared: int = 0  # longest prefix shared with one of them
    shared_with: SampleId | None = None
    computed: int = 0  # likewise, of what had KV by then
    cached: int = (
        0  # likewise, of what was in the cache at some time, whole blocks or not
    )


@frozen
class Explanation:
    """Where a request's time went, and why."""

    request: Request
    lives: tuple[Life, ...]
    prefix: Prefix | None  # None: sample 0 was not let in, or before the run


def explain(config: EngineConfig, turns: Iterable[Turn], name: str) -> Explanation:
    """Explain the first request `name` that was served, or else its last rejection; reads
    as far as its end. Raises UnknownRequestError.
    """
    fold = _Fold(config, name)
    for turn in turns:
        fold.turn(turn)
        ends = [life.end for life in fold.lives.values()]
        if ends and all(end and end.reason != "rejected" for end in ends):
            break
    if fold.request is None:
        near = (
            ", ".join(get_close_matches(name, list(fold.names)[-10_000:], 3, 0.3))
            or "none"
        )
        raise UnknownRequestError(
            f"none of {len(fold.names)} requests is {name!r}; near: {near}"
        )
    return Explanation(fold.request, tuple(fold.lives.values()), fold.prefix)


@define(eq=False)
class _Fold:
    """What is known after some turns."""

    config: EngineConfig
    name: str
    names: dict[str, None] = field(factory=dict)
    request: Request | None = None
    lives: dict[SampleId, Life] = field(factory=dict)
    sure: dict[SampleId, Life] = field(factory=dict)  # before the step that executes
    past: dict[tuple[int, ...], _Known] = field(
        factory=dict
    )  # of who left, by arrival and sample
    prefix: Prefix | None = None
    came: dict[SampleId, tuple[int, ...]] = field(factory=dict)  # tokens, in this turn

    def turn(self, turn: Turn) -> None:
        """Fold a turn."""
        before, after = turn.before, turn.transition.state
        if before.requests and not self.names:  # the run begins in the midst of things
            self.names = dict.fromkeys(before.requests)
            self._follow(before, turn.number - 1, [])
        over = [plan for plan in before.inflight if plan not in after.inflight]
        emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
        ends = [end for emit in emits for end in emit.finished]
        self.came = {
            name: new for e in emits for name, new in zip(e.ids, e.tokens, strict=True)
        }
        for request in (
            event.request for event in turn.events if isinstance(event, Submit)
        ):
            self.names[request.id] = None
            if request.id == self.name and all(life.end for life in self.lives.values()):
                self.request = request
                self._follow(after, turn.number, ends)
        for name, life in self.lives.items():
            if life.end is None:
                # Its id may be refused and come again in the turn in which it ends.
                its = (
                    e for e in ends if (e.id, e.sample) == name and e.reason != "rejected"
                )
                self.lives[name] = self._lived(life, turn, over, next(its, None))
        if self.prefix is None:
            self._learn(turn, over)

    def _follow(self, state: EngineState, number: int, ends: list[Finished]) -> None:
        """Follow the samples of the request: those in `state`, and those that ended at
        once.
        """
        now, mine = state.time, {end.sample: end for end in ends if end.id == self.name}
        if self.name in state.requests or any(
            end.reason != "rejected" for end in mine.values()
        ):
            mine = {s: end for s, end in mine.items() if end.reason != "rejected"}
        known = dict(zip(state.running.ids, state.running.known, strict=True))
        gone = (((self.name, sample), end) for sample, end in mine.items())
        self.lives = {name: Life(name, now, number, now, end=end) for name, end in gone}
        for seq in (*state.waiting, *state.running.seqs):
            if seq.request.id == self.name:
                self.request, late, times = seq.request, now - seq.arrived, seq.preempted
                ahead = sum(one.place < seq.place for one in state.waiting)
                parts = Map(
                    {("before", "", False, times): (0, late, 0, 0, 0)} if late else {}
                )
                given = len(seq.request.prompt) + len(seq.request.output)
                early = known.get(seq.id, len(seq.history)) > given
                facts = seq.id, seq.arrived, number, now, ahead, times, early, parts
                self.lives[seq.id] = self.sure[seq.id] = Life(*facts)

    def _place(self, state: EngineState, name: SampleId) -> tuple[str, str, bool, int]:
        """Kind, cause and `behind` of a sample's time in `state`; its generation if in a
        step.
        """
        run = state.running
        if name not in run.ids:
            return (
                "line",
                waits_for(self.config, state),
                state.waiting.first().id != name,
                -1,
            )
        i = run.ids.index(name)
        gen, request = run.gens[i], run.seqs[i].request
        flying = [gen in plan.gens for plan in state.inflight]
        if not any(flying):
            return "stalled", "", False, -1
        again = run.base[i] > len(request.prompt) + len(request.output)
        kind = (
            "decode"
            if run.known[i] > run.base[i]
            else "recompute"
            if again
            else "prefill"
        )
        return kind if flying[0] else "queued", "", False, gen

    def _lived(
        self, life: Life, turn: Turn, over: list[Plan], end: Finished | None
    ) -> Life:
        """A life one turn on."""
        now, number, reasons = (
            turn.transition.state.time,
            turn.number,
            turn.transition.reasons,
        )
        mine = [
            r
            for r in reasons
            if (getattr(r, "id", 0), getattr(r, "sample", 0)) == life.id
        ]
        news = [r for r in reasons if r in mine or getattr(r, "by", 0) == life.id]
        got, gen, times = len(self.came.get(life.id, ())), -1, life.preempted
        if (
            number > life.turn
        ):  # else it just came, and what has happened since is in the state
            times += sum(isinstance(r, Preempted) for r in mine)
            kind, cause, behind, gen = self._place(turn.before, life.id)
            since, ran = life, [plan for plan in over if gen in plan.gens]
            voids = [r for r in reasons if isinstance(r, Voided) and gen >= 0]
            if voids:
                kind, since, ran, news = "failed", self.sure[life.id], [], [*voids, *news]
            own = sum(plan.counts[plan.gens.index(gen)] for plan in ran)
            others = sum(sum(plan.counts) for plan in ran) - own
            more = number - since.turn, now - since.upto, len(ran), max(got, own), others
            where = kind, cause, behind, life.preempted
            spent = tuple(map(add, since.parts.get(where, (0, 0.0, 0, 0, 0)), more))
            life = evolve(
                life, turn=number, upto=now, parts=since.parts.set(where, spent)
            )
        if got:
            if life.last[0] and (life.gap is None or now - life.last[1] > life.gap[0]):
                life = evolve(life, gap=(now - life.last[1], life.last[0], turn))
            first = life.first if life.early or life.first is not None else now
            life = evolve(life, last=(number, now), first=first)
        told = life.reasons + tuple((number, r) for r in news)
        life = evolve(life, reasons=told, preempted=times, end=end)
        if over or gen < 0:
            self.sure[life.id] = life
        return life

    def _learn(self, turn: Turn, over: list[Plan]) -> None:
        """Keep what those who leave know, until the request is let in: then compare."""
        reasons, run = turn.transition.reasons, turn.before.running
        done = 0 if any(isinstance(r, Voided) for r in reasons) else len(over)
        state = evolve(turn.before, inflight=turn.before.inflight[done:])
        gone = {(r.id, r.sample) for r in reasons if isinstance(r, Ended | Preempted)}
        for i in map(run.ids.index, gone.intersection(run.ids)):
            self.past[run.seqs[i].place[1:]] = self._known(state, i, left=True)
        let_in = (r for r in reasons if isinstance(r, Admitted) and r.id == self.name)
        got = next((r for r in let_in if r.sample == 0 and r.prompt), None)
        if got:
            self.prefix = self._prefix(turn.transition.state, got)
            self.past.clear()

    def _known(self, state: EngineState, i: int, *, left: bool) -> _Known:
        """What the sequence at `i` knows, with what came if it `left` and so published it
        all.
        """
        run, size = state.running, self.config.block_size
        tokens = array(
            "I", run.tokens(i, size) + (self.came.get(run.ids[i], ()) if left else ())
        )
        done = (
            len(tokens) - 1
            if len(tokens) > run.base[i]
            else committed(self.config, state, i)
        )
        return run.seqs[i], tokens, done, done if left else run.chains[i].sealed * size

    def _prefix(self, state: EngineState, got: Admitted) -> Prefix:
        """What of a sample just let in was cached, or could have been."""
        run, line = state.running, state.waiting
        grain = (
            self.config.block_size if self.config == redacted_config(self.config) else 1
        )
        me = next(seq for seq in (*run.seqs, *line) if seq.id == (got.id, got.sample))
        gen = dict(zip(run.ids, run.gens, strict=True)).get(me.id, state.next_gen)
        here = (
            self._known(state, i, left=False) for i, g in enumerate(run.gens) if g < gen
        )
        more = (
            (seq, array("I", seq.history), 0, 0)
            for seq in line
            if seq.place[1] < me.place[1]
        )
        mine, best = me.history, Prefix(got.known, got.hit)
        for seq, tokens, computed, cached in (*self.past.values(), *here, *more):
            if seq.request.root == me.request.root and seq.request.id != got.id:
                n = next(
                    compress(count(), map(ne, mine, tokens)), min(len(mine), len(tokens))
                )
                n -= n % grain
                if n > best.shared:
                    best = evolve(best, shared=n, shared_with=seq.id)
                ends = (
                    max(best.computed, min(n, computed)),
                    max(best.cached, min(n, cached)),
                )
                best = evolve(
                    best, earlier=best.earlier + 1, computed=ends[0], cached=ends[1]
                )
        return best
