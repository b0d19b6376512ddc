"""Checks of what users say, and the error that names what was wrong."""

from typing import Any, Final

# Whole numbers are those that journals and drivers can hold.
LEAST: Final = -(2**63)
MOST: Final = 2**63 - 1
LARGEST_TOKEN: Final = 2**32 - 1


class ParameterError(ValueError):
    """A parameter is out of its range; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def check_number(
    value: Any, param: str, low: float, high: float, *, whole: bool = False
) -> None:
    """Raise ParameterError unless `value` is a number, `whole` or not, from `low` to
    `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        plain = isinstance(
            value, str | float | bool
        )  # what else there is may not be printable
        given = repr(value) if plain else f"a {type(value).__name__}"
        raise ParameterError(param, f"must be a {'whole ' * whole}number, not {given}")
    if not low <= value <= high:  # NaN is not
        # Python refuses to write out integers of thousands of digits.
        huge = isinstance(value, int) and value.bit_length() > 200
        given = "a number that large" if huge else repr(value)
        raise ParameterError(param, f"must be from {low} to {high}, not {given}")


def check_whole(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a whole number that fits into 64 bits."""
    check_number(value, param, LEAST, MOST, whole=True)


def check_flag(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is true or false."""
    if type(value) is not bool:
        raise ParameterError(
            param, f"must be true or false, not a {type(value).__name__}"
        )


def check_text(value: Any, param: str) -> None:
    """Raise ParameterError unless `value` is a string; a subclass of it may
    do anything.
    """
    if type(value) is not str:
        raise ParameterError(param, f"must be a string, not a {type(value).__name__}")


def check_tokens(value: Any, param: str, most: int) -> None:
    """Raise ParameterError unless `value` is a tuple of at most so many token ids."""
    if type(value) is not tuple or len(value) > most:
        raise ParameterError(param, f"must be a tuple of at most {most} token ids")
    for token in value:
        check_number(token, param, 0, LARGEST_TOKEN, whole=True)
