"""What a setting may be: validators of the fields of records of settings."""

from typing import Any

from attrs import Attribute

from minfer.checks import MOST


class ConfigError(ValueError):
    """A setting is out of range or contradicts another one."""


def number(low: float, *, above: bool = False, of: str = "") -> Any:
    """A field's validator: a finite number from `low` or above it, whole if its type is
    int.
    """

    def check(_: object, attribute: "Attribute[Any]", value: Any) -> None:
        whole = attribute.type is int
        right = isinstance(value, int if whole else int | float) and not isinstance(
            value, bool
        )
        if not right or not low <= value <= MOST or (above and value == low):
            want = f"a {'whole ' * whole}number {'above' if above else 'from'} {low}"
            # Python refuses to write out integers of thousands of digits.
            huge = isinstance(value, int) and abs(value) > MOST
            given = "one that large" if huge else repr(value)
            raise ConfigError(f"{of}{attribute.name} must be {want}, not {given}")

    return check


def flag(_: object, attribute: "Attribute[Any]", value: Any) -> None:
    """A field's validator: true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be true or false, not {value!r:.80}")
