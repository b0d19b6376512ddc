"""Samples ended by a client or the text layer: cancelled, or finished.

Consecutive events are handled at once: each sample is looked up by itself, but the queue
and the columns are rebuilt once.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter

from minfer.lifecycle.ending import EndingSample, end_samples, ending_sample
from minfer.lifecycle.transitions import Cause
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Ended,
    Finish,
    Finished,
    Ignored,
    Reason,
    clip,
)
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition, waiting_sample
from minfer.values.record import evolve

Stop = Cancel | Finish


def stop_samples(
    config: EngineConfig, state: EngineState, stops: Sequence[Stop]
) -> Transition:
    """End the samples of the events `stops`, in their order, and report them in one
    `Emit`.
    """
    names = {stop.id for stop in stops}
    seats = {name: i for i, name in enumerate(state.running.ids) if name[0] in names}
    left = set[SampleId]()
    leavers = list[list[EndingSample]]()  # of each event
    for stop in stops:
        samples = _samples_of(state, stop, seats)
        leavers.append([leaver for leaver in samples if leaver.seq.id not in left])
        left.update(leaver.seq.id for leaver in leavers[-1])
    after, finished = end_samples(config, state, chain.from_iterable(leavers))
    unread, ends, reasons = iter(finished), list[Finished](), list[Reason]()
    for stop, own_leavers in zip(stops, leavers, strict=True):
        own_ends = [_with_length(stop, next(unread)) for _ in own_leavers]
        own_ends.sort(key=attrgetter("sample"))
        ends += own_ends
        ended = [Ended(end.id, end.sample, end.reason, end.error) for end in own_ends]
        reasons += ended or [_ignored(stop)]
    return Transition(after, (Emit((), (), tuple(ends)),) if ends else (), tuple(reasons))


def _samples_of(
    state: EngineState, stop: Stop, seats: dict[SampleId, int]
) -> Iterator[EndingSample]:
    """The samples to end, waiting ones first; those that have ended are not found."""
    live = state.requests.get(stop.id)
    if live is None:
        return
    samples, cause = tuple(range(live.samples)), Cause.CANCELLED
    reason, error = "cancelled", ""
    if isinstance(stop, Finish):
        samples, cause = (stop.sample,), Cause.FINISHED
        reason, error = stop.reason, clip(stop.error)
    running = []
    for sample in samples:
        position = seats.get((stop.id, sample))
        if position is not None:
            running.append(position)
        elif seq := waiting_sample(state, (stop.id, sample)):
            yield EndingSample(seq, len(seq.history), cause, reason, error)
    for position in sorted(running):
        yield ending_sample(state.running, position, cause, reason, error)


def _with_length(stop: Stop, end: Finished) -> Finished:
    """The end with the length of the text layer, which may drop some of the last
    tokens.
    """
    if isinstance(stop, Cancel):
        return end
    return evolve(end, length=max(0, min(stop.length, end.length)))


def _ignored(stop: Stop) -> Ignored:
    name = clip(repr(stop.id))
    if isinstance(stop, Cancel):
        return Ignored("cancel", f"no request {name}")
    return Ignored("finish", f"sample {stop.sample} of {name} is not being served")
