"""What is found under a key are the tokens that were computed."""

import pytest
from attrs import evolve

from minfer.records.messages import (
    Submit,
)
from minfer.records.state import initial
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from tests.core.test_engine import CONFIG, ask
from tests.core.testing.turns import (
    played,
)


def test_content_of_shared_blocks_is_compared_by_tokens() -> None:
    twins = tuple(
        Submit(ask(name, 9, 9, prompt=(1, 2, 3, 4, 5, 6, 7, 8, 9))) for name in "ab"
    )
    ledger = Ledger(CONFIG, initial(CONFIG))
    turns = played(CONFIG, twins[:1], (), (), (), twins[1:])
    for turn in turns:
        if turn.number == 4:
            break
        ledger.take(turn.events, turn.transition)
    blocks = ledger.contents.blocks
    assert len(blocks) == 2
    for block, one in blocks.items():
        blocks[block] = evolve(one, tokens=(*one.tokens[:-1], 77))
    with pytest.raises(InvariantError, match="shared content"):
        ledger.take(turn.events, turn.transition)


def test_a_block_that_was_not_computed_is_not_published() -> None:
    ledger = Ledger(CONFIG, initial(CONFIG))
    for turn in played(CONFIG, (Submit(ask("a", 9, 30)),)):
        ledger.take(turn.events, turn.transition)
        if ledger.contents.blocks:
            break
    books, contents = ledger.books, ledger.contents
    contents.blocks.clear()
    contents.check(books, ledger.state)
    assert len(contents.blocks) == 2
    contents.blocks.clear()
    books.seats[0].kv = 7
    with pytest.raises(InvariantError, match="publish after write"):
        contents.check(books, ledger.state)
