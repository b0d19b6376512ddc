"""Samples that are ended from outside: cancelled, or finished by the text layer.

When many are asked for in a row, all leave at once: where each is, is looked up for each;
the line and the columns are made anew once.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from minfer.config import EngineConfig
from minfer.ending import Leaver, end, leaver
from minfer.messages import Cancel, Emit, Ended, Finish, Finished, Ignored, Reason, clip
from minfer.record import evolve
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition

Stop = Cancel | Finish


def stopped(
    config: EngineConfig, state: EngineState, stops: Sequence[Stop]
) -> Transition:
    """End what the events `stops` ask for, in their order, and say so in one word about
    all.
    """
    names = {stop.id for stop in stops}
    seats = {one: i for i, one in enumerate(state.running.ids) if one[0] in names}
    left = set[SampleId]()
    leavers = list[list[Leaver]]()
    for stop in stops:
        leavers.append(
            [one for one in _asked(state, stop, seats) if one.seq.id not in left]
        )
        left.update(one.seq.id for one in leavers[-1])
    after, finished = end(config, state, [one for each in leavers for one in each])
    unread, done, reasons = iter(finished), list[Finished](), list[Reason]()
    for stop, each in zip(stops, leavers, strict=True):
        own = [_cut(stop, next(unread)) for _ in each]
        own.sort(key=attrgetter("sample"))
        done += own
        reasons += [Ended(one.id, one.sample, one.reason, one.error) for one in own] or [
            _ignored(stop)
        ]
    return Transition(after, (Emit((), (), tuple(done)),) if done else (), tuple(reasons))


def _asked(
    state: EngineState, stop: Stop, seats: dict[SampleId, int]
) -> Iterator[Leaver]:
    """Who is to end, those that wait first; what has ended is nowhere."""
    live = state.requests.get(stop.id)
    if live is None:
        return
    samples, reason, error = tuple(range(live.samples)), "cancelled", ""
    if isinstance(stop, Finish):
        samples, reason, error = (stop.sample,), stop.reason, clip(stop.error)
    running = []
    for sample in samples:
        at = seats.get((stop.id, sample))
        if at is not None:
            running.append(at)
        elif seq := state.waiting.find(live.place_of(sample)):
            yield Leaver(seq, len(seq.history), reason, error)
    for at in sorted(running):
        yield leaver(state.running, at, reason, error)


def _cut(stop: Stop, done: Finished) -> Finished:
    """The text layer may say that some of the last tokens do not count."""
    if isinstance(stop, Cancel):
        return done
    return evolve(done, length=max(0, min(stop.length, done.length)))


def _ignored(stop: Stop) -> Ignored:
    name = clip(repr(stop.id))
    if isinstance(stop, Cancel):
        return Ignored("cancel", f"no request {name}")
    return Ignored("finish", f"sample {stop.sample} of {name} is not being served")
