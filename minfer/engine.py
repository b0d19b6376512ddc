"""The engine: one pure function from (configuration, state, events) to a transition.

Theory. All inputs arrive as events; all outputs leave as commands. A turn folds the
events that have come, in order, and then plans until `depth` steps are in flight or
nothing can run. It reads no clock, draws no random number, and its cost is that of the
changes.

    Submit ---> waiting queue --> running columns ---> plan ---> executor
                  ^   (admit)        |      ^  (schedule)           |
                  |                  |      |                       |
                  +--- preempted ----+      +------ Executed -------+
                                     |              (commit)
                                     +--> ended: blocks stay cached until space is needed
"""

from itertools import groupby
from typing import Final

from minfer.lifecycle.adapters import apply_adapter_event
from minfer.lifecycle.arrive import submit_requests
from minfer.lifecycle.pausing import apply_pauses
from minfer.lifecycle.stop import stop_samples
from minfer.planning.commit import commit
from minfer.planning.schedule import schedule
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    EVENTS,
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    DropAdapter,
    Event,
    Executed,
    Failed,
    Finish,
    Lost,
    Moved,
    Pause,
    Propose,
    Submit,
    Tick,
)
from minfer.records.state import EngineState, Transition, ignore
from minfer.speculate.proposing import keep_proposals
from minfer.tiers.finish import finish_transfer
from minfer.tiers.store import store_blocks
from minfer.values.record import evolve

# Consecutive events of a kind cost less when they are folded at once.
_IN_A_ROW: Final[dict[type, str]] = {
    Submit: "submit",
    Cancel: "stop",
    Finish: "stop",
    Pause: "pause",
    Propose: "propose",
}


def step(
    config: EngineConfig, state: EngineState, events: tuple[Event, ...]
) -> Transition:
    """Take one turn: fold the events, then plan. Total: no sequence of events raises."""
    transitions: list[Transition] = []
    for together in _group_events(events):
        transitions.append(_fold(config, state, together))
        state = transitions[-1].state
    if config.has_tiers:
        transitions.append(store_blocks(config, state))
        state = transitions[-1].state
    while len(state.inflight) < config.depth:
        before = state.next_step
        transitions.append(schedule(config, state))
        state = transitions[-1].state
        if state.next_step == before:
            break
    commands = [command for transition in transitions for command in transition.commands]
    reasons = [reason for transition in transitions for reason in transition.reasons]
    if state.overrides:
        reasons += state.overrides
        state = evolve(state, overrides=())
    return Transition(state, tuple(commands), tuple(reasons))


def _group_events(events: tuple[Event, ...]) -> list[list[Event]]:
    """The events in order, in groups that are folded at once."""
    groups, last = list[list[Event]](), ""
    for kind, same_kind in groupby(events, key=type):
        name = _IN_A_ROW.get(kind, "")
        if not name:
            groups += [[event] for event in same_kind]
        elif name == last:
            groups[-1] += same_kind
        else:
            groups.append([*same_kind])
        last = name
    return groups


def _fold(config: EngineConfig, state: EngineState, events: list[Event]) -> Transition:
    if type(events[0]) not in EVENTS:  # against the types, but a turn may hold anything
        return ignore(state, "event", f"a {type(events[0]).__name__} is no event")
    match events[0]:
        case Executed() | Failed() as event:
            return commit(config, state, event)
        case Moved() | Lost() as event:
            return finish_transfer(config, state, event)
        case Tick(time):
            return Transition(evolve(state, time=max(state.time, time)))
        case Submit():
            requests = [event.request for event in events if isinstance(event, Submit)]
            return submit_requests(config, state, requests)
        case Cancel() | Finish():
            stops = [event for event in events if isinstance(event, Cancel | Finish)]
            return stop_samples(config, state, stops)
        case Pause():
            pauses = [event for event in events if isinstance(event, Pause)]
            return apply_pauses(state, pauses)
        case Propose():
            proposals = [event for event in events if isinstance(event, Propose)]
            return keep_proposals(config, state, proposals)
        case AdapterLoaded() | AdapterFailed() | DropAdapter() as event:
            return apply_adapter_event(config, state, event)
