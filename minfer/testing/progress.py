"""The specification of progress: a measure that falls with every good step, until all has
ended.

Theory. Order the samples that are open by rank. What is left of each is a triple: tokens
that it may still have; positions of which it has no KV; and how far it is from a plan (0
in flight, 1 running, from 2 on in line: how many run that rank behind it). The sequence
of these triples, compared from the first in rank on, is a measure in a well-founded
order: it cannot fall for ever. A good step lowers it, whatever else happens in that turn
inside the engine: its rows know more or have more computed; and whoever is sent back for
want of a block or a row (its second number rises) ranks behind somebody whose triple
fell: a row that had results, or the one for whom it gave way, which is in a plan now or
nearer to one. So preemption cannot go in circles: between two arrivals only so many steps
can pass. One step may leave more than before: if the last in rank alone has results and
gives way, while others before it are in flight. Their steps are good ones, or fail from
outside, and of such turns there are at most as many as steps in flight.

That holds if those who give way are the last in rank, as under all policies that come
with minfer; what another choice of victims promises is that policy's own affair, except
that the first in rank never gives way (`minfer.testing.line_laws`). Under a policy that
holds clients back, who has not been in yet is passed by others: then only those who have
are counted, and a turn in which somebody new is let in, which happens once to each, or
has another give way, is where the measure starts anew. Arrivals, failures of steps,
cancels, stop strings and pauses come from outside: a turn that has them is where the
measure starts anew.
"""

from collections.abc import Container, Mapping

from minfer.sequence import SampleId
from minfer.state import EngineState
from minfer.testing.accounts import Account
from minfer.testing.invariants import InvariantError
from minfer.testing.lifetime import Stage

Left = tuple[int, int, int]  # tokens to come, positions not computed, how far from a plan
Measure = dict[SampleId, Left]  # in order of rank
DONE: Left = (0, 0, 0)


def measure(
    accounts: Mapping[SampleId, Account], state: EngineState, *, passed: bool = False
) -> Measure:
    """What is left of all that are open; if newcomers may be `passed`, of all that have
    been in.
    """
    found, behind = list[tuple[SampleId, Left]](), 0
    seqs = sorted((*state.waiting, *state.running.seqs), key=lambda seq: seq.place)
    for seq in reversed(seqs):
        one = accounts[seq.id]
        if passed and one.stage is Stage.WAITING:
            continue
        tokens, known, seat = one.last + 1 - len(one.known), len(one.known), one.seat
        if seat is None:
            found.append((seq.id, (tokens, known, 2 + behind)))
        else:
            left = known - seat.kv
            found.append((seq.id, (tokens, left, int(seat.sched == seat.kv))))
            behind += 1
    return dict(reversed(found))


def check_progress(
    before: Measure, after: Measure, gave_way: Container[SampleId] = ()
) -> None:
    """Raise InvariantError unless less is left than before a good step.

    `gave_way` are those who were sent back in line in this turn.
    """
    flying = False  # somebody before in rank, for the turns to come
    for name, was in before.items():
        now = after.get(name, DONE)
        if now == was:
            flying = flying or now[2] == 0
        else:
            if now > was and not (flying and name in gave_way):
                raise InvariantError(
                    "progress", f"of {name} {now} is left, and was {was}"
                )
            return
    raise InvariantError("progress", "a good step, and nothing has changed")
