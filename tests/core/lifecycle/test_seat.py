"""How a sequence takes a seat: its columns, and when to look at them again."""

from attrs import evolve

from minfer.lifecycle.seat import growth_mark, publish_mark
from minfer.records.messages import Submit
from tests.core.lifecycle.test_preempt import only
from tests.core.test_engine import CONFIG, Bench, ask


def test_a_seat_counts_from_what_is_known_and_ends_with_the_limit_or_the_context() -> (
    None
):
    for most, last in ((9, 14), (500, 63)):
        bench = Bench()
        bench.give(Submit(ask("a", 6, most)))
        run = only(bench)
        assert (run.num_known_at_admission, run.known, run.starts) == ((6,), (6,), (0,))
        assert run.last_index == (last,)
        assert run.tails == (run.seqs[0].history[4:],)
        bench.drain()
        assert bench.ended["a", 0].length == min(most, 58)


WIDE = evolve(CONFIG, block_size=8, num_blocks=64)


def test_a_table_is_marked_a_quarter_block_before_its_end() -> None:
    assert growth_mark(WIDE, 3, 100) == 22
    assert growth_mark(WIDE, 3, 21) == 21
    assert growth_mark(evolve(WIDE, block_size=1), 3, 100) == 3
    assert growth_mark(evolve(WIDE, block_size=4), 3, 100) == 11
    assert growth_mark(evolve(WIDE, block_size=16), 3, 100) == 44


def test_a_sequence_is_ripe_when_a_further_block_is_full_and_at_its_end() -> None:
    assert publish_mark(WIDE, 2, 100) == 25
    assert publish_mark(WIDE, 2, 24) == 25
    assert publish_mark(WIDE, 2, 10) == 11
