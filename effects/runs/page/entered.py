"""The requests that a turn accepted or refused, if several with one id came in it.

Theory. A request whose id is being served is ignored, and the reason for that does not
show which of several it was. So the events of the turn are followed, with the samples
that are served at each of them.
"""

from collections import Counter

import minfer.records.messages as messages
from minfer.lifecycle.arrive import id_in_use
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn


def entered_requests(turn: Turn) -> list[Request]:
    """The requests that a turn accepted or refused, in the order of their arrival."""
    requests = [
        event.request for event in turn.events if isinstance(event, messages.Submit)
    ]
    if not any(
        isinstance(reason, messages.Ignored) and reason.event == "submit"
        for reason in turn.transition.reasons
    ):
        return requests
    return _follow_events(turn)


def _follow_events(turn: Turn) -> list[Request]:
    """Likewise, event by event."""
    entered = list[Request]()
    served = set(_served(turn.before))
    ignored = _ignored_altogether(turn)
    stepped = _ended_by_steps(turn)
    refused = _refused(turn)
    for event in turn.events:
        match event:
            case messages.Submit(request) if request.id in ignored:
                pass
            case messages.Submit(request) if not any(
                name == request.id for name, _ in served
            ):
                entered.append(request)
                if request.id in refused and not _could_be(request, turn):
                    refused.remove(request.id)
                else:
                    served |= {(request.id, sample) for sample in range(request.n)}
            case messages.Cancel(name):
                served = {sample for sample in served if sample[0] != name}
            case messages.Finish(name, sample):
                served.discard((name, sample))
            case messages.Executed() | messages.Failed():
                served -= stepped
    return entered


def _ignored_altogether(turn: Turn) -> set[str]:
    """The ids of which this turn accepted no request: it ignored as many as came."""
    submitted = Counter(
        event.request.id for event in turn.events if isinstance(event, messages.Submit)
    )
    ignored = Counter(
        reason.detail
        for reason in turn.transition.reasons
        if isinstance(reason, messages.Ignored) and reason.event == "submit"
    )
    return {
        name for name, count in submitted.items() if ignored[id_in_use(name)] == count
    }


def _served(state: EngineState) -> list[SampleId]:
    """All samples that have not ended."""
    return [*(seq.id for seq in state.waiting), *state.running.ids]


def _emits(turn: Turn) -> list[messages.Emit]:
    return [
        command
        for command in turn.transition.commands
        if isinstance(command, messages.Emit)
    ]


def _ended_by_steps(turn: Turn) -> set[SampleId]:
    """The samples that ended with a step of this turn, or with its failure."""
    return {
        (end.id, end.sample)
        for emit in _emits(turn)
        for end in emit.finished
        if emit.ids or end.reason == "error"
    }


def _refused(turn: Turn) -> list[str]:
    """The ids of the requests that this turn refused, one for each refusal."""
    return [
        end.id
        for emit in _emits(turn)
        for end in emit.finished
        if end.reason == "rejected" and not end.sample
    ]


def _could_be(request: Request, turn: Turn) -> bool:
    """Whether this is the request of its id that is served after the turn."""
    after = turn.transition.state
    return any(seq.request is request for seq in (*after.waiting, *after.running.seqs))
