"""After a good step less is left."""

from copy import deepcopy

import pytest

from minfer.records.state import initial
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from minfer.testing.progress import check_progress
from tests.core.test_engine import CONFIG
from tests.core.testing.turns import (
    STEADY,
    decoding,
    played,
)


def test_who_gives_way_may_have_more_left_while_others_before_it_are_in_flight() -> None:
    first, last = ("first", 0), ("last", 0)
    before, after = (
        {first: (3, 0, 0), last: (9, 7, 0)},
        {first: (3, 0, 0), last: (9, 7, 2)},
    )
    check_progress(before, after, {last})
    idle = {
        name: {**left, first: (3, 0, 1)}
        for name, left in (("was", before), ("is", after))
    }
    for wrong in (
        (before, after, ()),
        (before, after, {first}),
        (idle["was"], idle["is"], {last}),
    ):
        with pytest.raises(InvariantError, match="is left, and was"):
            check_progress(*wrong)


def test_a_good_step_after_which_as_much_is_left_as_before_is_named() -> None:
    turns = played(CONFIG, STEADY)
    ledger = Ledger(CONFIG, initial(CONFIG))
    for turn in turns:
        if decoding(turn):
            break
        ledger.take(turn.events, turn.transition)
    still, less = deepcopy(ledger), deepcopy(ledger)
    still.measure = {
        name: (tokens - 1, 1, 0) for name, (tokens, _, _) in ledger.measure.items()
    }
    less.measure = dict.fromkeys(ledger.measure, (0, 0, 0))
    for wrong, why in ((still, "nothing has changed"), (less, "is left, and was")):
        with pytest.raises(InvariantError, match=f"progress: .*{why}"):
            wrong.take(turn.events, turn.transition)
    ledger.take(turn.events, turn.transition)
