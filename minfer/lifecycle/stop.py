"""Samples ended by a client or the text layer: cancelled, or finished.

Consecutive events are handled at once: each sample is looked up by itself, but the queue
and the columns are rebuilt once.
"""

from collections.abc import Iterator, Sequence
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
    seats = {one: i for i, one in enumerate(state.running.ids) if one[0] in names}
    left = set[SampleId]()
    leavers = list[list[EndingSample]]()
    for stop in stops:
        leavers.append(
            [one for one in _samples_of(state, stop, seats) if one.seq.id not in left]
        )
        left.update(one.seq.id for one in leavers[-1])
    after, finished = end_samples(
        config, state, [one for each in leavers for one in each]
    )
    unread, done, reasons = iter(finished), list[Finished](), list[Reason]()
    for stop, each in zip(stops, leavers, strict=True):
        own = [_with_length(stop, next(unread)) for _ in each]
        own.sort(key=attrgetter("sample"))
        done += own
        reasons += [Ended(one.id, one.sample, one.reason, one.error) for one in own] or [
            _ignored(stop)
        ]
    return Transition(after, (Emit((), (), tuple(done)),) if done else (), tuple(reasons))


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
        at = seats.get((stop.id, sample))
        if at is not None:
            running.append(at)
        elif seq := waiting_sample(state, (stop.id, sample)):
            yield EndingSample(seq, len(seq.history), cause, reason, error)
    for at in sorted(running):
        yield ending_sample(state.running, at, cause, reason, error)


def _with_length(stop: Stop, done: Finished) -> Finished:
    """The end with the length of the text layer, which may drop some of the last
    tokens.
    """
    if isinstance(stop, Cancel):
        return done
    return evolve(done, length=max(0, min(stop.length, done.length)))


def _ignored(stop: Stop) -> Ignored:
    name = clip(repr(stop.id))
    if isinstance(stop, Cancel):
        return Ignored("cancel", f"no request {name}")
    return Ignored("finish", f"sample {stop.sample} of {name} is not being served")
