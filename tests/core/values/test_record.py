"""A record with some fields changed, however its class keeps them."""

from typing import Any

import pytest
from attrs import field, frozen, validators

from minfer.values.record import evolve


@frozen
class Slotted:
    x: int
    y: int = 2


@frozen(slots=False)
class Bare:
    x: int
    y: int = 2


@frozen(slots=False)
class Checked:
    x: int = field(validator=validators.ge(0))
    y: int = field(default=2, converter=int)


@frozen(slots=False)
class Late:
    x: int
    y: int = 2

    def __attrs_post_init__(self) -> None:
        if self.x > self.y:
            raise ValueError("x is above y")


@pytest.mark.parametrize("cls", [Slotted, Bare, Checked, Late])
def test_only_what_is_named_is_changed(cls: Any) -> None:
    one = cls(1)
    two = evolve(one, y=7)
    assert (one, two) == (cls(1), cls(1, 7))
    assert type(two) is cls
    assert evolve(one) == one
    with pytest.raises(KeyError):
        evolve(one, z=1)


def test_what_a_class_checks_it_checks_of_a_changed_one_too() -> None:
    with pytest.raises(ValueError, match="x"):
        evolve(Checked(1), x=-1)
    assert evolve(Checked(1), y="3").y == 3
    with pytest.raises(ValueError, match="above"):
        evolve(Late(1), x=5)
