"""The specification of a policy's own state, for the policies of minfer: it follows from
the waiting and running samples.

A policy without state keeps its first one. Fair shares count the samples of each client
and class: those waiting or running, and those admitted.
"""

from collections import Counter

from minfer.policies.builtin import Ageing, Deadline, Priority, Shortest, Window
from minfer.policies.fair_queue import Accounts, FairQueue
from minfer.policies.fair_seats import FairSeats, Seats
from minfer.records.config import EngineConfig
from minfer.records.policy import FirstCome
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.testing.invariants import require

_WITHOUT_STATE = (FirstCome, Priority, Ageing, Deadline, Shortest)


def check_policy_state(config: EngineConfig, state: EngineState) -> None:
    """Raise InvariantError unless the policy's state fits the present samples."""
    kind, own = type(config.policy), state.policy
    if kind in _WITHOUT_STATE:
        require(own is None, "policy", f"{kind.__name__} keeps {own!r:.80}")
    if kind is Window:
        right = 0 <= own.fresh <= len(state.waiting)
        require(right, "policy", f"{own.fresh} have come, {len(state.waiting)} wait")
    if kind in (FairQueue, FairSeats):
        _accounts(own, state)
    if kind is FairSeats:
        _seats(own, state)


def _accounts(own: Accounts, state: EngineState) -> None:
    """Check that each account has the number of present samples of its client and
    class.
    """
    live = {owner: one.live for owner, one in own.by_owner.items() if one.live}
    here = Counter(_owner(seq) for seq in (*state.waiting, *state.running.seqs))
    require(live == here, "policy", f"accounts of {live}; there are {dict(here)}")


def _seats(own: Seats, state: EngineState) -> None:
    """Check that samples that were admitted and have not ended hold a seat."""
    back = [seq for seq in state.waiting if seq.preempted]
    inside = Counter(_owner(seq) for seq in (*back, *state.running.seqs))
    held = {
        (level, client): many
        for client, classes in own.held.items()
        for level, many in classes.items()
    }
    require(held == inside, "policy", f"seats of {held}; inside are {dict(inside)}")
    taken = Counter[int]()
    for (level, _), many in inside.items():
        taken[level] += many
    require(dict(own.taken) == taken, "policy", f"{dict(own.taken)} taken, not {taken}")


def _owner(seq: Sequence) -> tuple[int, str]:
    return seq.request.priority, seq.request.client
