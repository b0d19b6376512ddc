"""The specification of progress: a measure that falls with every good step, until all has ended.

Theory. Order the samples that are open by rank. What is left of each is a triple: tokens that it
may still have; positions of which it has no KV; and how far it is from a plan (0 in flight, 1
running, 2 in line). The sequence of these triples, compared from the first in rank on, is a measure
in a well-founded order: it cannot fall for ever. A good step lowers it, whatever else
happens in that turn inside the engine: its rows know more or have more computed; and whoever is
sent back for want of a block or a row (its second number rises) ranks behind somebody whose triple
fell: a row that had results, or the one for whom it gave way, which is in a plan now. So preemption
cannot go in circles: between two arrivals only so many steps can pass.

That holds if those who give way are the last in rank, as under all policies that come with minfer;
what another choice of victims promises is that policy's own affair, except that the first in rank
never gives way (`minfer.line_laws`). Arrivals, failures of steps, cancels and stop strings come
from outside: a turn that has them is where the measure starts anew.
"""

from collections.abc import Mapping

from minfer.accounts import Account
from minfer.invariants import InvariantError
from minfer.sequence import Place, SampleId
from minfer.state import EngineState

Left = tuple[int, int, int]  # tokens to come, positions not computed, how far from a plan
Measure = tuple[tuple[Place, SampleId, Left], ...]  # in order of rank
DONE: Left = (0, 0, 0)


def left(one: Account) -> Left:
    """What is left of one sample."""
    tokens, seat = one.last + 1 - len(one.known), one.seat
    if seat is None:
        return tokens, len(one.known), 2
    return tokens, len(one.known) - seat.kv, int(seat.sched == seat.kv)


def measure(accounts: Mapping[SampleId, Account], state: EngineState) -> Measure:
    """What is left of all that are open."""
    seqs = (*state.waiting, *state.running.seqs)
    return tuple(sorted((seq.place, seq.id, left(accounts[seq.id])) for seq in seqs))


def check_progress(before: Measure, accounts: Mapping[SampleId, Account]) -> None:
    """Raise InvariantError unless less is left than before a good step."""
    for _, name, was in before:
        one = accounts.get(name)
        now = left(one) if one is not None else DONE
        if now != was:
            if now > was:
                raise InvariantError("progress", f"of {name} {now} is left, and was {was}")
            return
    raise InvariantError("progress", "a good step, and nothing has changed")
