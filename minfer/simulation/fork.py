"""Forks: a recorded run up to a turn, one fact changed, and how it would have gone on.

Exact are: every turn before the fork, the turn of the fork itself (its recorded events,
less a removed arrival), all arrivals and cancels with their times, and the number of
tokens of each sample (except for stop strings, which are not tokens, of samples that run
at the fork). Recorded drafts are accepted or rejected as they were, and so are others for
the same positions; the host proposes again as many drafts after as many known tokens.
Modelled are: how long steps take; the values of tokens, hence which later prompts share a
prefix with an output; the length of samples that were cancelled (the allowed one); and,
after tokens without recorded drafts, how many drafts there would have been and which
would have been accepted: by the rates of the sample, or of all
(`minfer.simulation.guesses_recorded`). So with unchanged drafts a fork is the run; with
others it is more accurate the more of them were recorded. It cannot know how good another
drafter would have been. Masks take no time: samples paused at the fork continue in the
turn after it.

A change on which the state depends (block size, pool, policy) cannot keep the state:
there the engine is a new one, with an empty cache, which gets all requests being served
as resumed requests, in the order of their arrival. At turn 0 there are none. Speculation
is not such a change: the number of drafts may change while an engine runs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.engine import step
from minfer.journal.format import JournalError
from minfer.journal.redact import redacted_config
from minfer.journal.replay import Journal
from minfer.journal.turns import blamed
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Event,
    Finished,
    Pause,
    Preempted,
    Propose,
    Submit,
)
from minfer.records.policy import Rank
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import EngineState, Transition, Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import Guesses
from minfer.simulation.guesses_recorded import Recorded
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from minfer.values.pmap import Map


@define
class _Spare:
    """A policy under which the sequence at position `at` is preempted last; for one turn.

    Positions are those among the running: a preemption before it shifts it.
    """

    policy: Any
    at: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        """The policy's choice; if that is the spared sequence, its neighbour: the one
        before it unless that is the first, which is never preempted, else the one after
        it.
        """
        last = len(ranks) - 1
        choice: int = self.policy.victim(state, ranks)
        if not 0 < choice <= last:
            choice = last
        if choice == self.at and last > 1:
            choice = self.at - 1 if self.at > 1 else self.at + 1
        if choice < self.at:
            self.at -= 1
        return choice

    def may_preempt(self, *_: Any) -> bool:
        """False: no sample is preempted for a waiting one."""
        return False


@frozen(kw_only=True)
class Change:
    """The changes of a fork; none by default."""

    settings: Mapping[str, Any] = field(factory=dict)  # of EngineConfig, the policy too
    without: Collection[str] = ()  # requests that do not arrive
    spare: str = ""  # a request that is not preempted in the turn of the fork
    acceptance: float | None = None  # of drafts, instead of the recorded one


@frozen
class Fork:
    """The continuation of a run from a turn: its configuration, its turns, and the
    resumed requests.
    """

    config: EngineConfig
    # The first is turn `at`, with its recorded events, if no request is resumed.
    turns: Iterator[Turn]
    # the requests that a new engine resumes, each with its arrival in seconds
    handed: tuple[tuple[float, Request], ...] = ()
    guesses: Guesses = field(factory=Guesses)  # acceptance of its drafts


@define
class _Past:
    """The facts of the recorded run that a fork needs."""

    turn: Turn  # of the fork
    coming: list[Arrival]  # arrivals after it
    lengths: dict[SampleId, int]  # output tokens of samples that ended by themselves
    guesses: Guesses  # of drafts


def fork(journal: Journal, at: int, change: Change, cost: CostModel) -> Fork:
    """The run of `journal` from turn `at` on, with one fact changed; `cost` models the
    time of steps.

    Raises JournalError if there is no such turn, or if the change would be of the past.
    """
    gone = frozenset(change.without)
    past = _past(journal, at, gone, change.acceptance)
    was = journal.config
    config = evolve(was, **change.settings)
    if config.block_size % was.block_size and was == redacted_config(was):
        raise JournalError(
            "without token ids equal blocks are known of "
            f"{was.block_size} tokens and multiples only"
        )
    if evolve(config, speculation=was.speculation) != was:
        return _handed_over(was, config, past, gone, cost)
    return _continued(config, past, gone, change.spare, cost)


def _past(
    journal: Journal, at: int, gone: frozenset[str], acceptance: float | None
) -> _Past:
    """Read a run, of which the requests `gone` do not arrive from turn `at` on."""
    turn = None
    met = set[str]()
    coming = list[Arrival]()
    lengths = dict[SampleId, int]()
    drafts = Recorded(journal.config)
    for one in journal.turns():
        names = gone & {e.request.id for e in one.events if isinstance(e, Submit)}
        if names and one.number < at:
            raise JournalError(
                f"request {min(names)!r} arrived in turn {one.number}, before the "
                f"fork: fork at turn {one.number} or earlier"
            )
        met |= names
        if one.number == at:
            turn = one
        elif one.number > at:
            coming += _arrivals(one.events, one.transition.state.time, gone)
        drafts.see(one)
        for end in _ends(one.transition):
            if end.reason not in ("cancelled", "rejected", "error"):
                lengths[end.id, end.sample] = end.length
    if turn is None:
        raise JournalError(
            f"there is no turn {at}: the journal has turns "
            f"{journal.segments[0].head.turn} to {journal.count - 1}"
        )
    if missing := gone - met:
        raise JournalError(f"no request {min(missing)!r} arrives from turn {at} on")
    planned = [(when, _planned(what, lengths)) for when, what in coming]
    return _Past(turn, planned, lengths, drafts.guesses(acceptance))


def _continued(
    config: EngineConfig, past: _Past, gone: Collection[str], spare: str, cost: CostModel
) -> Fork:
    """The continuation in the same engine, from the state in which it was."""
    kept = tuple(
        event
        for event in past.turn.events
        if not (isinstance(event, Submit) and event.request.id in gone)
    )
    how, turn = config.speculation, past.turn
    if how is None or how.drafter != HOST:  # the host does not propose any more
        kept = tuple(event for event in kept if not isinstance(event, Propose))
        drafting = evolve(turn.before.drafting, proposals=Map())
        turn = evolve(turn, before=evolve(turn.before, drafting=drafting))
    turns = [_first(config, turn, kept, spare)]
    if paused := turns[0].transition.state.paused:
        turns.append(_unpaused(config, turns[0], paused))
    state = turns[-1].transition.state
    simulation = Simulation(
        config=config,
        executor=Simulated(past.lengths, state, past.guesses),
        guesses=past.guesses,
        cost=cost,
        arrivals=past.coming,
        state=state,
        time=state.time,
        number=turns[-1].number + 1,
    )
    return Fork(config, chain(turns, simulation.turns()), guesses=past.guesses)


def _unpaused(config: EngineConfig, last: Turn, paused: Iterable[SampleId]) -> Turn:
    """The turn with all paused samples continued: no later event would do that."""
    before = last.transition.state
    events = tuple(Pause(*name, paused=False) for name in sorted(paused))
    with blamed(last.number + 1, before):
        return Turn(last.number + 1, before, events, step(config, before, events))


def _arrivals(
    events: Iterable[Event], time: float, gone: Collection[str]
) -> Iterator[Arrival]:
    for event in events:
        if isinstance(event, Submit) and event.request.id not in gone:
            yield time, event.request
        elif isinstance(event, Cancel) and event.id not in gone:
            yield time, event


def _ends(transition: Transition) -> Iterator[Finished]:
    return chain(*(one.finished for one in transition.commands if isinstance(one, Emit)))


def _planned(what: Request | Cancel, lengths: Mapping[SampleId, int]) -> Request | Cancel:
    """A request that did not end with a token of its own, cut to its recorded length."""
    if isinstance(what, Cancel) or what.stop_ids:
        return what
    longest = max(
        (lengths.get((what.id, s), what.max_tokens) for s in range(what.n)), default=0
    )
    least = min(1, what.max_tokens)
    return evolve(what, max_tokens=max(least, min(what.max_tokens, longest)))


def _first(
    config: EngineConfig, turn: Turn, events: tuple[Event, ...], spare: str
) -> Turn:
    """The turn of the fork with other events, or in which the request `spare` is not
    preempted.
    """
    run = turn.before.running
    lost = _preempted(turn.transition, spare)
    if spare and lost.isdisjoint(run.ids):
        raise JournalError(
            f"request {spare!r} is not preempted in turn {turn.number}; "
            "minfer explain says in which it is"
        )
    ended = {(end.id, end.sample) for end in _ends(turn.transition)}
    # those that may be chosen as victims
    left = [name for name in run.ids if name not in ended]
    at = min((i for i, name in enumerate(left) if name in lost), default=0)
    engine = evolve(config, policy=_Spare(config.policy, at)) if spare else config
    with blamed(turn.number, turn.before):
        made = Turn(turn.number, turn.before, events, step(engine, turn.before, events))
    if spare and left[at] in _preempted(made.transition, spare):
        raise JournalError(
            f"no sample can be preempted for {spare!r} in turn {turn.number}"
        )
    return made


def _preempted(transition: Transition, name: str) -> set[SampleId]:
    gave = (reason for reason in transition.reasons if isinstance(reason, Preempted))
    return {(one.id, one.sample) for one in gave if one.id == name}


def _handed_over(
    was: EngineConfig,
    config: EngineConfig,
    past: _Past,
    gone: Collection[str],
    cost: CostModel,
) -> Fork:
    """The run on a new engine: requests being served are resumed; those with several
    samples start again.
    """
    turn = past.turn
    time = turn.transition.state.time
    here = sorted(_served(turn.before, was.block_size), key=lambda one: one.arrival)
    resumed = [one.request for one in here]
    new = [what for _, what in _arrivals(turn.events, time, gone)]
    now = [(time, _planned(what, past.lengths)) for what in (*resumed, *new)]
    size = was.block_size, config.block_size
    arrivals = [(when, _rekeyed(what, *size)) for when, what in (*now, *past.coming)]
    executor = Simulated(past.lengths, guesses=past.guesses)
    simulation = Simulation(
        config, executor, cost, arrivals, time=time, guesses=past.guesses
    )
    handed = tuple((one.since, one.request) for one in here)
    return Fork(config, simulation.turns(), handed, past.guesses)


def _rekeyed(what: Request | Cancel, was: int, size: int) -> Request | Cancel:
    return rekeyed(what, was, size) if isinstance(what, Request) else what


def rekeyed(request: Request, was: int, size: int) -> Request:
    """A request for an engine with blocks of `size` tokens, no longer `was`: without
    keys, which that engine computes.
    """
    transfer = request.kv_transfer
    if transfer is not None:
        stored = transfer.num_stored_blocks * was // size
        transfer = evolve(transfer, num_stored_blocks=stored)
    return evolve(request, keys=(), kv_transfer=transfer)


@frozen
class _Served:
    """A request that is being served."""

    arrival: int  # its number
    since: float  # seconds: when it arrived
    request: Request  # with its output


def _served(state: EngineState, block_size: int) -> Iterator[_Served]:
    """Requests that have not ended, in no order; output of several samples is dropped."""
    run, seen = state.running, set[str]()
    known = {seq.id: seq.history for seq in state.waiting}
    for i, seq in enumerate(run.seqs):
        known[seq.id] = run.tokens(i, block_size)
    for seq in (*state.waiting, *run.seqs):
        request = seq.request
        if request.id not in seen:
            seen.add(request.id)
            more = known[seq.id][len(request.prompt) :] if request.n == 1 else ()
            yield _Served(seq.place[1], seq.arrived, evolve(request, output=more))
