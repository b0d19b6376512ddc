"""Copies that are wrong on purpose are named."""

import pytest

from tests.core.testing.turns import FORKS, Bite, bitten, copied, copies, named, planned

BITES = (
    Bite("copy: .* from where", copies, lambda t: planned(t, copies=()), script=(FORKS,)),
    Bite("copy: .* sibling", copies, lambda t: copied(t, source=29), script=(FORKS,)),
    Bite("copy: .* sibling", copies, lambda t: copied(t, count=3), script=(FORKS,)),
    Bite("copy", copies, lambda t: copied(t, target=29), script=(FORKS,)),
)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)
