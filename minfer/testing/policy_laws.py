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
    kind, policy_state = type(config.policy), state.policy
    if kind in _WITHOUT_STATE:
        require(
            policy_state is None, "policy", f"{kind.__name__} keeps {policy_state!r:.80}"
        )
    if kind is Window:
        is_valid = 0 <= policy_state.fresh <= len(state.waiting)
        require(
            is_valid,
            "policy",
            f"{policy_state.fresh} have come, {len(state.waiting)} wait",
        )
    if kind in (FairQueue, FairSeats):
        _accounts(policy_state, state)
    if kind is FairSeats:
        _seats(policy_state, state)


def _accounts(accounts: Accounts, state: EngineState) -> None:
    """Check that each account has the number of present samples of its client and
    class.
    """
    live = {
        owner: account.live
        for owner, account in accounts.by_owner.items()
        if account.live
    }
    present = Counter(_owner(seq) for seq in (*state.waiting, *state.running.seqs))
    require(live == present, "policy", f"accounts of {live}; there are {dict(present)}")


def _seats(seats: Seats, state: EngineState) -> None:
    """Check that samples that were admitted and have not ended hold a seat."""
    preempted = [seq for seq in state.waiting if seq.preempted]
    admitted = Counter(_owner(seq) for seq in (*preempted, *state.running.seqs))
    held = {
        (level, client): count
        for client, classes in seats.held.items()
        for level, count in classes.items()
    }
    require(held == admitted, "policy", f"seats of {held}; inside are {dict(admitted)}")
    taken = Counter[int]()
    for (level, _), count in admitted.items():
        taken[level] += count
    require(
        dict(seats.taken) == taken, "policy", f"{dict(seats.taken)} taken, not {taken}"
    )


def _owner(seq: Sequence) -> tuple[int, str]:
    return seq.request.priority, seq.request.client
