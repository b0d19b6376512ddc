"""In which order free blocks are handed out."""

from minfer.blocks.ownership import Blocks, Transaction
from minfer.blocks.pool import Pool
from tests.core.blocks.test_prefix import take


def test_taking_and_giving_back() -> None:
    change = Transaction(Blocks(Pool(200)))
    first = take(change, 150)
    assert first == tuple(range(150))
    assert take(change, 51) is None
    assert take(change, 0) == ()
    change.pool.release(first[:70])
    change.pool.release(first[70:75])
    change.pool.release(first[75:])
    pool = change.done()
    assert pool.available == 200
    again = take(Transaction(pool), 200)
    assert again is not None
    assert sorted(again) == list(range(200))


def test_freed_blocks_are_put_by_as_a_run_when_there_are_too_many_at_hand() -> None:
    change = Transaction(Blocks(Pool(12, run=4)))
    assert take(change, 10) == tuple(range(10))
    change.pool.release((0, 1, 2))
    change.pool.release((3,))
    assert change.pool.spare == (3, 0, 1, 2)
    change.pool.release((4, 5))
    pool = change.done()
    assert (pool.pool.spare, dict(pool.pool.freed)) == ((4, 5), {0: (3, 0, 1, 2)})
    change = Transaction(pool)
    assert take(change, 2) == (4, 5), (
        "what is at hand goes first, and runs stay as they are"
    )
    assert (change.pool.spare, len(change.pool.freed), change.pool.free) == ((), 1, 6)
    assert take(change, 3) == (3, 0, 1)
    assert (change.pool.spare, len(change.pool.freed)) == ((2,), 0)
    assert take(change, 3) == (2, 10, 11), "then those that were never used"
    assert take(change, 1) is None
