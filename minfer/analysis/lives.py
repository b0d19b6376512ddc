"""Where the time of one sample goes, from turn to turn.

Theory. Between two turns a sample is in one place, by the state before the second one, so
all its time has a kind, and the kinds add up to its latency:

    line       waits for admission, for the cause of the head of the queue: itself, or one
               before it; or its client is deferred
    queued     planned, while a step before that executes
    prefill    in a step, without a token of its own; `recompute`: with tokens, whose KV
               was released
    decode     in a step, for its next token
    stalled    runs, but is in no step in flight: it needs blocks, the host is not ready
               for it, or a suspect runs alone
    failed     in a step that failed, or queued behind it; `before`: until the run's first
               turn

That a step failed is known only when it should have ended. So a life is kept twice: with
the latest turn, and as it was when the last step had ended, to which a failure resets it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Self

from attrs import define, evolve, field, frozen

from minfer.analysis.drafts import Judged, judged, tally_of
from minfer.planning.schedule import queue_blocked_by
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Discarded,
    Emit,
    Ended,
    Finished,
    OfSample,
    Preempted,
    Reason,
)
from minfer.records.plan import Plan
from minfer.records.sequence import SampleId, Sequence
from minfer.records.state import EngineState, Turn, head_of_queue
from minfer.speculate.tally import NO_DRAFTS, DraftTally
from minfer.values.pmap import Map


@frozen
class Where:
    """The kinds of a sample's time."""

    kind: str
    cause: str = ""  # in the queue: what its head waits for
    behind: bool = False  # in the queue: not its head
    preempted: int = 0  # its preemptions so far


@frozen
class Spent:
    """The time and work of one kind in a sample's life."""

    turns: int = 0
    seconds: float = 0.0
    steps: int = 0  # with valid results
    # its tokens in those steps, with drafts, or its yields if that is more
    tokens: int = 0
    others: int = 0  # tokens of others in them

    def plus(self, more: "Spent") -> "Spent":
        """The sum of both."""
        return Spent(
            turns=self.turns + more.turns,
            seconds=self.seconds + more.seconds,
            steps=self.steps + more.steps,
            tokens=self.tokens + more.tokens,
            others=self.others + more.others,
        )


@frozen
class Moment:
    """A turn, and its time in seconds."""

    turn: int
    time: float


@frozen
class Gap:
    """The time between two outputs."""

    seconds: float
    since: int  # the turn of the first output
    turn: Turn  # that of the second


@frozen
class Life:
    """The life of one sample. Times are in seconds on the engine's clock."""

    id: SampleId
    arrived: float
    turn: int  # its end, or the run's; and the time of that
    upto: float
    ahead: int = 0  # samples before it in the queue at its arrival
    preempted: int = 0  # times
    early: bool = False  # had tokens before the run: the time of its first is unknown
    parts: Map[Where, Spent] = Map()  # all of its time from `arrived` to `upto`
    # by turn; with those of others that were preempted for it
    reasons: tuple[tuple[int, Reason], ...] = ()
    first: float | None = None  # when its first tokens came
    last: Moment | None = None  # when its last ones did
    gap: Gap | None = field(default=None, repr=False)  # its longest
    drafts: DraftTally = NO_DRAFTS  # of steps with valid results
    end: Finished | None = None  # None: it has not ended

    @classmethod
    def found(cls, seq: Sequence, known: int, state: EngineState, number: int) -> "Life":
        """The life of a sample that is served in `state`, after turn `number`, with
        `known` tokens.
        """
        given = len(seq.request.prompt) + len(seq.request.output)
        late = state.time - seq.arrived
        before = Where("before", preempted=seq.preempted)
        return cls(
            id=seq.id,
            arrived=seq.arrived,
            turn=number,
            upto=state.time,
            ahead=sum(one.place < seq.place for one in state.waiting),
            preempted=seq.preempted,
            early=known > given,
            parts=Map({before: Spent(seconds=late)} if late else {}),
        )


@frozen
class Seen:
    """A turn, parsed once for all followed samples."""

    turn: Turn
    over: tuple[Plan, ...]  # the steps that ended in it, failed ones too
    discarded: tuple[Discarded, ...]  # of the failed steps
    came: Mapping[SampleId, tuple[int, ...]]  # tokens
    judged: tuple[Judged, ...]  # drafts
    ends: tuple[Finished, ...]

    @classmethod
    def of(cls, turn: Turn) -> Self:
        """The parsed turn."""
        moved = turn.transition
        flying = moved.state.inflight
        emits = [each for each in moved.commands if isinstance(each, Emit)]
        came = dict[SampleId, tuple[int, ...]]()
        for emit in emits:
            came.update(zip(emit.ids, emit.tokens, strict=True))
        return cls(
            turn=turn,
            over=tuple(plan for plan in turn.before.inflight if plan not in flying),
            discarded=tuple(r for r in moved.reasons if isinstance(r, Discarded)),
            came=came,
            judged=judged(turn.before, turn.events, moved),
            ends=tuple(end for emit in emits for end in emit.finished),
        )


@frozen
class Place:
    """Where a sample is in a state, and its generation if it is in a step in flight."""

    where: Where
    gen: int | None = None


def place(config: EngineConfig, state: EngineState, life: Life) -> Place:
    """The place of a sample in a state."""
    run = state.running
    if life.id not in run.ids:
        cause, first = queue_blocked_by(config, state), head_of_queue(state)
        behind = first.id != life.id
        if behind and _held_back(state, life.id):
            cause, behind = "share", False
        return Place(Where("line", cause, behind, life.preempted))
    i = run.ids.index(life.id)
    gen, request = run.run_ids[i], run.seqs[i].request
    if not any(gen in plan.run_ids for plan in state.inflight):
        kind, in_step = "stalled", None
    elif gen not in state.inflight[0].run_ids:
        kind, in_step = "queued", gen
    elif run.known[i] > run.num_known_at_admission[i]:
        kind, in_step = "decode", gen
    elif run.num_known_at_admission[i] > len(request.prompt) + len(request.output):
        kind, in_step = "recompute", gen
    else:
        kind, in_step = "prefill", gen
    return Place(Where(kind, preempted=life.preempted), in_step)


def _held_back(state: EngineState, name: SampleId) -> bool:
    """Whether a waiting sample is deferred with its client."""
    found = (seq for seq in state.waiting if state.deferred_clients and seq.id == name)
    return any(
        seq.request.client in state.deferred_clients and not seq.ran_before
        for seq in found
    )


_NOTHING: Final = Spent()


@define(eq=False)
class Followed:
    """A sample that is followed, turn by turn, until it ends."""

    config: EngineConfig
    life: Life
    sure: Life = field(init=False)  # as it was when the last step had ended

    def __attrs_post_init__(self) -> None:
        self.sure = self.life

    def turn(self, seen: Seen) -> None:
        """Add a turn to the life."""
        if seen.turn.number == self.life.turn:
            # It has just arrived: its decisions of this turn are in the state.
            self.life = self._told(self.life, seen, ())
            self.sure = self.life
            return
        here = place(self.config, seen.turn.before, self.life)
        failed = () if here.gen is None else seen.discarded
        life = self._failed(seen) if failed else self._spent(seen, here)
        life = evolve(life, preempted=life.preempted + _preemptions(life.id, seen))
        self.life = self._told(life, seen, failed)
        if seen.over or here.gen is None:
            self.sure = self.life

    def _spent(self, seen: Seen, here: Place) -> Life:
        """The life with the time of this turn, by its kind."""
        ran = [plan for plan in seen.over if here.gen in plan.run_ids]
        own = sum(plan.num_scheduled_tokens[plan.run_ids.index(here.gen)] for plan in ran)
        every = sum(sum(plan.num_scheduled_tokens) for plan in ran)
        tokens = max(own, self._got(seen))
        work = Spent(steps=len(ran), tokens=tokens, others=every - own)
        return self._added(self.life, seen, here.where, work)

    def _failed(self, seen: Seen) -> Life:
        """The life with all the time since the last step that ended, as failed."""
        where = Where("failed", preempted=self.life.preempted)
        return self._added(self.sure, seen, where, Spent(tokens=self._got(seen)))

    def _added(self, since: Life, seen: Seen, where: Where, work: Spent) -> Life:
        """The life with all the time since `since`, counted as `where`."""
        number, now = seen.turn.number, seen.turn.transition.state.time
        more = evolve(work, turns=number - since.turn, seconds=now - since.upto)
        before = since.parts.get(where, _NOTHING)
        parts = since.parts.set(where, before.plus(more))
        return evolve(self.life, turn=number, upto=now, parts=parts)

    def _got(self, seen: Seen) -> int:
        return len(seen.came.get(self.life.id, ()))

    def _told(self, life: Life, seen: Seen, failed: tuple[Discarded, ...]) -> Life:
        """The life with its tokens, drafts and reasons of this turn."""
        life = _with_drafts(_with_tokens(life, seen), seen)
        news = [*failed, *_news(life.id, seen)]
        recorded = tuple((seen.turn.number, reason) for reason in news)
        return evolve(life, reasons=life.reasons + recorded, end=_end(life.id, seen))


def _with_tokens(life: Life, seen: Seen) -> Life:
    """The life with the times of its tokens in this turn, if any."""
    if not seen.came.get(life.id):
        return life
    now = Moment(seen.turn.number, seen.turn.transition.state.time)
    gap, first = life.gap, life.first
    if life.last is not None:
        seconds = now.time - life.last.time
        if gap is None or seconds > gap.seconds:
            gap = Gap(seconds, life.last.turn, seen.turn)
    if first is None and not life.early:
        first = now.time
    return evolve(life, gap=gap, first=first, last=now)


def _with_drafts(life: Life, seen: Seen) -> Life:
    """The life with the acceptance of its drafts in this turn, if any."""
    its = [one for one in seen.judged if (one.id, one.sample) == life.id]
    return evolve(life, drafts=life.drafts.plus(tally_of(its))) if its else life


def _news(name: SampleId, seen: Seen) -> Iterator[Reason]:
    """The reasons of a turn about a sample, or about those preempted for it, up to its
    end: its id may arrive again in the same turn.
    """
    for reason in seen.turn.transition.reasons:
        its = isinstance(reason, OfSample) and (reason.id, reason.sample) == name
        if its or (isinstance(reason, Preempted) and reason.by == name):
            yield reason
        if its and isinstance(reason, Ended) and reason.reason != "rejected":
            return


def _preemptions(name: SampleId, seen: Seen) -> int:
    """How often a sample was preempted in this turn."""
    return sum(
        isinstance(reason, Preempted) and (reason.id, reason.sample) == name
        for reason in seen.turn.transition.reasons
    )


def _end(name: SampleId, seen: Seen) -> Finished | None:
    """The end of a sample in this turn, if any; its id may arrive again in the same turn,
    and be rejected.
    """
    its = (end for end in seen.ends if (end.id, end.sample) == name)
    return next((end for end in its if end.reason != "rejected"), None)
