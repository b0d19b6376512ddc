"""Schedulers that are not what they were: each replaces one function of the core."""

from collections.abc import Callable
from typing import Any

import pytest

from minfer.policies import consult
from minfer.records.sequence import Sequence
from minfer.records.waiting import WaitingQueue

Change = Callable[[pytest.MonkeyPatch], None]


def newest_first(patch: pytest.MonkeyPatch) -> None:
    """Of those in line with the same rank, the last to arrive goes first."""
    first = WaitingQueue.first

    def newest(line: WaitingQueue) -> Sequence:
        rank = first(line).place[0]
        equals = (seq for seq in line if seq.place[0] == rank)
        return max(equals, key=lambda seq: (seq.place[1], -seq.place[2]))

    patch.setattr(WaitingQueue, "first", newest)


def budget_one_less(patch: pytest.MonkeyPatch) -> None:
    """A step takes one token less than it may, if that leaves any."""
    budget = consult.budget

    def less(*about: Any) -> Any:
        found, state = budget(*about)
        return max(1, found - 1), state

    patch.setattr(consult, "budget", less)


def another_victim(patch: pytest.MonkeyPatch) -> None:
    """When blocks run out, the one before the one who had to gives way, if it may."""
    victim = consult.victim

    def before_it(*about: Any) -> Any:
        found, state = victim(*about)
        return max(1, found - 1), state

    patch.setattr(consult, "victim", before_it)


CHANGES: dict[str, Change] = {
    "newest first among equals": newest_first,
    "budget one less": budget_one_less,
    "another victim": another_victim,
}
