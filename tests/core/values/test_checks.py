"""Validators of records' fields."""

import pytest
from attrs import field, frozen

from minfer.values.checks import ConfigError, number


@frozen
class Sizes:
    """Fields whose types say which numbers they take."""

    count: int | None = field(default=None, validator=number(1))
    size: int = field(default=1, validator=number(1))
    share: float = field(default=1, validator=number(0))


def test_fields_of_whole_numbers_take_no_others() -> None:
    assert Sizes(count=2, size=3, share=0.5) == Sizes(2, 3, 0.5)
    assert Sizes().count is None
    for field_of_whole in ("count", "size"):
        with pytest.raises(ConfigError, match=f"{field_of_whole} must be a whole number"):
            Sizes(**{field_of_whole: 1.5})  # type: ignore[arg-type]  # that is refused
