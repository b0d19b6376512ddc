"""Where the time of one sample goes, from turn to turn.

Theory. Between two turns a sample is in one phase, by the state before the second one, so
all its time has a phase, and the phases add up to its latency:

    line       waits for admission, for the cause of the head of the queue: itself, or one
               before it; or its own, if others pass it: its client is deferred, or its
               adapter is not ready
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

from minfer.analysis.drafts import SampleDrafts, sample_drafts, tally_of
from minfer.planning.schedule import queue_blocked_by
from minfer.records.adapters import NO_SLOT
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
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
from minfer.records.state import EngineState, Turn, head_of_queue, waiting_sample
from minfer.speculate.tally import NO_DRAFTS, DraftTally
from minfer.values.pmap import Map


@frozen
class Phase:
    """A kind of a sample's time."""

    kind: str
    cause: str = ""  # in the queue: what its head waits for
    behind: bool = False  # in the queue: not its head
    preempted: int = 0  # its preemptions so far


@frozen
class TimeSpent:
    """The time and work of one phase in a sample's life."""

    turns: int = 0
    seconds: float = 0.0
    steps: int = 0  # with valid results
    # its tokens in those steps, with drafts, or its yields if that is more
    tokens: int = 0
    others: int = 0  # tokens of others in them

    def plus(self, added: "TimeSpent") -> "TimeSpent":
        """The sum of both."""
        return TimeSpent(
            turns=self.turns + added.turns,
            seconds=self.seconds + added.seconds,
            steps=self.steps + added.steps,
            tokens=self.tokens + added.tokens,
            others=self.others + added.others,
        )


@frozen
class Moment:
    """A turn, and its time in seconds."""

    turn: int
    time: float


@frozen
class Overtaking:
    """Others that were admitted while a sample waited, or that it was preempted for."""

    admitted: int = 0
    later: int = 0  # of these, those that had arrived later than it
    preempted: int = 0  # times that it was preempted for a later one
    latest: SampleId | None = None  # the last of these
    priorities: tuple[int, int] | None = None  # of these, the most and least urgent


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
    parts: Map[Phase, TimeSpent] = Map()  # all of its time from `arrived` to `upto`
    overtaking: Overtaking = Overtaking()
    # by turn; with those of others that were preempted for it
    reasons: tuple[tuple[int, Reason], ...] = ()
    first: float | None = None  # when its first tokens came
    last: Moment | None = None  # when its last ones did
    gap: Gap | None = field(default=None, repr=False)  # its longest
    drafts: DraftTally = NO_DRAFTS  # of steps with valid results
    end: Finished | None = None  # None: it has not ended

    @classmethod
    def in_progress(
        cls, seq: Sequence, num_known: int, state: EngineState, number: int
    ) -> "Life":
        """The life of a sample that is served in `state`, after turn `number`, with
        `num_known` tokens.
        """
        num_at_arrival = len(seq.request.prompt) + len(seq.request.output)
        elapsed = state.time - seq.arrived
        before = Phase("before", preempted=seq.preempted)
        return cls(
            id=seq.id,
            arrived=seq.arrived,
            turn=number,
            upto=state.time,
            ahead=sum(waiting.place < seq.place for waiting in state.waiting),
            preempted=seq.preempted,
            early=num_known > num_at_arrival,
            parts=Map({before: TimeSpent(seconds=elapsed)} if elapsed else {}),
        )


@frozen
class ParsedTurn:
    """A turn, parsed once for all followed samples."""

    turn: Turn
    ended_plans: tuple[Plan, ...]  # the steps that ended in it, failed ones too
    discarded: tuple[Discarded, ...]  # of the failed steps
    tokens: Mapping[SampleId, tuple[int, ...]]
    drafts: tuple[SampleDrafts, ...]
    ends: tuple[Finished, ...]

    @classmethod
    def of(cls, turn: Turn) -> Self:
        """The parsed turn."""
        transition = turn.transition
        inflight = transition.state.inflight
        emits = [command for command in transition.commands if isinstance(command, Emit)]
        tokens = dict[SampleId, tuple[int, ...]]()
        for emit in emits:
            tokens.update(zip(emit.ids, emit.tokens, strict=True))
        return cls(
            turn=turn,
            ended_plans=tuple(
                plan for plan in turn.before.inflight if plan not in inflight
            ),
            discarded=tuple(r for r in transition.reasons if isinstance(r, Discarded)),
            tokens=tokens,
            drafts=sample_drafts(turn.before, turn.events, transition),
            ends=tuple(end for emit in emits for end in emit.finished),
        )


@frozen
class SamplePhase:
    """The phase of a sample in a state, and its run id if it is in a step in flight."""

    phase: Phase
    run_id: int | None = None


def phase_of(config: EngineConfig, state: EngineState, life: Life) -> SamplePhase:
    """The phase of a sample in a state."""
    run = state.running
    if life.id not in run.ids:
        cause, head = queue_blocked_by(config, state), head_of_queue(state)
        behind = head.id != life.id
        if own_cause := _own_wait(state, life.id) if behind or cause == "adapter" else "":
            cause, behind = own_cause, False
        return SamplePhase(Phase("line", cause, behind, life.preempted))
    i = run.ids.index(life.id)
    run_id, request = run.run_ids[i], run.seqs[i].request
    if not any(run_id in plan.run_ids for plan in state.inflight):
        kind, in_step = "stalled", None
    elif run_id not in state.inflight[0].run_ids:
        kind, in_step = "queued", run_id
    elif run.known[i] > run.num_known_at_admission[i]:
        kind, in_step = "decode", run_id
    elif run.num_known_at_admission[i] > len(request.prompt) + len(request.output):
        kind, in_step = "recompute", run_id
    else:
        kind, in_step = "prefill", run_id
    return SamplePhase(Phase(kind, preempted=life.preempted), in_step)


def _own_wait(state: EngineState, name: SampleId) -> str:
    """What a waiting sample waits for while others pass it, if they do: "share", as it is
    deferred with its client; "adapter", as its adapter is being loaded; or "slot", as it
    is in none, and none can be had, or others have had their turn in it.
    """
    deferred, adapters = state.deferred_clients, state.adapters
    seq = waiting_sample(state, name) if deferred or adapters.unready else None
    if seq is None:
        return ""
    if seq.request.client in deferred and not seq.ran_before:
        return "share"
    adapter = seq.request.adapter
    if adapter not in adapters.unready:
        return ""
    index = adapters.slot_of(adapter)
    loads = index != NO_SLOT and adapters.slots[index].loading
    return "adapter" if loads else "slot"


_NOTHING: Final = TimeSpent()


@define(eq=False)
class FollowedSample:
    """A sample that is followed, turn by turn, until it ends."""

    config: EngineConfig
    life: Life
    confirmed: Life = field(init=False)  # as it was when the last step had ended

    def __attrs_post_init__(self) -> None:
        self.confirmed = self.life

    def turn(self, parsed: ParsedTurn) -> None:
        """Add a turn to the life."""
        if parsed.turn.number == self.life.turn:
            # It has just arrived: its decisions of this turn are in the state.
            life = evolve(self.life, overtaking=_overtaking(self.life, parsed))
            self.life = self._with_outputs(life, parsed, ())
            self.confirmed = self.life
            return
        current = phase_of(self.config, parsed.turn.before, self.life)
        failed = () if current.run_id is None else parsed.discarded
        life = self._with_failure(parsed) if failed else self._with_time(parsed, current)
        life = evolve(
            life,
            preempted=life.preempted + _preemptions(life.id, parsed),
            overtaking=_overtaking(life, parsed),
        )
        self.life = self._with_outputs(life, parsed, failed)
        if parsed.ended_plans or current.run_id is None:
            self.confirmed = self.life

    def _with_time(self, parsed: ParsedTurn, current: SamplePhase) -> Life:
        """The life with the time of this turn, in its phase."""
        run_id = current.run_id
        plans = [plan for plan in parsed.ended_plans if run_id in plan.run_ids]
        own_tokens = sum(p.num_scheduled_tokens[p.run_ids.index(run_id)] for p in plans)
        all_tokens = sum(sum(plan.num_scheduled_tokens) for plan in plans)
        tokens = max(own_tokens, self._num_tokens(parsed))
        spent = TimeSpent(steps=len(plans), tokens=tokens, others=all_tokens - own_tokens)
        return self._with_spent(self.life, parsed, current.phase, spent)

    def _with_failure(self, parsed: ParsedTurn) -> Life:
        """The life with all the time since the last step that ended, as failed."""
        phase = Phase("failed", preempted=self.life.preempted)
        return self._with_spent(
            self.confirmed, parsed, phase, TimeSpent(tokens=self._num_tokens(parsed))
        )

    def _with_spent(
        self, since: Life, parsed: ParsedTurn, phase: Phase, spent: TimeSpent
    ) -> Life:
        """The life with all the time since `since`, counted as `phase`."""
        number, now = parsed.turn.number, parsed.turn.transition.state.time
        spent = evolve(spent, turns=number - since.turn, seconds=now - since.upto)
        before = since.parts.get(phase, _NOTHING)
        phases = since.parts.set(phase, before.plus(spent))
        return evolve(self.life, turn=number, upto=now, parts=phases)

    def _num_tokens(self, parsed: ParsedTurn) -> int:
        return len(parsed.tokens.get(self.life.id, ()))

    def _with_outputs(
        self, life: Life, parsed: ParsedTurn, failed: tuple[Discarded, ...]
    ) -> Life:
        """The life with its tokens, drafts and reasons of this turn."""
        life = _with_drafts(_with_tokens(life, parsed), parsed)
        reasons = [*failed, *_reasons_about(life.id, parsed)]
        recorded = tuple((parsed.turn.number, reason) for reason in reasons)
        return evolve(life, reasons=life.reasons + recorded, end=_end(life.id, parsed))


def _with_tokens(life: Life, parsed: ParsedTurn) -> Life:
    """The life with the times of its tokens in this turn, if any."""
    if not parsed.tokens.get(life.id):
        return life
    now = Moment(parsed.turn.number, parsed.turn.transition.state.time)
    gap, first = life.gap, life.first
    if life.last is not None:
        seconds = now.time - life.last.time
        if gap is None or seconds > gap.seconds:
            gap = Gap(seconds, life.last.turn, parsed.turn)
    if first is None and not life.early:
        first = now.time
    return evolve(life, gap=gap, first=first, last=now)


def _with_drafts(life: Life, parsed: ParsedTurn) -> Life:
    """The life with the acceptance of its drafts in this turn, if any."""
    drafts = [row for row in parsed.drafts if (row.id, row.sample) == life.id]
    return evolve(life, drafts=life.drafts.plus(tally_of(drafts))) if drafts else life


def _reasons_about(name: SampleId, parsed: ParsedTurn) -> Iterator[Reason]:
    """The reasons of a turn about a sample, or about those preempted for it, up to its
    end: its id may arrive again in the same turn.
    """
    for reason in parsed.turn.transition.reasons:
        is_own = isinstance(reason, OfSample) and (reason.id, reason.sample) == name
        if is_own or (isinstance(reason, Preempted) and reason.by == name):
            yield reason
        if is_own and isinstance(reason, Ended) and reason.reason != "rejected":
            return


def _preemptions(name: SampleId, parsed: ParsedTurn) -> int:
    """How often a sample was preempted in this turn."""
    return sum(
        isinstance(reason, Preempted) and (reason.id, reason.sample) == name
        for reason in parsed.turn.transition.reasons
    )


def _overtaking(life: Life, parsed: ParsedTurn) -> Overtaking:
    """The admissions of others so far, with those of this turn while the sample waits.

    Counts what `minfer.analysis.queue_times` counts.
    """
    overtaking, turn = life.overtaking, parsed.turn
    before, after = turn.before, turn.transition.state
    own = after.requests.get(life.id[0]) or before.requests.get(life.id[0])
    if own is None:
        return overtaking
    waits = life.id not in before.running.ids
    for reason in turn.transition.reasons:
        is_own = isinstance(reason, OfSample) and (reason.id, reason.sample) == life.id
        if is_own and isinstance(reason, Admitted | Ended):
            waits = False  # those admitted after it in this turn did not go first
        elif isinstance(reason, Admitted) and waits and reason.id != life.id[0]:
            overtaking = _with_ahead(
                overtaking, (reason.id, reason.sample), own.place[1], turn
            )
        elif is_own and isinstance(reason, Preempted):
            waits = True
            if _is_later(reason.by, own.place[1], turn):
                overtaking = evolve(overtaking, preempted=overtaking.preempted + 1)
            # one that does not run yet is admitted next, and counted then
            if reason.by in before.running.ids and reason.by[0] != life.id[0]:
                overtaking = _with_ahead(overtaking, reason.by, own.place[1], turn)
    return overtaking


def _is_later(ahead: SampleId, arrival: int, turn: Turn) -> bool:
    """Whether a sample came after the one with this number of arrival."""
    requests = turn.transition.state.requests
    live = requests.get(ahead[0]) or turn.before.requests.get(ahead[0])
    return live is not None and live.place[1] > arrival


def _with_ahead(
    overtaking: Overtaking, ahead: SampleId, arrival: int, turn: Turn
) -> Overtaking:
    """With a sample that went ahead of the one with this number of arrival."""
    overtaking = evolve(overtaking, admitted=overtaking.admitted + 1)
    if not _is_later(ahead, arrival, turn):
        return overtaking
    run = turn.transition.state.running
    seq = run.seqs[run.ids.index(ahead)] if ahead in run.ids else None
    known = overtaking.priorities
    if seq is not None:
        level = seq.request.priority
        least, most = known or (level, level)
        known = min(least, level), max(most, level)
    return evolve(overtaking, later=overtaking.later + 1, latest=ahead, priorities=known)


def _end(name: SampleId, parsed: ParsedTurn) -> Finished | None:
    """The end of a sample in this turn, if any; its id may arrive again in the same turn,
    and be rejected.
    """
    own_ends = (end for end in parsed.ends if (end.id, end.sample) == name)
    return next((end for end in own_ends if end.reason != "rejected"), None)
