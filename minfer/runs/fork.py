"""Forks: a recorded run up to a turn, one fact changed, and how it would have gone on.

What is exact: every turn before the fork, the turn of the fork itself (its recorded
events, less an arrival that is taken away), all arrivals and cancels with their times,
and how many tokens each sample has (but for stop strings, which are no tokens, of those
that run at the fork). What is modelled: how long steps take, the values of tokens, hence
which later prompts share a prefix with an output, and the length of samples that were
cancelled (as long as allowed).

A change of what the state depends on (block size, pool, policy) cannot keep the state:
there the engine is a new one, to which all that was being served is handed over as
resumed requests, with an empty cache, in the order in which they arrived. At turn 0 there
is nothing to hand over.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.messages import Cancel, Emit, Event, Finished, Preempted, Submit
from minfer.policy import Rank
from minfer.request import Request
from minfer.runs.journal import JournalError
from minfer.runs.redact import redacted_config
from minfer.runs.replay import Journal
from minfer.runs.simulate import Arrival, CostModel, Simulated, Simulation
from minfer.runs.turns import blamed
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition, Turn


@define
class _Spare:
    """A policy that does not choose the sequence at position `at`; for one turn."""

    policy: Any
    at: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        """The policy's choice, or who comes before it, or after."""
        choice: int = self.policy.victim(state, ranks)
        choice = choice if 0 < choice < len(ranks) else len(ranks) - 1
        if choice == self.at and len(ranks) > 2:
            choice = self.at - 1 if self.at > 1 else self.at + 1
        self.at -= choice < self.at
        return choice

    def displaces(self, *_: Any) -> bool:
        """Nobody gives way to who waits."""
        return False


@frozen(kw_only=True)
class Change:
    """What a fork changes; nothing by default."""

    settings: Mapping[str, Any] = field(factory=dict)  # of EngineConfig, the policy too
    without: Collection[str] = ()  # requests that do not arrive
    spare: str = ""  # a request that is not preempted in the turn of the fork


@frozen
class Fork:
    """How a run goes on from a turn: its configuration, its turns, and what was handed
    over.
    """

    config: EngineConfig
    turns: Iterator[
        Turn
    ]  # the first is turn `at`, with its recorded events, if nothing is handed
    handed: tuple[
        tuple[float, Request], ...
    ] = ()  # to a new engine, with when they arrived


def fork(journal: Journal, at: int, change: Change, cost: CostModel) -> Fork:
    """The run of `journal` from turn `at` on, with one fact changed; steps take what
    `cost` says.

    Raises JournalError if there is no such turn, or what is to change has happened before
    it.
    """
    gone = set(change.without)
    turn, met, lengths, coming = None, set[str](), dict[SampleId, int](), list[Arrival]()
    for one in journal.turns():
        names = {e.request.id for e in one.events if isinstance(e, Submit)} & gone
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
        for end in _ends(one.transition):
            if end.reason not in ("cancelled", "rejected", "error"):
                lengths[end.id, end.sample] = end.length
    if turn is None:
        raise JournalError(
            f"there is no turn {at}: the journal has turns "
            f"{journal.segments[0].head.turn} to {journal.count - 1}"
        )
    if gone - met:
        raise JournalError(f"no request {min(gone - met)!r} arrives from turn {at} on")
    config = evolve(journal.config, **change.settings)
    ends = [(when, _planned(what, lengths)) for when, what in coming]
    was = journal.config
    if config.block_size % was.block_size and was == redacted_config(was):
        raise JournalError(
            "without token ids equal blocks are known of "
            f"{was.block_size} tokens and multiples only"
        )
    if config != was:
        return _handover(journal.config, config, turn, ends, lengths, gone, cost)
    kept = tuple(
        e for e in turn.events if not (isinstance(e, Submit) and e.request.id in gone)
    )
    first = _first(config, turn, kept, change.spare)
    state = first.transition.state
    goes_on = Simulation(
        config,
        Simulated(lengths, state),
        cost,
        ends,
        state,
        time=state.time,
        number=at + 1,
    )
    return Fork(config, chain([first], goes_on.turns()))


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
    """A request that ended for another cause than a token of its own ends at
    that length.
    """
    if isinstance(what, Cancel) or what.stop_ids:
        return what
    longest = max(
        (lengths.get((what.id, s), what.max_tokens) for s in range(what.n)), default=0
    )
    return evolve(what, max_tokens=max(1, min(what.max_tokens, longest)))


def _first(
    config: EngineConfig, turn: Turn, events: tuple[Event, ...], spare: str
) -> Turn:
    """The turn of the fork with other events, or in which the request `spare` is not
    preempted.
    """
    run, lost = turn.before.running, _preempted(turn.transition, spare)
    if spare and not lost & {*run.ids}:
        raise JournalError(
            f"request {spare!r} is not preempted in turn {turn.number}; "
            "minfer explain says in which it is"
        )
    ended = {(end.id, end.sample) for end in _ends(turn.transition)}
    left = [
        name for name in run.ids if name not in ended
    ]  # when somebody has to give way
    at = min((i for i, name in enumerate(left) if name in lost), default=0)
    engine = evolve(config, policy=_Spare(config.policy, at)) if spare else config
    with blamed(turn.number, turn.before):
        made = Turn(turn.number, turn.before, events, step(engine, turn.before, events))
    if spare and left[at] in _preempted(made.transition, spare):
        raise JournalError(f"nobody can give way for {spare!r} in turn {turn.number}")
    return made


def _preempted(transition: Transition, name: str) -> set[SampleId]:
    gave = (reason for reason in transition.reasons if isinstance(reason, Preempted))
    return {(one.id, one.sample) for one in gave if one.id == name}


def _handover(
    before: EngineConfig,
    config: EngineConfig,
    turn: Turn,
    coming: list[Arrival],
    lengths: Mapping[SampleId, int],
    gone: Collection[str],
    cost: CostModel,
) -> Fork:
    """The run on a new engine: who was being served is resumed, several samples begin
    anew.
    """
    state, time, size = turn.before, turn.transition.state.time, before.block_size
    here = sorted(_served(state, size), key=lambda one: one[0])
    resumed = [(time, _planned(request, lengths)) for _, _, request in here]
    new = _arrivals(turn.events, time, gone)
    now = [*resumed, *((when, _planned(what, lengths)) for when, what in new)]
    arrivals = [(when, _bare(what)) for when, what in [*now, *coming]]
    simulation = Simulation(config, Simulated(lengths), cost, arrivals, time=time)
    return Fork(config, simulation.turns(), tuple((since, one) for _, since, one in here))


def _bare(what: Request | Cancel) -> Request | Cancel:
    """Without keys: those are of another block size."""
    return evolve(what, keys=()) if isinstance(what, Request) else what


def _served(state: EngineState, block_size: int) -> Iterator[tuple[int, float, Request]]:
    """Requests that have not ended: arrival number and time, and what they
    have produced.
    """
    run, seen = state.running, set[str]()
    known = {seq.id: seq.history for seq in state.waiting}
    for i, seq in enumerate(run.seqs):
        known[seq.id] = run.tokens(i, block_size)
    for seq in (*state.waiting, *run.seqs):
        request = seq.request
        if request.id not in seen:
            seen.add(request.id)
            more = known[seq.id][len(request.prompt) :] if request.n == 1 else ()
            yield seq.place[1], seq.arrived, evolve(request, output=more)
