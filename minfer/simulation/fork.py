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
from minfer.journal.overrides import OverrideCounts
from minfer.journal.redact import redacted_config
from minfer.journal.replay import Journal
from minfer.journal.turns import wrap_engine_errors
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
from minfer.simulation.guesses_recorded import RecordedDrafts
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from minfer.values.pmap import Map


@define
class _SparingPolicy:
    """A policy under which the sequence at `position` is preempted last; for one turn.

    Positions are those among the running: a preemption before it shifts it.
    """

    policy: Any
    position: int

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
        if choice == self.position and last > 1:
            choice = self.position - 1 if self.position > 1 else self.position + 1
        if choice < self.position:
            self.position -= 1
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
    resumed: tuple[tuple[float, Request], ...] = ()
    guesses: Guesses = field(factory=Guesses)  # acceptance of its drafts
    # answers of the policy that could not be used, in the turns that were taken
    overrides: OverrideCounts = field(factory=OverrideCounts)


@define
class _RecordedFacts:
    """The facts of the recorded run that a fork needs."""

    turn: Turn  # of the fork
    arrivals: list[Arrival]  # arrivals after it
    lengths: dict[SampleId, int]  # output tokens of samples that ended by themselves
    guesses: Guesses  # of drafts


def fork(journal: Journal, number: int, change: Change, cost: CostModel) -> Fork:
    """The run of `journal` from turn `number` on, with one fact changed; `cost` models
    the time of steps.

    Raises JournalError if there is no such turn, or if the change would be of the past.
    """
    removed = frozenset(change.without)
    past = _read_facts(journal, number, removed, change.acceptance)
    old = journal.config
    config = evolve(old, **change.settings)
    if config.block_size % old.block_size and old == redacted_config(old):
        raise JournalError(
            "without token ids equal blocks are known of "
            f"{old.block_size} tokens and multiples only"
        )
    if evolve(config, speculation=old.speculation) != old:
        return _on_new_engine(old, config, past, removed, cost)
    return _continued(config, past, removed, change.spare, cost)


def _read_facts(
    journal: Journal, number: int, removed: frozenset[str], acceptance: float | None
) -> _RecordedFacts:
    """Read a run, of which the requests `removed` do not arrive from turn `number` on."""
    fork_turn = None
    arrived = set[str]()
    arrivals = list[Arrival]()
    lengths = dict[SampleId, int]()
    drafts = RecordedDrafts(journal.config)
    for turn in journal.turns():
        names = removed & {
            event.request.id for event in turn.events if isinstance(event, Submit)
        }
        if names and turn.number < number:
            raise JournalError(
                f"request {min(names)!r} arrived in turn {turn.number}, before the "
                f"fork: fork at turn {turn.number} or earlier"
            )
        arrived |= names
        if turn.number == number:
            fork_turn = turn
        elif turn.number > number:
            arrivals += _arrivals(turn.events, turn.transition.state.time, removed)
        drafts.add_turn(turn)
        for end in _ends(turn.transition):
            if end.reason not in ("cancelled", "rejected", "error"):
                lengths[end.id, end.sample] = end.length
    if fork_turn is None:
        raise JournalError(
            f"there is no turn {number}: the journal has turns "
            f"{journal.segments[0].head.turn} to {journal.count - 1}"
        )
    if missing := removed - arrived:
        raise JournalError(f"no request {min(missing)!r} arrives from turn {number} on")
    planned = [(time, _shortened(arrival, lengths)) for time, arrival in arrivals]
    return _RecordedFacts(fork_turn, planned, lengths, drafts.guesses(acceptance))


def _continued(
    config: EngineConfig,
    past: _RecordedFacts,
    removed: Collection[str],
    spare: str,
    cost: CostModel,
) -> Fork:
    """The continuation in the same engine, from the state in which it was."""
    events = tuple(
        event
        for event in past.turn.events
        if not (isinstance(event, Submit) and event.request.id in removed)
    )
    spec_config, turn = config.speculation, past.turn
    if spec_config is None or spec_config.drafter != HOST:
        # The host does not propose any more.
        events = tuple(event for event in events if not isinstance(event, Propose))
        drafting = evolve(turn.before.drafting, proposals=Map())
        turn = evolve(turn, before=evolve(turn.before, drafting=drafting))
    turns = [_fork_turn(config, turn, events, spare)]
    if paused := turns[0].transition.state.paused:
        turns.append(_unpaused(config, turns[0], paused))
    state, overrides = turns[-1].transition.state, OverrideCounts()
    simulation = Simulation(
        config=config,
        executor=Simulated(past.lengths, state, past.guesses),
        guesses=past.guesses,
        cost=cost,
        arrivals=past.arrivals,
        state=state,
        time=state.time,
        number=turns[-1].number + 1,
        overrides=overrides,
    )
    continued = chain(overrides.fold_turns(turns), simulation.turns())
    return Fork(config, continued, guesses=past.guesses, overrides=overrides)


def _unpaused(config: EngineConfig, last: Turn, paused: Iterable[SampleId]) -> Turn:
    """The turn with all paused samples continued: no later event would do that."""
    before = last.transition.state
    events = tuple(Pause(*name, paused=False) for name in sorted(paused))
    with wrap_engine_errors(last.number + 1, before):
        return Turn(last.number + 1, before, events, step(config, before, events))


def _arrivals(
    events: Iterable[Event], time: float, removed: Collection[str]
) -> Iterator[Arrival]:
    for event in events:
        if isinstance(event, Submit) and event.request.id not in removed:
            yield time, event.request
        elif isinstance(event, Cancel) and event.id not in removed:
            yield time, event


def _ends(transition: Transition) -> Iterator[Finished]:
    emits = (command for command in transition.commands if isinstance(command, Emit))
    return chain(*(emit.finished for emit in emits))


def _shortened(
    arrival: Request | Cancel, lengths: Mapping[SampleId, int]
) -> Request | Cancel:
    """A request that did not end with a token of its own, cut to its recorded length."""
    if isinstance(arrival, Cancel) or arrival.stop_ids:
        return arrival
    max_length = max(
        (lengths.get((arrival.id, s), arrival.max_tokens) for s in range(arrival.n)),
        default=0,
    )
    length = max(min(1, arrival.max_tokens), min(arrival.max_tokens, max_length))
    return evolve(arrival, max_tokens=length)


def _fork_turn(
    config: EngineConfig, turn: Turn, events: tuple[Event, ...], spare: str
) -> Turn:
    """The turn of the fork with other events, or in which the request `spare` is not
    preempted.
    """
    run = turn.before.running
    preempted = _preempted(turn.transition, spare)
    if spare and preempted.isdisjoint(run.ids):
        raise JournalError(
            f"request {spare!r} is not preempted in turn {turn.number}; "
            "minfer explain says in which it is"
        )
    ended = {(end.id, end.sample) for end in _ends(turn.transition)}
    # those that may be chosen as victims
    candidates = [name for name in run.ids if name not in ended]
    positions = (i for i, name in enumerate(candidates) if name in preempted)
    position = min(positions, default=0)
    policy = _SparingPolicy(config.policy, position) if spare else config.policy
    engine = evolve(config, policy=policy)
    with wrap_engine_errors(turn.number, turn.before):
        forked = Turn(turn.number, turn.before, events, step(engine, turn.before, events))
    if spare and candidates[position] in _preempted(forked.transition, spare):
        raise JournalError(
            f"no sample can be preempted for {spare!r} in turn {turn.number}"
        )
    return forked


def _preempted(transition: Transition, name: str) -> set[SampleId]:
    return {
        (reason.id, reason.sample)
        for reason in transition.reasons
        if isinstance(reason, Preempted) and reason.id == name
    }


def _on_new_engine(
    old: EngineConfig,
    config: EngineConfig,
    past: _RecordedFacts,
    removed: Collection[str],
    cost: CostModel,
) -> Fork:
    """The run on a new engine: requests being served are resumed; those with several
    samples start again.
    """
    turn = past.turn
    time = turn.transition.state.time
    served = sorted(_served(turn.before, old.block_size), key=lambda live: live.arrival)
    requests: list[Request | Cancel] = [live.request for live in served]
    requests += [arrival for _, arrival in _arrivals(turn.events, time, removed)]
    pending = [(time, _shortened(arrival, past.lengths)) for arrival in requests]
    size = old.block_size, config.block_size
    pending += past.arrivals
    arrivals = [(due, _rekeyed(arrival, *size)) for due, arrival in pending]
    executor = Simulated(past.lengths, guesses=past.guesses)
    simulation = Simulation(
        config, executor, cost, arrivals, time=time, guesses=past.guesses
    )
    resumed = tuple((live.since, live.request) for live in served)
    return Fork(config, simulation.turns(), resumed, past.guesses, simulation.overrides)


def _rekeyed(arrival: Request | Cancel, old_size: int, size: int) -> Request | Cancel:
    return rekeyed(arrival, old_size, size) if isinstance(arrival, Request) else arrival


def rekeyed(request: Request, old_size: int, size: int) -> Request:
    """A request for an engine with blocks of `size` tokens, no longer `old_size`: without
    keys, which that engine computes.
    """
    transfer = request.kv_transfer
    if transfer is not None:
        stored = transfer.num_stored_blocks * old_size // size
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
    histories = {seq.id: seq.history for seq in state.waiting}
    for i, seq in enumerate(run.seqs):
        histories[seq.id] = run.tokens(i, block_size)
    for seq in (*state.waiting, *run.seqs):
        request = seq.request
        if request.id not in seen:
            seen.add(request.id)
            output = histories[seq.id][len(request.prompt) :] if request.n == 1 else ()
            yield _Served(seq.place[1], seq.arrived, evolve(request, output=output))
