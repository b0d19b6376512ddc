"""Where each setting's range ends, and which settings contradict each other."""

import math
from typing import Any

import pytest
from attrs import evolve, field, frozen

from minfer.records.config import MOST_GROUPS, CacheGroup, EngineConfig
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state_keeping import StateKeeping
from minfer.values.checks import ConfigError, number

GOOD = EngineConfig(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("num_blocks", 1),
        ("block_size", 1),
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 4),
        ("vocab_size", 1),
        ("depth", 1),
        ("max_failures", 1),
        ("max_waiting", 1),
        ("watermark", 0),
        ("freed_run", 1),
    ],
)
def test_the_least_of_each_setting_is_taken_and_less_is_not(
    name: str, least: int
) -> None:
    right: dict[str, Any] = {name: least}
    assert getattr(evolve(GOOD, **right), name) == least
    for value in (least - 1, -1, float(least + 1), math.nan, True, "5", None):
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=name):
            evolve(GOOD, **wrong)


def test_a_step_has_a_token_for_every_row() -> None:
    assert evolve(GOOD, max_num_seqs=8).max_num_seqs == 8
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        evolve(GOOD, max_num_seqs=9)


def test_a_group_has_a_window_or_none_and_pages() -> None:
    assert CacheGroup() == CacheGroup(0, 1)
    assert CacheGroup(2, 1).window == 2
    wrong: list[dict[str, Any]] = [{"window": 1}, {"window": -1}, {"window": 2.0}]
    for fields in (*wrong, {"pages": 0}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            CacheGroup(**fields)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ((), "at least one"),
        ([CacheGroup()], "be a tuple"),
        ((CacheGroup(), None), "be a tuple"),
        ((CacheGroup(), CacheGroup(pages=2)), "different windows"),
        ((CacheGroup(4), CacheGroup(), CacheGroup(4)), "different windows"),
        (tuple(map(CacheGroup, range(2, MOST_GROUPS + 3))), "at most 16"),
    ],
)
def test_groups_have_different_windows(groups: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"groups must .*{why}"):
        evolve(GOOD, groups=groups)


def test_what_groups_come_to() -> None:
    one, windows = evolve(GOOD, block_size=4), (CacheGroup(6, pages=2), CacheGroup())
    several = evolve(one, groups=windows)
    assert (one.by_chunk, one.block_pages) == (False, 1)
    assert (several.by_chunk, several.block_pages) == (True, 3)
    # Positions p - 5 to p are in three blocks at most.
    assert [several.most_pages(blocks) for blocks in (1, 3, 4)] == [3, 9, 10]


STATE = CacheGroup(state=True, pages=3)


def test_a_state_group_has_no_window() -> None:
    assert (STATE.window, STATE.pages, CacheGroup().state) == (0, 3, False)
    with pytest.raises(ConfigError, match="window must be 0 in a state group, not 4"):
        CacheGroup(window=4, state=True)
    with pytest.raises(ConfigError, match="state must be true or false"):
        CacheGroup(state=1)  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize(
    "groups", [(STATE,), (STATE, CacheGroup()), (CacheGroup(), STATE, STATE)]
)
def test_the_state_group_is_one_and_the_last(groups: tuple[CacheGroup, ...]) -> None:
    with pytest.raises(ConfigError, match="at most one state group: the last"):
        evolve(GOOD, groups=groups)


def test_a_state_counts_once_whatever_the_length() -> None:
    config = evolve(GOOD, groups=(CacheGroup(pages=2), STATE))
    assert (config.state_group, config.state_pages) == (1, 3)
    assert config.block_groups == (CacheGroup(pages=2),)
    assert (config.block_pages, config.by_chunk) == (2, False)
    assert [config.most_pages(blocks) for blocks in (1, 4)] == [5, 11]
    windows = evolve(config, block_size=4, groups=(CacheGroup(6, pages=2), STATE))
    assert [windows.most_pages(blocks) for blocks in (1, 3, 4)] == [5, 9, 9]
    without = evolve(GOOD, groups=(CacheGroup(pages=2),))
    assert (without.state_group, without.state_pages) == (None, 0)
    assert without.block_groups == without.groups


def test_a_pool_has_room_for_a_state_and_a_block() -> None:
    groups = CacheGroup(pages=2), CacheGroup(state=True, pages=6)
    assert evolve(GOOD, groups=groups).num_blocks == 8
    with pytest.raises(ConfigError) as caught:
        evolve(GOOD, groups=groups, num_blocks=7)
    assert str(caught.value) == (
        "num_blocks (7) must be at least 8: the recurrent layers' state of a sequence "
        "takes 6 pages, and a block of the other layers 2; give the cache more memory "
        "(--kv-cache-memory-bytes)"
    )


def test_which_states_are_kept_has_bounds() -> None:
    assert StateKeeping(stride_blocks=0, decode_stride_blocks=0, max_share=1).max_share
    wrong: list[dict[str, Any]] = [
        {"stride_blocks": -1},
        {"decode_stride_blocks": 0.5},
        {"max_share": 1.1},
        {"max_share": math.nan},
    ]
    for fields in wrong:
        with pytest.raises(ConfigError, match=f"states: {next(iter(fields))}"):
            StateKeeping(**fields)
    with pytest.raises(ConfigError, match="states must be StateKeeping"):
        evolve(GOOD, states=None)  # type: ignore[arg-type]  # what is refused


def test_a_draft_model_may_draft_beside_a_state_group() -> None:
    how = Speculation(drafter=DEVICE, drafts=2, adaptive=False)
    config = evolve(GOOD, groups=(CacheGroup(), STATE), speculation=how)
    assert config.speculation == how


def test_a_draft_model_knows_one_group() -> None:
    groups = CacheGroup(), CacheGroup(8)
    for drafter, config in ((HOST, evolve(GOOD, groups=groups)), (DEVICE, GOOD)):
        how = Speculation(drafter=drafter, drafts=2, adaptive=False)
        assert evolve(config, speculation=how).speculation == how
    how = Speculation(drafter=DEVICE, drafts=2, adaptive=False)
    with pytest.raises(
        ConfigError, match=r"a draft model or head cannot draft .* use lookups"
    ):
        evolve(GOOD, groups=groups, speculation=how)


def test_a_reserve_leaves_a_block() -> None:
    assert evolve(GOOD, watermark=7).watermark == 7
    with pytest.raises(ConfigError, match="watermark"):
        evolve(GOOD, watermark=8)


@frozen
class Numbers:
    """Fields of each kind."""

    above: float = field(default=1.0, validator=number(0, above=True, prefix="numbers: "))
    least: float = field(default=1.0, validator=number(0))
    whole: int = field(default=1, validator=number(-2))
    most: int = field(default=1, validator=number(1, 5))


def test_a_number_is_finite_of_its_kind_and_from_its_least_on() -> None:
    assert Numbers(1e-9, 0, -2) == Numbers(1e-9, 0.0, -2)
    assert Numbers(whole=2**63 - 1).whole == 2**63 - 1
    assert Numbers(most=5).most == 5
    wrong: list[dict[str, Any]] = [
        {"above": 0},
        {"above": -1},
        {"above": math.inf},
        {"above": math.nan},
        {"above": True},
        {"least": -1e-9},
        {"least": math.inf},
        {"least": "1"},
        {"whole": -3},
        {"whole": 1.0},
        {"whole": 2**63},
        {"most": 6},
    ]
    for fields in wrong:
        with pytest.raises(ConfigError, match=next(iter(fields))):
            Numbers(**fields)
    with pytest.raises(ConfigError, match=r"^numbers: above must be a number above 0"):
        Numbers(0)
    with pytest.raises(ConfigError, match=r"^whole must be a whole number from -2, not"):
        Numbers(whole=-3)
    with pytest.raises(ConfigError, match=r"^most must be a whole number from 1 to 5, "):
        Numbers(most=6)


def test_a_wrong_value_is_quoted_unless_it_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"not 0$"):
        evolve(GOOD, num_blocks=0)
    with pytest.raises(ConfigError, match=r"not one that large$"):
        evolve(GOOD, num_blocks=-(10**400))
