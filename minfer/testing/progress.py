"""The specification of progress: a measure that falls with every good step, until all has
ended.

Theory. Order the open samples by rank. The work left of each is a triple: tokens that it
may still get; positions without KV; and its distance from a plan (0 in flight, 1 running,
from 2 on in the queue: the number of running samples that rank behind it). The sequence
of these triples, compared from the first in rank on, is a measure in a well-founded
order: it cannot fall forever. A good step lowers it, whatever else the engine does in
that turn: its rows know more or have more computed; and a sample that is preempted for a
block or a row (its second number rises) ranks behind a sample whose triple fell: a row
with results, or the sample that preempted it, which is now in a plan or closer to one. So
preemptions cannot repeat in a cycle: between two arrivals the number of steps is bounded.
One step may leave more than before: if only the last in rank has results and is
preempted, while others before it are in flight. Their steps are good ones, or fail from
outside, and there are at most as many such turns as steps in flight.

That holds if the victims are the last in rank, as under all policies of minfer; under
another choice of victims progress is up to that policy, except that the first in rank is
never preempted (`minfer.testing.queue_laws`). Under a policy that defers clients, samples
that have not run yet are passed by others: then only samples that have run are counted,
and the measure starts anew in a turn in which a new sample is admitted, which happens
once to each, or preempts another. Samples whose blocks are on their way are passed, too,
and not counted meanwhile: that happens once while a sample is in the queue. So are all
samples in the queue that have an adapter, which may be in no slot: how often they are
passed has a bound of its own (`minfer.testing.adapter_laws`), and the measure starts anew
in a turn in which one of them is admitted, or preempts another. Arrivals,
failures of steps, cancels, stop strings and pauses come from outside: the measure starts
anew in turns that have them.
"""

from collections.abc import Container, Mapping

from minfer.lifecycle.transitions import Stage
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState
from minfer.testing.accounts import SampleAccount
from minfer.testing.invariants import InvariantError

# tokens to come, positions not computed, distance from a plan
WorkLeft = tuple[int, int, int]
Measure = dict[SampleId, WorkLeft]  # in order of rank
NOTHING_LEFT: WorkLeft = (0, 0, 0)


def measure(
    accounts: Mapping[SampleId, SampleAccount],
    state: EngineState,
    *,
    passed: bool = False,
) -> Measure:
    """The work left of all open samples but those whose blocks are on their way, and
    those in the queue that may have to wait for an adapter; if newcomers may be `passed`,
    of all that have run.
    """
    work_left, behind = list[tuple[SampleId, WorkLeft]](), 0
    seqs = sorted((*state.waiting, *state.running.seqs), key=lambda seq: seq.place)
    for seq in reversed(seqs):
        account = accounts[seq.id]
        if passed and account.stage is Stage.WAITING:
            continue
        waits = seq.request.adapter or seq.request.id in state.tiers.loading
        if waits and account.seat is None:
            continue
        num_tokens, seat = len(account.tokens), account.seat
        tokens = account.last_index + 1 - num_tokens
        if seat is None:
            work_left.append((seq.id, (tokens, num_tokens, 2 + behind)))
        else:
            left = num_tokens - seat.kv
            work_left.append((seq.id, (tokens, left, int(seat.scheduled == seat.kv))))
            behind += 1
    return dict(reversed(work_left))


def check_progress(
    before: Measure, after: Measure, last_victims: Container[SampleId] = ()
) -> None:
    """Raise InvariantError unless less is left than before a good step.

    `last_victims` are the samples that were preempted in this turn.
    """
    in_flight = False  # a sample before in rank is in flight, for the turns to come
    for name, old in before.items():
        new = after.get(name, NOTHING_LEFT)
        if new == old:
            in_flight = in_flight or new[2] == 0
        else:
            if new > old and not (in_flight and name in last_victims):
                raise InvariantError(
                    "progress", f"of {name} {new} is left, and was {old}"
                )
            return
    raise InvariantError("progress", "a good step, and nothing has changed")
