"""Checks of parameters and settings, their common bounds, and the errors that name what
is wrong.

`check_*` look at one value of a request and raise ParameterError. `number` and `flag` are
validators of attrs fields of settings, and raise ConfigError.
"""

from typing import Any, Final

from attrs import Attribute

# Whole numbers are those that journals and drivers can hold.
MIN_INT64: Final = -(2**63)
MAX_INT64: Final = 2**63 - 1
LARGEST_TOKEN: Final = 2**32 - 1
MAX_PRIORITY: Final = 2**53  # ranks are floats, in which larger ones would not differ


class ParameterError(ValueError):
    """A parameter is out of its range; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class ConfigError(ValueError):
    """A setting is out of range or contradicts another one."""


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether a value is a number, `whole` or not; booleans are not."""
    kind = int if whole else int | float
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(
    value: Any, param: str, low: float, high: float, *, whole: bool = False
) -> None:
    """Raise ParameterError unless `value` is a number, `whole` or not, from `low` to
    `high`.
    """
    if not is_number(value, whole=whole):
        # other values may not be printable
        plain = isinstance(value, str | float | bool)
        shown = f"{value!r:.80}" if plain else f"a {type(value).__name__}"
        raise ParameterError(param, f"must be a {'whole ' * whole}number, not {shown}")
    if not low <= value <= high:  # NaN is not
        # Python refuses to write out integers of thousands of digits.
        huge = isinstance(value, int) and value.bit_length() > 200
        shown = "a number that large" if huge else repr(value)
        raise ParameterError(param, f"must be from {low} to {high}, not {shown}")


def check_whole(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a whole number that fits into 64 bits."""
    check_number(value, param, MIN_INT64, MAX_INT64, whole=True)


def check_flag(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is true or false."""
    if type(value) is not bool:
        raise ParameterError(
            param, f"must be true or false, not a {type(value).__name__}"
        )


def check_text(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a plain string: a subclass could do
    anything.
    """
    if type(value) is not str:
        raise ParameterError(param, f"must be a string, not a {type(value).__name__}")


def check_tokens(value: Any, param: str, max_tokens: int) -> None:
    """Raise ParameterError unless `value` is a tuple of at most `max_tokens` token
    ids.
    """
    if type(value) is not tuple or len(value) > max_tokens:
        raise ParameterError(param, f"must be a tuple of at most {max_tokens} token ids")
    for token in value:
        check_number(token, param, 0, LARGEST_TOKEN, whole=True)


def number(
    low: float, high: float = MAX_INT64, *, above: bool = False, prefix: str = ""
) -> Any:
    """A field's validator: a finite number from `low` or above it to `high`, an integer
    if its type is int; None is allowed if it is the default. Errors begin with `prefix`.
    """

    def check(_: object, attribute: "Attribute[Any]", value: Any) -> None:
        if value is None and attribute.default is None:
            return
        is_integer = attribute.type in (int, int | None)
        if (
            not is_number(value, whole=is_integer)
            or not low <= value <= high
            or (above and value == low)
        ):
            expected = (
                f"a {'whole ' * is_integer}number {'above' if above else 'from'} {low}"
            )
            expected += f" to {high}" if high < MAX_INT64 else ""
            # Python refuses to write out integers of thousands of digits.
            huge = isinstance(value, int) and abs(value) > MAX_INT64
            shown = "one that large" if huge else f"{value!r:.80}"
            raise ConfigError(f"{prefix}{attribute.name} must be {expected}, not {shown}")

    return check


def flag(_: object, attribute: "Attribute[Any]", value: Any) -> None:
    """A field's validator: true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be true or false, not {value!r:.80}")
