"""The records of tiers."""

from typing import Any

import pytest

from minfer.records.tiers import HostTier, RecentKeys, Tiers, Transfer, TransferKind
from minfer.values.checks import MAX_INT64, ConfigError


def moving(number: int, sample: Any, *waiting: str) -> Transfer:
    store = TransferKind.STORE_TO_HOST
    kind = store if sample is None else TransferKind.LOAD_FROM_HOST
    return Transfer(number, kind, (), (), (), sample, frozenset(waiting))


def test_a_request_that_leaves_waits_for_no_transfer() -> None:
    tiers = Tiers(
        transfers=(
            moving(0, ("a", 0), "a", "b"),
            moving(1, None),
            moving(2, ("c", 1), "c", "a"),
        )
    )
    left = tiers.without(["a"]).transfers
    assert [one.sample for one in left] == [None, None, ("c", 1)]
    assert [{*one.waiting} for one in left] == [{"b"}, set(), {"c"}]
    assert tiers.without(["d"]) is tiers


def test_old_keys_are_known_where_there_are_no_young_ones() -> None:
    known = RecentKeys().add((b"a", b"b", b"c"), 4)
    assert known
    assert known.discard((b"c",))
    assert not known.discard((b"a", b"b", b"c"))


@pytest.mark.parametrize("name", ["load_seconds", "page_seconds", "token_seconds"])
def test_costs_have_bounds(name: str) -> None:
    costs: list[Any] = [0, MAX_INT64]
    for cost in costs:
        assert getattr(HostTier(pages=1, **{name: cost}), name) == cost
    costs = [-0.1, 1.01 * MAX_INT64, float("nan"), True]
    for cost in costs:
        with pytest.raises(ConfigError, match=name):
            HostTier(pages=1, **{name: cost})
