"""How many pages a newcomer with a state takes at least."""

from attrs import evolve

from minfer.planning.start_state import _least_new_pages
from minfer.records.config import CacheGroup
from tests.core.test_engine import CONFIG

GROUPS = (CacheGroup(pages=2), CacheGroup(window=8), CacheGroup(state=True, pages=2))


def test_of_groups_with_a_window_one_new_block_is_counted() -> None:
    config = evolve(CONFIG, groups=GROUPS)
    assert _least_new_pages(config, hit=2, num_known=26) == 5 * 2 + 1
    assert _least_new_pages(config, hit=2, num_known=28) == 5 * 2 + 1
    assert _least_new_pages(config, hit=2, num_known=29) == 6 * 2 + 1
