"""How much of what can wait a turn does."""

from attrs import evolve

from minfer.planning.spread import deferrable_blocks
from tests.core.test_engine import CONFIG

WIDE = evolve(CONFIG, block_size=8, num_blocks=64)


def test_a_turn_handles_four_times_what_its_tokens_fill_and_at_least_two() -> None:
    assert deferrable_blocks(WIDE, 100) == 50
    assert deferrable_blocks(WIDE, 5) == 2
    assert deferrable_blocks(WIDE, 1) == 2
